"""Every private torch import of moec, in one place; tests/test_torch_compat.py probes each on the installed torch."""

from __future__ import annotations

import torch
from torch._C import _dispatch_has_computed_kernel_for_dispatch_key, parse_schema
from torch._C import _set_grad_enabled as set_grad_enabled_op
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.descriptors import (
    AOTInput,
    AOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.partitioners import default_partition
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.distributed.distributed_c10d import _register_process_group as register_process_group
from torch.distributed.distributed_c10d import _set_pg_timeout as set_process_group_timeout
from torch.distributed.distributed_c10d import _unregister_process_group as unregister_process_group
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "AOTInput",
    "AOTOutput",
    "BoxedCodeGen",
    "DataDependentOutputException",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "HigherOrderOperator",
    "InputMutationAOTOutput",
    "OpOverload",
    "PlainAOTInput",
    "PlainAOTOutput",
    "ShapeEnv",
    "TangentAOTInput",
    "TorchDispatchMode",
    "aot_autograd",
    "aot_export_joint_with_descriptors",
    "autocast_is_enabled",
    "default_partition",
    "default_store",
    "enable_python_dispatcher",
    "has_kernel",
    "make_fx",
    "parse_schema",
    "pytree",
    "register_process_group",
    "set_grad_enabled_op",
    "set_process_group_timeout",
    "spin",
    "unregister_process_group",
    "unset_fake_temporarily",
]


def autocast_is_enabled(context: torch.autocast) -> bool:
    """Whether entering a `torch.autocast` turns it on; one for a device that is not there does not."""
    return bool(context._enabled)


def has_kernel(op: OpOverload, device: str) -> bool:
    """Whether an op runs on "cpu" or "cuda"; True for other devices, and where this torch was built without CUDA."""
    keys = {"cpu": "CPU"} | ({"cuda": "CUDA"} if torch.backends.cuda.is_built() else {})
    return device not in keys or _dispatch_has_computed_kernel_for_dispatch_key(op.name(), keys[device])


def spin(device: torch.device, seconds: float) -> None:
    """Let a GPU do nothing for about so long, at its highest clock, before what is enqueued next."""
    with torch.cuda.device(device):
        torch.cuda._sleep(int(2e9 * seconds))
