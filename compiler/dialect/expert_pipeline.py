"""Experts as the kernels compute them: expert_slots, expert_up, expert_down.

The same as `permute`, `grouped_linear`, an activation, `grouped_linear` and `unpermute`, cut where kernels are:

1. `expert_slots` sorts the slots (token, choice) by expert; order[r] is the slot of row r, position its inverse.
2. `expert_up` gathers each row's token, multiplies it by its expert's first matrix, adds the bias, and applies the
   activation to the product while it is at hand. It gives both: the product `pre`, and `act`.
3. `expert_down` multiplies the activated rows by the second matrix, and adds up the weighted rows of each token.

Backward reads `pre`, never `act` nor the rows before they are added up: act is made again from pre, and with t the
gradient of a token times the second matrix, t * act summed is the gradient of the row's router weight. So `expert_down`
takes both of them, the forward act, the backward pre, and the gradient flows through pre. A plan keeps pre, or has
`expert_up` run again.

Without an order, rows come and go as they are, for example from and to other ranks. Rows past offsets[-1] are padding:
they give zeros and get zero gradients. `activation` is a pointwise expression (`compiler/expression.py`) whose inputs
are the parts of a row of pre, one after the other or interleaved.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moec.compiler.dialect._define import asked_for, define_op, math_dtype
from moec.compiler.dialect.experts import grouped_linear, membership, sorted_slots, unpermute
from moec.compiler.expression import Expression, parse

_OPS = torch.ops.moec


def expert_slots(indices: Tensor, *, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots sorted by expert, stably: indices int [N,k] -> order int64 [N*k], position int64 [N*k], offsets int32 [E].

    Raises IndexError on CPU for an index out of range.
    """
    return _OPS.expert_slots(indices, experts)


def expert_up(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str,
    order: Tensor | None = None,
    position: Tensor | None = None,
    choices: int = 0,
    interleaved: bool = False,
    transposed: bool = False,
) -> tuple[Tensor, Tensor]:
    """pre[r] = weight[e] x[token of r] + bias[e] and act[r] = activation(parts of pre[r]) for the rows of expert e.

    x [N,D] with order, position [S] and the number of choices, S = N*choices rows; [R,D] without, choices 0.
    weight [E,P*I,D], transposed [E,D,P*I], for an activation of P inputs; bias [E,P*I]. Returns pre [R,P*I] and act
    [R,I] in x's dtype; act starts from the rounded pre, is computed in float32 and rounded once. It has no gradient.
    Raises ValueError for an activation that is no expression or does not divide the width of weight.
    """
    return _OPS.expert_up(x, weight, offsets, order, position, bias, activation, choices, interleaved, transposed)


def expert_down(
    pre: Tensor,
    act: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str,
    order: Tensor | None = None,
    position: Tensor | None = None,
    weights: Tensor | None = None,
    interleaved: bool = False,
    transposed: bool = False,
) -> Tensor:
    """y[n] = sum over the rows r of token n of weights[n, choice of r] * (weight[e] act[r] + bias[e]).

    pre and act are those of `expert_up` with the same activation. weight [E,D,I], transposed [E,I,D]; bias [E,D];
    weights [N,k] -> y [N,D]. Without order, position and weights: the rows [R,D] themselves. Sums are in float32.
    """
    return _OPS.expert_down(
        pre, act, weight, offsets, order, position, bias, weights, activation, interleaved, transposed
    )


# expert_slots


def _slots(indices: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    order, offsets = sorted_slots(indices, experts, "expert_slots")
    position = torch.empty_like(order)
    position[order] = torch.arange(order.numel(), device=order.device)
    return order, position, offsets


def _slots_fake(indices: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    slots = indices.shape[0] * indices.shape[1]
    order = indices.new_empty(slots, dtype=torch.int64)
    return order, torch.empty_like(order), indices.new_empty(experts, dtype=torch.int32)


# expert_up


def _up(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    order: Tensor | None,
    position: Tensor | None,
    bias: Tensor | None,
    activation: str,
    choices: int,
    interleaved: bool,
    transposed: bool,
    keep_pre: bool,
    keep_act: bool,
) -> tuple[Tensor, Tensor]:
    expression = _expression(activation, weight, transposed)
    rows = x if order is None else _gathered(x, order, choices)
    pre = grouped_linear(rows, weight, offsets, bias, transposed=transposed)
    act = _activated(pre, offsets, expression, interleaved) if keep_act else pre.new_empty(0)
    return pre if keep_pre else pre.new_empty(0), act


def _up_fake(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    order: Tensor | None,
    position: Tensor | None,
    bias: Tensor | None,
    activation: str,
    choices: int,
    interleaved: bool,
    transposed: bool,
    keep_pre: bool,
    keep_act: bool,
) -> tuple[Tensor, Tensor]:
    parts = len(_expression(activation, weight, transposed).inputs)
    width = weight.shape[2] if transposed else weight.shape[1]
    rows = x.shape[0] if order is None else order.shape[0]
    return (
        x.new_empty((rows, width) if keep_pre else 0),
        x.new_empty((rows, width // parts) if keep_act else 0),
    )


def _up_backward(
    grad_pre: Tensor,
    x: Tensor | None,
    weight: Tensor,
    offsets: Tensor,
    order: Tensor | None,
    position: Tensor | None,
    bias: Tensor | None,
    choices: int,
    transposed: bool,
    needed: Sequence[bool] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x if x is None or order is None else _gathered(x, order, choices)
    grad_x, grad_weight, grad_bias = _OPS.grouped_linear_backward(
        grad_pre, rows, weight, offsets, bias, transposed, needed
    )
    if order is not None and position is not None and asked_for(needed, 3)[0]:
        grad_x = _OPS.permute_backward(grad_x, position.view(-1, choices), order)
    return grad_x, grad_weight, grad_bias


def _up_backward_fake(
    grad_pre: Tensor,
    x: Tensor | None,
    weight: Tensor,
    offsets: Tensor,
    order: Tensor | None,
    position: Tensor | None,
    bias: Tensor | None,
    choices: int,
    transposed: bool,
    needed: Sequence[bool] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    of_x, of_weight, of_bias = asked_for(needed, 3)
    rows = grad_pre.shape[0] if order is None else order.shape[0] // choices
    width = weight.shape[1] if transposed else weight.shape[2]
    return (
        grad_pre.new_empty((rows, width) if of_x else 0),
        torch.empty(weight.shape if of_weight else 0, dtype=weight.dtype, device=weight.device),
        grad_pre.new_empty(0) if bias is None else bias.new_empty(bias.shape if of_bias else 0),
    )


# expert_down


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
) -> Tensor:
    rows = grouped_linear(act, weight, offsets, bias, transposed=transposed)
    return rows if order is None or weights is None else unpermute(rows, order, weights)


def _down_fake(
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
) -> Tensor:
    rows = act.shape[0] if weights is None else weights.shape[0]
    return act.new_empty(rows, weight.shape[2] if transposed else weight.shape[1])


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
    needed: Sequence[bool] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_pre, of_weight, of_bias, of_weights = asked_for(needed, 4)
    dtype = math_dtype(pre.dtype)
    expression = parse(activation)
    grads, scales = grad_y, None
    if order is not None and weights is not None:
        grads = _gathered(grad_y, order, weights.shape[1])
        scales = weights.flatten().index_select(0, order).to(dtype).unsqueeze(1)
    grad_pre, grad_weight, grad_bias, grad_weights = _down_backward_fake(
        grad_y, pre, weight, offsets, order, position, bias, weights, activation, interleaved, transposed, needed
    )
    act = torch.empty(0)
    if of_pre or of_weight or of_weights:
        towards, _, _ = _OPS.grouped_linear_backward(
            grads, None, weight, offsets, None, transposed, [True, False, True]
        )
        towards = towards.to(dtype)
        scaled = towards if scales is None else towards * scales
        act, *parts = expression.derivative()(*_parts(pre.to(dtype), expression, interleaved), scaled)
        grad_pre = _joined(parts, interleaved).to(pre.dtype) if of_pre else grad_pre
        if of_weights and order is not None and weights is not None:
            by_row = (towards * act).sum(1)
            if bias is not None:
                member = membership(offsets, order.shape[0]).clamp_max(offsets.shape[0] - 1)
                by_row += (grads * bias.index_select(0, member)).sum(1, dtype=dtype)
            grad_weights.view(-1)[order] = by_row.to(weights.dtype)
    if of_weight or of_bias:
        weighted = (act if scales is None else act * scales).to(pre.dtype) if of_weight else None
        _, grad_weight, _ = _OPS.grouped_linear_backward(
            grads, weighted, weight, offsets, None, transposed, [False, of_weight, True]
        )
        if bias is not None and of_bias:
            by_row = grads if scales is None else (grads * scales).to(grads.dtype)
            *_, grad_bias = _OPS.grouped_linear_backward(
                by_row, None, weight, offsets, bias, transposed, [False, False, True]
            )
    return _without_padding(grad_pre, offsets), grad_weight, grad_bias, grad_weights


def _down_backward_fake(
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
    needed: Sequence[bool] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_pre, of_weight, of_bias, of_weights = asked_for(needed, 4)
    return (
        pre.new_empty(pre.shape if of_pre else 0),
        torch.empty(weight.shape if of_weight else 0, dtype=weight.dtype, device=weight.device),
        pre.new_empty(0) if bias is None else bias.new_empty(bias.shape if of_bias else 0),
        pre.new_empty(0) if weights is None else weights.new_empty(weights.shape if of_weights else 0),
    )


# what they share


def _expression(activation: str, weight: Tensor, transposed: bool) -> Expression:
    expression = parse(activation)
    width = weight.shape[2] if transposed else weight.shape[1]
    if len(expression.results) != 1 or width % len(expression.inputs):
        raise ValueError(
            f"moec::expert_up: the activation {activation!r} takes {len(expression.inputs)} parts and gives "
            f"{len(expression.results)}, a row of the product has {width} values"
        )
    return expression


def _gathered(x: Tensor, order: Tensor, choices: int) -> Tensor:
    return x.index_select(0, order.div(choices, rounding_mode="floor"))


def _activated(pre: Tensor, offsets: Tensor, expression: Expression, interleaved: bool) -> Tensor:
    (act,) = expression(*_parts(pre.to(math_dtype(pre.dtype)), expression, interleaved))
    return _without_padding(act.to(pre.dtype).contiguous(), offsets)


def _parts(pre: Tensor, expression: Expression, interleaved: bool) -> Sequence[Tensor]:
    count = len(expression.inputs)
    return pre.unflatten(1, (-1, count)).unbind(2) if interleaved else pre.chunk(count, dim=1)


def _joined(parts: Sequence[Tensor], interleaved: bool) -> Tensor:
    return torch.stack(list(parts), dim=2).flatten(1) if interleaved else torch.cat(list(parts), dim=1)


def _without_padding(rows: Tensor, offsets: Tensor) -> Tensor:
    """Rows past the last group as zeros, in place; an activation of zeros need not be zero."""
    if rows.dim() == 1:
        return rows
    position = torch.arange(rows.shape[0], device=rows.device)
    return rows.masked_fill_((position >= offsets[-1]).unsqueeze(1), 0)


define_op(
    "expert_slots",
    "(Tensor indices, int experts) -> (Tensor order, Tensor position, Tensor offsets)",
    _slots,
    _slots_fake,
    shapes={"indices": "N K"},
    flops="0",
    recompute=False,
    summary="slots sorted by expert",
)

define_op(
    "expert_up",
    "(Tensor x, Tensor weight, Tensor offsets, Tensor? order, Tensor? position, Tensor? bias, str activation,"
    " int choices, bool interleaved, bool transposed, bool keep_pre=True, bool keep_act=True)"
    " -> (Tensor pre, Tensor act)",
    _up,
    _up_fake,
    backward_schema="(Tensor grad_pre, Tensor? x, Tensor weight, Tensor offsets, Tensor? order, Tensor? position,"
    " Tensor? bias, int choices, bool transposed, bool[]? needed=None)"
    " -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
    only_for={"x": ["weight"]},
    backward=_up_backward,
    backward_fake=_up_backward_fake,
    shapes={"x": "N _", "weight": "E O I", "offsets": "E", "order": "S"},
    flops="2*N*Max(choices, 1)*O*I",
    backward_flops="2*N*Max(choices, 1)*O*I*(need_x + need_weight)",
    source="MegaBlocks, arXiv 2211.15841; ScatterMoE, arXiv 2403.08245",
    summary="gathered rows times one matrix per expert, and the activation of the product",
)

define_op(
    "expert_down",
    "(Tensor? pre, Tensor act, Tensor weight, Tensor offsets, Tensor? order, Tensor? position, Tensor? bias,"
    " Tensor? weights, str activation, bool interleaved, bool transposed) -> Tensor y",
    _down,
    _down_fake,
    backward_schema="(Tensor grad_y, Tensor pre, Tensor weight, Tensor offsets, Tensor? order, Tensor? position,"
    " Tensor? bias, Tensor? weights, str activation, bool interleaved, bool transposed, bool[]? needed=None)"
    " -> (Tensor grad_pre, Tensor grad_weight, Tensor grad_bias, Tensor grad_weights)",
    for_backward=["pre"],
    backward=_down_backward,
    backward_fake=_down_backward_fake,
    shapes={"act": "R _", "pre": "R _", "weight": "E O I", "offsets": "E"},
    flops="2*R*O*I",
    backward_flops="2*R*O*I*(Max(need_pre, need_weight, need_weights) + need_weight)",
    source="MegaBlocks, arXiv 2211.15841; ScatterMoE, arXiv 2403.08245",
    summary="activated rows times one matrix per expert, weighted and summed per token",
)
