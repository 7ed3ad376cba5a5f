"""Comparing ops with independent formulations, poisoned memory, and the size of intermediates."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def relative_error(value: Tensor, reference: Tensor) -> float:
    """||value - reference|| / ||reference|| in float64; infinite where a zero reference is not met exactly."""
    difference = float((value.double() - reference.double()).norm())
    scale = float(reference.double().norm())
    return difference / scale if scale else (0.0 if difference == 0 else float("inf"))


def assert_close(values: Sequence[Tensor], references: Sequence[Tensor], bound: float = 1e-12) -> None:
    for number, (value, reference) in enumerate(zip(values, references, strict=True)):
        assert value.shape == reference.shape
        error = relative_error(value, reference)
        assert error <= bound, f"value {number}: relative error {error:.2e} > {bound:.0e}"


def value_and_grads(function: Callable[..., Any], inputs: Sequence[Tensor], seed: int = 0) -> list[Tensor]:
    """Results of function(*inputs) and gradients of the inputs for random gradients of the results."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    outputs = function(*leaves)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o) for o in outputs]
    return [*(o.detach() for o in outputs), *torch.autograd.grad(outputs, leaves, grads)]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Uninitialised memory is filled with NaN (floats) or the largest value (integers)."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any tensor had."""

    numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


def dialect_module(name: str) -> ModuleType:
    """A file of the dialect; `dialect.NAME` is the op's function where both share a name."""
    return importlib.import_module(f"moec.compiler.dialect.{name}")
