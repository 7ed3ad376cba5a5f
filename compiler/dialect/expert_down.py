"""expert_down: activated rows times the second matrix of their expert, summed; see `expert_pipeline.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moec.compiler.dialect._define import asked_for, define_op, math_dtype
from moec.compiler.dialect._expert_rows import by_row, gathered, joined, parts_of, without_padding
from moec.compiler.dialect.experts import grouped_linear, membership, unpermute
from moec.compiler.expression import parse

_OPS = torch.ops.moec


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
    before: bool = False,
) -> Tensor:
    """y[n] = sum over the rows r of token n of weights[n, choice of r] * (weight[e] act[r] + bias[e]).

    pre and act are those of `expert_up` with the same activation. weight [E,D,I], transposed [E,I,D]; bias [E,D];
    weights [N,k] -> y [N,D]. Without order, position and weights: the rows [R,D] themselves. Sums are in float32.
    before: `expert_up` has applied the weights, as its act_weights: act is summed as it is, y[n] = sum weight[e] act[r]
    + bias[e], and the gradients are those of activation(parts of pre[r]) times weights.
    """
    return _OPS.expert_down(
        pre, act, weight, offsets, order, position, bias, weights, activation, interleaved, transposed, before
    )


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
    before: bool,
) -> Tensor:
    rows = grouped_linear(act, weight, offsets, bias, transposed=transposed)
    if order is None or weights is None:
        return rows
    return unpermute(rows, order, torch.ones_like(weights) if before else weights)


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
    before: bool,
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
    before: bool,
    needed: Sequence[bool] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_pre, of_weight, of_bias, of_weights = asked_for(needed, 4)
    dtype = math_dtype(pre.dtype)
    expression = parse(activation)
    grads, scales = grad_y, None
    if order is not None and weights is not None:
        grads = gathered(grad_y, order, weights.shape[1])
        scales = by_row(weights, order, dtype)
    grad_pre, grad_weight, grad_bias, grad_weights = _down_backward_fake(
        grad_y,
        pre,
        weight,
        offsets,
        order,
        position,
        bias,
        weights,
        activation,
        interleaved,
        transposed,
        before,
        needed,
    )
    act = torch.empty(0)
    if of_pre or of_weight or of_weights:
        towards, _, _ = _OPS.grouped_linear_backward(
            grads, None, weight, offsets, None, transposed, [True, False, True]
        )
        towards = towards.to(dtype)
        scaled = towards if scales is None else towards * scales
        act, *parts = expression.derivative()(*parts_of(pre.to(dtype), expression, interleaved), scaled)
        grad_pre = joined(parts, interleaved).to(pre.dtype) if of_pre else grad_pre
        if of_weights and order is not None and weights is not None:
            products = (towards * act).sum(1)
            if bias is not None and not before:
                member = membership(offsets, order.shape[0]).clamp_max(offsets.shape[0] - 1)
                products += (grads * bias.index_select(0, member)).sum(1, dtype=dtype)
            grad_weights.view(-1)[order] = products.to(weights.dtype)
    if of_weight or of_bias:
        weighted = (act if scales is None else act * scales).to(pre.dtype) if of_weight else None
        _, grad_weight, _ = _OPS.grouped_linear_backward(
            grads, weighted, weight, offsets, None, transposed, [False, of_weight, True]
        )
        if bias is not None and of_bias:
            weighed = grads if scales is None or before else (grads * scales).to(grads.dtype)
            *_, grad_bias = _OPS.grouped_linear_backward(
                weighed, None, weight, offsets, bias, transposed, [False, False, True]
            )
    return without_padding(grad_pre, offsets), grad_weight, grad_bias, grad_weights


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
    before: bool,
    needed: Sequence[bool] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_pre, of_weight, of_bias, of_weights = asked_for(needed, 4)
    return (
        pre.new_empty(pre.shape if of_pre else 0),
        torch.empty(weight.shape if of_weight else 0, dtype=weight.dtype, device=weight.device),
        pre.new_empty(0) if bias is None else bias.new_empty(bias.shape if of_bias else 0),
        pre.new_empty(0) if weights is None else weights.new_empty(weights.shape if of_weights else 0),
    )


define_op(
    "expert_down",
    "(Tensor? pre, Tensor act, Tensor weight, Tensor offsets, Tensor? order, Tensor? position, Tensor? bias,"
    " Tensor? weights, str activation, bool interleaved, bool transposed, bool before=False) -> Tensor y",
    _down,
    _down_fake,
    backward_schema="(Tensor grad_y, Tensor pre, Tensor weight, Tensor offsets, Tensor? order, Tensor? position,"
    " Tensor? bias, Tensor? weights, str activation, bool interleaved, bool transposed, bool before=False,"
    " bool[]? needed=None)"
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
