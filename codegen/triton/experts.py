"""Experts on a GPU: kernels for `moec::permute`, `moec::grouped_linear`, `moec::unpermute` and their gradients.

The ops stay what they are and run these kernels on CUDA tensors, so that a call outside of a compiled step has them
too; the lowering says so. Nothing here needs a GPU or Triton to be imported; the kernels are loaded at the first call.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from moec.codegen.triton.under_op import argument_names, refusal_by, register_under_ops, value_of
from moec.compiler import dialect  # noqa: F401  registers the ops
from moec.compiler.dialect._define import asked_for
from moec.compiler.dialect.registry import size_hint
from moec.compiler.lower import argument_of

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_OPS: Any = torch.ops.moec
# Arguments that are weights of a token's experts, and may be wider than its row.
_WEIGHTS = ("weights", "token_weights", "act_weights")


def reason(op: Any, *arguments: Any) -> str:
    """Why the kernels do not fit a call of one of the ops; '' when they fit."""
    names = argument_names(op)
    floats = {
        name: value
        for name, value in zip(names, arguments, strict=False)
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    elsewhere = sorted({f"{name} is on {value.device.type}" for name, value in floats.items() if not value.is_cuda})
    if elsewhere:
        return f"{elsewhere[0]}, the kernels need a CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9:
        return "the kernels are built for compute capability 9.0 and later"
    found = {value.dtype for name, value in floats.items() if name not in _WEIGHTS}
    if len(found) > 1 or not found <= set(_DTYPES):
        text = ", ".join(f"{name} {str(v.dtype).removeprefix('torch.')}" for name, v in floats.items())
        return f"operands are of several dtypes or of another than bfloat16, float16, float32: {text}"
    return ""


def _permute(x: Tensor, indices: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    kernels = _kernels()
    order, position, offsets = kernels.slots(indices, experts)
    return kernels.spread(x, position, indices.shape[1]), order, offsets


def _permute_backward(grad_rows: Tensor, indices: Tensor, order: Tensor) -> Tensor:
    kernels = _kernels()
    return kernels.combine(grad_rows, kernels.inverse(order), None, indices.shape[1])


def _unpermute(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    kernels = _kernels()
    return kernels.combine(rows, kernels.inverse(order), weights, weights.shape[1])


def _unpermute_backward(grad_y: Tensor, rows: Tensor, order: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return _kernels().combine_backward(grad_y, rows, order, weights)


def _grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    return _kernels().linear(x, weight, offsets, bias, transposed=transposed)


def _grouped_linear_backward(
    grad_y: Tensor,
    x: Tensor | None,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    transposed: bool,
    needed: Sequence[bool] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    kernels, (of_x, of_weight, of_bias) = _kernels(), asked_for(needed, 3)
    of_bias = of_bias and bias is not None
    if of_weight:
        assert x is not None
        grad_weight = kernels.weight_gradient(grad_y, x, offsets, transposed=transposed)
    return (
        kernels.linear(grad_y, weight, offsets, transposed=not transposed) if of_x else grad_y.new_empty(0),
        grad_weight if of_weight else weight.new_empty(0),
        kernels.bias_gradient(grad_y, offsets) if of_bias else grad_y.new_empty(0),
    )


def _kernels() -> Any:
    from moec.codegen.triton import expert_launch

    return expert_launch


def workspace(node: fx.Node) -> int | None:
    """Bytes that the kernels hold beyond inputs and results: lists of tiles, numbers of slots."""
    if refusal(node):
        return None
    offsets = value_of(argument_of(node, "offsets")) if "offsets" in argument_names(node.target) else None
    if offsets is not None:
        rows = size_hint(value_of(argument_of(node, argument_names(node.target)[0])).shape[0])
        return 8 * (rows // 128 + 2) + 16 * size_hint(offsets.shape[0])
    if "indices" in argument_names(node.target) and "experts" in argument_names(node.target):
        count = size_hint(value_of(argument_of(node, "indices")).numel())
        return 16 * count + 4 * (argument_of(node, "experts") + 1) * (count // 128 + 2)
    return 16 * size_hint(value_of(argument_of(node, "order")).shape[0])


refusal = refusal_by(reason)
TABLE: dict[Any, Callable[..., Any]] = {
    _OPS.permute.default: _permute,
    _OPS.permute_backward.default: _permute_backward,
    _OPS.grouped_linear.default: _grouped_linear,
    _OPS.grouped_linear_backward.default: _grouped_linear_backward,
    _OPS.unpermute.default: _unpermute,
    _OPS.unpermute_backward.default: _unpermute_backward,
}
register_under_ops(TABLE, reason, workspace)
