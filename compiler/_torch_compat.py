"""Every private torch import of moec, in one place; tests/test_torch_compat.py probes each on the installed torch."""

from __future__ import annotations

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
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = [
    "AOTInput",
    "AOTOutput",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "ShapeEnv",
    "TangentAOTInput",
    "aot_export_joint_with_descriptors",
]
