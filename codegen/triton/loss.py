"""The head and its losses on a GPU: kernels for the ops of `compiler/dialect/loss.py`, `log_probs.py`,
`loss_shards.py`.

The ops stay what they are and run these kernels on CUDA tensors, so that a call outside of a compiled step has them
too; the lowering says so. Nothing here needs a GPU or Triton to be imported; the kernels are loaded at the first call.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from moec.codegen.triton.under_op import value_of
from moec.compiler import dialect  # noqa: F401  registers the ops
from moec.compiler.dialect import log_probs, loss, loss_shards
from moec.compiler.dialect.head import REFERENCE, Kernels
from moec.compiler.dialect.registry import nbytes, size_hint
from moec.compiler.lower import Implementation, argument_of, register_implementation
from moec.compiler.workspace import register_workspace

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_OPS: Any = torch.ops.moec


def refusal(node: fx.Node) -> str:
    """Why the kernels do not fit a call of one of the ops; '' when they fit."""
    return reason(*(value_of(argument_of(node, argument.name)) for argument in node.target._schema.arguments))  # type: ignore[union-attr]


def reason(*arguments: Any) -> str:
    """The same for the arguments of a call."""
    floats = [value for value in arguments if isinstance(value, Tensor) and value.is_floating_point()]
    devices = {value.device.type for value in floats}
    if devices != {"cuda"}:
        return f"hidden is on {', '.join(sorted(devices))}, the kernels need a CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 8:
        return "the kernels are built for compute capability 8.0 and later"
    matrices = {value.dtype for value in floats if value.dim() == 2}
    if len(matrices) > 1 or not matrices <= set(_DTYPES):
        found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in matrices))
        return f"hidden and weight are {found}, expected one of bfloat16, float16, float32"
    return ""


def _on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """An op's function of kernels and arguments, with the kernels that fit."""

    def run(*arguments: Any) -> Any:
        return function(REFERENCE if reason(*arguments) else _kernels(), *arguments)

    return run


def _kernels() -> Kernels:
    from moec.codegen.triton import loss_launch

    return loss_launch.KERNELS


def _sum_backward(*arguments: Any) -> Any:
    from moec.codegen.triton import loss_launch

    return loss.sum_backward(*arguments) if reason(*arguments) else loss_launch.sum_backward(*arguments)


def workspace(node: fx.Node) -> int | None:
    """Bytes that the kernels hold beyond inputs and results: a chunk of logits in the dtype of hidden, and sums.

    Sums of gradients are float32. Where results are narrower, they are made of the sums when the last chunk is gone.
    """
    if refusal(node):
        return None
    if all(argument.name != "rows" for argument in node.target._schema.arguments):  # type: ignore[union-attr]
        return 0
    hidden, weight, rows, columns = (value_of(argument_of(node, n)) for n in ("hidden", "weight", "rows", "columns"))
    chunk = min(size_hint(hidden.shape[0]), rows) * min(size_hint(weight.shape[0]), columns) * hidden.element_size()
    rounded = [
        value for value in node.meta["val"] if value.dim() == 2 and value.element_size() < torch.float32.itemsize
    ]
    results = sum(nbytes(value) for value in rounded)
    sums = sum(nbytes(value) // value.element_size() * torch.float32.itemsize for value in rounded)
    return int(max(chunk + sums - results, sums))


TABLE: dict[Any, Callable[..., Any]] = {
    _OPS.linear_cross_entropy.default: _on_device(loss.forward),
    _OPS.linear_cross_entropy_backward.default: _on_device(loss.backward),
    _OPS.linear_cross_entropy_sum.default: _on_device(loss.sum_forward),
    _OPS.linear_cross_entropy_sum_backward.default: _sum_backward,
    _OPS.token_log_probs.default: _on_device(log_probs.forward),
    _OPS.token_log_probs_backward.default: _on_device(log_probs.backward),
    _OPS.logit_statistics.default: _on_device(loss_shards.forward),
    _OPS.logit_statistics_backward.default: _on_device(loss_shards.backward),
}

for _op, _function in TABLE.items():
    torch.library.register_kernel(_op, "cuda", _function)
    register_implementation(_op, Implementation("triton", _op, refusal))
    register_workspace(_op, workspace)
