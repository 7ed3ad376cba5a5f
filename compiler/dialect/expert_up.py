"""expert_up: rows of tokens times the first matrix of their expert, and the activation; see `expert_pipeline.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moec.compiler.dialect._define import asked_for, define_op, math_dtype
from moec.compiler.dialect._expert_rows import by_row, gathered, parts_of, without_padding
from moec.compiler.dialect.experts import grouped_linear, unpermute
from moec.compiler.expression import Expression, parse

_OPS = torch.ops.moec


def expert_up(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str,
    order: Tensor | None = None,
    position: Tensor | None = None,
    token_weights: Tensor | None = None,
    act_weights: Tensor | None = None,
    choices: int = 0,
    interleaved: bool = False,
    transposed: bool = False,
) -> tuple[Tensor, Tensor]:
    """pre[r] = weight[e] x[token of r] + bias[e] and act[r] = activation(parts of pre[r]) for the rows of expert e.

    x [N,D] with order, position [S] and the number of choices, S = N*choices rows; [R,D] without, choices 0.
    weight [E,P*I,D], transposed [E,D,P*I], for an activation of P inputs; bias [E,P*I]. Returns pre [R,P*I] and act
    [R,I] in x's dtype; act starts from the rounded pre, is computed in float32 and rounded once. It has no gradient.
    With order, token_weights [N,k] multiply the gathered tokens, rounded to x's dtype, and act_weights [N,k] act.
    Raises ValueError for an activation that is no expression or does not divide the width of weight, and for weights
    without order.
    """
    return _OPS.expert_up(
        x,
        weight,
        offsets,
        order,
        position,
        bias,
        token_weights,
        act_weights,
        activation,
        choices,
        interleaved,
        transposed,
    )


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
    keep_pre: bool,
    keep_act: bool,
) -> tuple[Tensor, Tensor]:
    expression = _checked(activation, weight, transposed, order, token_weights, act_weights)
    rows = _rows(x, order, token_weights, choices)
    pre = grouped_linear(rows, weight, offsets, bias, transposed=transposed)
    act = pre.new_empty(0)
    if keep_act:
        (act,) = expression(*parts_of(pre.to(math_dtype(pre.dtype)), expression, interleaved))
        if order is not None and act_weights is not None:
            act = act * by_row(act_weights, order, act.dtype)
        act = without_padding(act.to(pre.dtype).contiguous(), offsets)
    return pre if keep_pre else pre.new_empty(0), act


def _up_fake(
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
    keep_pre: bool,
    keep_act: bool,
) -> tuple[Tensor, Tensor]:
    parts = len(_checked(activation, weight, transposed, order, token_weights, act_weights).inputs)
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
    token_weights: Tensor | None,
    choices: int,
    transposed: bool,
    needed: Sequence[bool] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_x, of_weight, of_bias, of_token_weights = asked_for(needed, 4)
    of_token_weights = of_token_weights and token_weights is not None
    rows = None if x is None or not of_weight else _rows(x, order, token_weights, choices)
    grad_rows, grad_weight, grad_bias = _OPS.grouped_linear_backward(
        grad_pre, rows, weight, offsets, bias, transposed, [of_x or of_token_weights, of_weight, of_bias]
    )
    grad_x, grad_token_weights = grad_rows if of_x else grad_pre.new_empty(0), grad_pre.new_empty(0)
    if order is not None and position is not None and of_x:
        if token_weights is None:
            grad_x = _OPS.permute_backward(grad_rows, position.view(-1, choices), order)
        else:
            grad_x = unpermute(grad_rows, order, token_weights)
    if token_weights is not None:
        grad_token_weights = token_weights.new_empty(token_weights.shape if of_token_weights else 0)
    if of_token_weights and order is not None and x is not None:
        products = (gathered(x, order, choices).to(math_dtype(x.dtype)) * grad_rows).sum(1)
        grad_token_weights.view(-1)[order] = products.to(grad_token_weights.dtype)
    return grad_x, grad_weight, grad_bias, grad_token_weights


def _up_backward_fake(
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
    needed: Sequence[bool] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_x, of_weight, of_bias, of_token_weights = asked_for(needed, 4)
    rows = grad_pre.shape[0] if order is None else order.shape[0] // choices
    width = weight.shape[1] if transposed else weight.shape[2]
    return (
        grad_pre.new_empty((rows, width) if of_x else 0),
        torch.empty(weight.shape if of_weight else 0, dtype=weight.dtype, device=weight.device),
        grad_pre.new_empty(0) if bias is None else bias.new_empty(bias.shape if of_bias else 0),
        grad_pre.new_empty(0)
        if token_weights is None
        else token_weights.new_empty(token_weights.shape if of_token_weights else 0),
    )


def _rows(x: Tensor, order: Tensor | None, token_weights: Tensor | None, choices: int) -> Tensor:
    """What the matrix is multiplied by."""
    if order is None:
        return x
    rows = gathered(x, order, choices)
    return rows if token_weights is None else (rows * by_row(token_weights, order, math_dtype(x.dtype))).to(x.dtype)


def _checked(
    activation: str,
    weight: Tensor,
    transposed: bool,
    order: Tensor | None,
    token_weights: Tensor | None,
    act_weights: Tensor | None,
) -> Expression:
    """The activation's expression; raises ValueError."""
    expression = parse(activation)
    width = weight.shape[2] if transposed else weight.shape[1]
    if len(expression.results) != 1 or width % len(expression.inputs):
        raise ValueError(
            f"moec::expert_up: the activation {activation!r} takes {len(expression.inputs)} parts and gives "
            f"{len(expression.results)}, a row of the product has {width} values"
        )
    if order is None and not (token_weights is None and act_weights is None):
        raise ValueError("moec::expert_up: weights of a token's experts need the order of the rows")
    return expression


define_op(
    "expert_up",
    "(Tensor x, Tensor weight, Tensor offsets, Tensor? order, Tensor? position, Tensor? bias,"
    " Tensor? token_weights, Tensor? act_weights, str activation, int choices, bool interleaved, bool transposed,"
    " bool keep_pre=True, bool keep_act=True)"
    " -> (Tensor pre, Tensor act)",
    _up,
    _up_fake,
    backward_schema="(Tensor grad_pre, Tensor? x, Tensor weight, Tensor offsets, Tensor? order, Tensor? position,"
    " Tensor? bias, Tensor? token_weights, int choices, bool transposed, bool[]? needed=None)"
    " -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias, Tensor grad_token_weights)",
    only_for={"x": ["weight", "token_weights"]},
    backward=_up_backward,
    backward_fake=_up_backward_fake,
    shapes={"x": "N _", "weight": "E O I", "offsets": "E", "order": "S"},
    flops="2*N*Max(choices, 1)*O*I",
    backward_flops="2*N*Max(choices, 1)*O*I*(Max(need_x, need_token_weights) + need_weight)",
    source="MegaBlocks, arXiv 2211.15841; ScatterMoE, arXiv 2403.08245",
    summary="gathered rows times one matrix per expert, and the activation of the product",
)
