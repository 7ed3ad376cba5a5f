"""Fused expert layers on a GPU: kernels for `moec::expert_slots`, `expert_up`, `expert_down` and their gradients.

What the kernels of `expert_launch.py` do one by one, put together per op; the activation's text becomes the source that
they apply (`epilogue_printer.py`). As in `experts.py`, the ops stay what they are and run the kernels on CUDA tensors
that fit. Gathered rows live only while an op runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from moec.codegen.triton import experts
from moec.codegen.triton.epilogue_printer import epilogue_of
from moec.codegen.triton.under_op import argument_names, refusal_by, register_under_ops, value_of
from moec.compiler.dialect._define import asked_for
from moec.compiler.dialect.registry import size_hint
from moec.compiler.expression import parse
from moec.compiler.lower import argument_of

_OPS: Any = torch.ops.moec
_PARTS = 2
"""The most parts of a row that the kernels cut a product into."""


def reason(op: Any, *arguments: Any) -> str:
    """Why the kernels do not fit a call of one of the ops; '' when they fit."""
    given = dict(zip(argument_names(op), arguments, strict=False))
    found = experts.reason(op, *arguments)
    if found or "activation" not in given:
        return found or ("" if _on_cuda(arguments) else "its operands are not on a CUDA device")
    parts = len(parse(given["activation"]).inputs)
    return f"the activation has {parts} parts, the kernels know up to {_PARTS}" if parts > _PARTS else ""


def _slots(indices: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    return _kernels().slots(indices, count)


def _up(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    order: Tensor | None,
    position: Tensor | None,
    bias: Tensor | None,
    token_weights: Tensor | None,
    act_weights: Tensor | None,
    activation: str,
    choices: int,
    interleaved: bool,
    transposed: bool,
    keep_pre: bool = True,
    keep_act: bool = True,
) -> tuple[Tensor, Tensor]:
    kernels = _kernels()
    rows = x if position is None else kernels.spread(x, position, choices, token_weights)
    if not keep_act:
        pre = kernels.linear(rows, weight, offsets, bias, transposed=transposed)
        return pre if keep_pre else x.new_empty(0), x.new_empty(0)
    return kernels.up(
        rows, weight, offsets, bias, order=order, weights=act_weights, transposed=transposed, interleaved=interleaved,
        epilogue=epilogue_of(activation), keep_pre=keep_pre,
    )  # fmt: skip


def _up_backward(
    grad_pre: Tensor,
    x: Tensor | None,
    weight: Tensor,
    offsets: Tensor,
    order: Tensor | None,
    position: Tensor | None,
    bias: Tensor | None,
    token_weights: Tensor | None,
    choices: int,
    transposed: bool,
    needed: Sequence[bool] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kernels, (of_x, of_weight, of_bias, of_token_weights) = _kernels(), asked_for(needed, 4)
    of_token_weights = of_token_weights and token_weights is not None
    grad_x, grad_weight, grad_bias = grad_pre.new_empty(0), weight.new_empty(0), grad_pre.new_empty(0)
    grad_token_weights = (grad_pre if token_weights is None else token_weights).new_empty(0)
    if of_weight:
        assert x is not None
        rows = x if position is None else kernels.spread(x, position, choices, token_weights)
        grad_weight = kernels.weight_gradient(grad_pre, rows, offsets, transposed=transposed)
        del rows  # before the rows of the other gradient come
    if of_x or of_token_weights:
        grad_x = kernels.linear(grad_pre, weight, offsets, transposed=not transposed)
        if of_token_weights:
            assert x is not None
            grad_token_weights = kernels.token_weight_gradient(x, grad_x, order, token_weights)
        if position is not None:
            grad_x = kernels.combine(grad_x, position, token_weights, choices) if of_x else grad_pre.new_empty(0)
    if of_bias and bias is not None:
        grad_bias = kernels.bias_gradient(grad_pre, offsets)
    return grad_x, grad_weight, grad_bias, grad_token_weights


def _down(
    pre: Tensor | None,
    act: Tensor,
    weight: Tensor,
    offsets: Tensor,
    order: Tensor | None,
    position: Tensor | None,
    bias: Tensor | None,
    weights: Tensor | None,
    activation: str,
    interleaved: bool,
    transposed: bool,
    before: bool = False,
) -> Tensor:
    kernels = _kernels()
    rows = kernels.linear(act, weight, offsets, bias, transposed=transposed)
    if position is None or weights is None:
        return rows
    return kernels.combine(rows, position, None if before else weights, weights.shape[1])


def _down_backward(
    grad_y: Tensor,
    pre: Tensor,
    weight: Tensor,
    offsets: Tensor,
    order: Tensor | None,
    position: Tensor | None,
    bias: Tensor | None,
    weights: Tensor | None,
    activation: str,
    interleaved: bool,
    transposed: bool,
    before: bool = False,
    needed: Sequence[bool] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kernels, (of_pre, of_weight, of_bias, of_weights) = _kernels(), asked_for(needed, 4)
    nothing = pre.new_empty(0)
    rows = grad_y
    if position is not None and weights is not None:
        rows = kernels.spread(grad_y, position, weights.shape[1])
    grad_pre, act, grad_weights = nothing, nothing, nothing
    if of_pre or of_weight or of_weights:
        grad_pre, act, grad_weights = kernels.down_backward(
            rows, weight, offsets, pre, order=order, weights=weights, down_bias=None if before else bias,
            transposed=transposed, interleaved=interleaved, epilogue=epilogue_of(activation), keep_act=of_weight,
        )  # fmt: skip
    if weights is not None and not of_weights:
        grad_weights = weights.new_empty(0)
    grad_weight = weight.new_empty(0)
    if of_weight:
        grad_weight = kernels.weight_gradient(rows, act, offsets, transposed=transposed)
    grad_bias = nothing
    if of_bias and bias is not None:
        grad_bias = kernels.bias_gradient(rows, offsets, order=order, weights=None if before else weights)
    return grad_pre if of_pre else pre.new_empty(0), grad_weight, grad_bias, grad_weights


def _kernels() -> Any:
    from moec.codegen.triton import expert_launch

    return expert_launch


def workspace(node: fx.Node) -> int | None:
    """Bytes that an op holds beyond inputs and results: rows of tokens, and of the hidden width in `expert_down`'s."""
    if refusal(node):
        return None
    given = {name: value_of(argument_of(node, name)) for name in argument_names(node.target)}
    if "indices" in given:
        slots = size_hint(given["indices"].shape[0]) * size_hint(given["indices"].shape[1])
        return 8 * slots + 4 * (given["experts"] + 1) * (slots // 128 + 2)
    weight, transposed = given["weight"], given["transposed"]
    outer, inner = (weight.shape[2], weight.shape[1]) if transposed else (weight.shape[1], weight.shape[2])
    held = {
        _OPS.expert_up.default: inner,
        _OPS.expert_up_backward.default: inner,
        _OPS.expert_down.default: outer,
        _OPS.expert_down_backward.default: outer,
    }[node.target]  # type: ignore[index]
    rows = math.prod(map(size_hint, given["order"].shape)) if given["order"] is not None else 0
    hidden = inner * size_hint(given["pre"].shape[0]) if node.target is _OPS.expert_down_backward.default else 0
    return int(weight.element_size() * (rows * held + hidden))


def _on_cuda(arguments: Sequence[Any]) -> bool:
    return all(value.is_cuda for value in arguments if isinstance(value, Tensor))


refusal = refusal_by(reason)
TABLE: dict[Any, Callable[..., Any]] = {
    _OPS.expert_slots.default: _slots,
    _OPS.expert_up.default: _up,
    _OPS.expert_up_backward.default: _up_backward,
    _OPS.expert_down.default: _down,
    _OPS.expert_down_backward.default: _down_backward,
}
register_under_ops(TABLE, reason, workspace)
