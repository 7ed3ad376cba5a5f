"""Every private torch import of moec, in one place; tests/test_torch_compat.py probes each on the installed torch."""

from __future__ import annotations

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
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen

__all__ = [
    "AOTInput",
    "AOTOutput",
    "BoxedCodeGen",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "ShapeEnv",
    "TangentAOTInput",
    "aot_autograd",
    "aot_export_joint_with_descriptors",
    "default_partition",
    "enable_python_dispatcher",
    "make_fx",
    "unset_fake_temporarily",
]
