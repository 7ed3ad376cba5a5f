"""Output head and cross entropy in one op, so that logits exist for one chunk at a time (`head.py`).

    loss_i = (1 - e) w_y (lse_i - z_iy) + e / V sum_c w_c (lse_i - z_ic),    lse_i = log sum_c exp z_ic

with y the label of row i, w class weights, e the label smoothing. Two ops, for two ways of use:

`linear_cross_entropy` gives the losses and lse of every row, for any use of them. What gradient comes back is only
known in backward, which makes the logits again: four products in all.

`linear_cross_entropy_sum` gives sum_i (a_i loss_i + b_i lse_i^2) for given weights a, b of rows. Whatever becomes of
the sum, its gradient is one number, and everything before it is linear in that: so the forward makes the gradients from
the same logits ("slopes", in float32), and backward multiplies. Three products in all. A mean, a mask, weights per
token, a z-loss, a loss scale, and a loss that is used twice are all of this kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moec.compiler.dialect._define import define_op, math_dtype
from moec.compiler.dialect.head import (
    REFERENCE,
    Head,
    Kernels,
    Statistics,
    coefficients_of,
    gradients_asked_for,
    head_gradients_fake,
    losses_of,
    statistics,
    weighted_sum,
)
from moec.compiler.dialect.loss_chunks import head_sizes


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    class_weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    rows: int | None = None,
    columns: int | None = None,
) -> Tensor:
    """Cross entropy of hidden [N,D] against labels int64 [N] through the head weight [V,D] (and bias [V]).

    z = logit_scale (hidden weight^T + bias); softcap > 0: z = softcap tanh(z / softcap). class_weights [V] and
    label_smoothing are those of torch.nn.functional.cross_entropy; z_loss adds z_loss lse^2 to the loss of every row
    that is not ignored; token_weights [N] multiply the losses, and get a gradient too. reduction: "none" [N], "sum", or
    "mean": the sum over that of the class weights (1 without) times token_weights of the rows that are not ignored;
    where none is left it is 0 with zero gradients. Scalars and [N] are float32 (float64 for float64 inputs). rows,
    columns: the most logits that exist at a time, also in backward; by default as many as `LossPlan` says.

    A label that is neither ignore_index nor in [0, V) raises IndexError on CPU; on CUDA, where reading the labels would
    stall the device, its loss is NaN and its row adds nothing to any gradient. ValueError for another reduction.
    """
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"reduction {reduction!r}, expected none, sum or mean")
    if reduction == "none":
        sizes = head_sizes(hidden, weight.shape[0], rows, columns)
        form = (ignore_index, logit_scale, softcap, label_smoothing, sizes.rows, sizes.columns)
        losses, lse, *_ = torch.ops.moec.linear_cross_entropy(hidden, weight, labels, bias, class_weights, *form)
        if z_loss:
            losses = losses + z_loss * lse.square().masked_fill(labels == ignore_index, 0)
        return losses if token_weights is None else losses * token_weights
    counted = (labels != ignore_index).to(math_dtype(hidden.dtype))
    tokens = counted if token_weights is None else counted * token_weights
    total = linear_cross_entropy_sum(
        hidden,
        weight,
        labels,
        tokens,
        bias,
        z_weights=tokens * z_loss if z_loss else None,
        class_weights=class_weights,
        ignore_index=ignore_index,
        logit_scale=logit_scale,
        softcap=softcap,
        label_smoothing=label_smoothing,
        rows=rows,
        columns=columns,
    )
    if reduction == "sum":
        return total
    if class_weights is not None:
        tokens = tokens * class_weights.to(tokens.dtype)[labels.clamp(0, max(weight.shape[0] - 1, 0))]
    count = tokens.sum()
    return total / torch.where(count == 0, 1, count)


def linear_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor,
    bias: Tensor | None = None,
    *,
    z_weights: Tensor | None = None,
    class_weights: Tensor | None = None,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    label_smoothing: float = 0.0,
    rows: int | None = None,
    columns: int | None = None,
) -> Tensor:
    """The scalar sum_i (token_weights_i loss_i + z_weights_i lse_i^2), its gradients made beside it.

    token_weights, z_weights [N]; those of tokens may want a gradient, those of z may not (ValueError). An ignored row
    has no loss whatever its weight, but may have an lse^2. Everything else as for `linear_cross_entropy`.
    """
    if z_weights is not None and z_weights.requires_grad:
        raise ValueError("weights of a z-loss have no gradient here; compose it from losses of reduction none")
    sizes = head_sizes(hidden, weight.shape[0], rows, columns)
    wanted = (hidden.requires_grad, weight.requires_grad or (bias is not None and bias.requires_grad))
    flags = wanted if torch.is_grad_enabled() else (False, False)
    return torch.ops.moec.linear_cross_entropy_sum(
        hidden, weight, labels, token_weights, z_weights, bias, class_weights, ignore_index, logit_scale, softcap,
        label_smoothing, sizes.rows, sizes.columns, *flags, weight.dtype,
    )[0]  # fmt: skip


def _head(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    class_weights: Tensor | None,
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    label_smoothing: float,
    rows: int,
    columns: int,
) -> Head:
    return Head(
        hidden, weight, labels, bias, class_weights, ignore_index, logit_scale, softcap, label_smoothing, rows, columns
    )


def forward(kernels: Kernels, *arguments: Any) -> tuple[Tensor, ...]:
    """`moec::linear_cross_entropy` with the given kernels."""
    head = _head(*arguments)
    found = statistics(head, kernels)
    return losses_of(head, found), found.lse, found.maximum, found.total


def backward(
    kernels: Kernels,
    grad_losses: Tensor,
    grad_lse: Tensor | None,
    maximum: Tensor,
    total: Tensor,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    class_weights: Tensor | None,
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    label_smoothing: float,
    rows: int,
    columns: int,
    needed: Sequence[bool] | None = None,
) -> tuple[Tensor, ...]:
    """`moec::linear_cross_entropy_backward` with the given kernels."""
    head = _head(
        hidden, weight, labels, bias, class_weights, ignore_index, logit_scale, softcap, label_smoothing, rows, columns
    )
    of_rows = Statistics(maximum, total, maximum, maximum)
    return gradients_asked_for(head, coefficients_of(head, of_rows, grad_losses, grad_lse), kernels, needed)


def sum_forward(
    kernels: Kernels,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor,
    z_weights: Tensor | None,
    bias: Tensor | None,
    class_weights: Tensor | None,
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    label_smoothing: float,
    rows: int,
    columns: int,
    hidden_grad: bool,
    weight_grad: bool,
    grad_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`moec::linear_cross_entropy_sum` with the given kernels."""
    head = _head(
        hidden, weight, labels, bias, class_weights, ignore_index, logit_scale, softcap, label_smoothing, rows, columns
    )
    # An ignored row has no loss; its weight may still be anything.
    tokens = token_weights.to(head.dtype).masked_fill(labels == ignore_index, 0)
    z = None if z_weights is None else z_weights.to(head.dtype)
    total, losses, slopes = weighted_sum(head, tokens, z, kernels, hidden_grad, weight_grad)
    return total, losses, *slopes


def sum_backward(
    grad_total: Tensor,
    losses: Tensor,
    hidden_slope: Tensor,
    weight_slope: Tensor,
    bias_slope: Tensor,
    grad_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One rounding, from the float32 slope times the gradient of the sum."""
    slopes = ((slope * grad_total).to(grad_dtype) for slope in (hidden_slope, weight_slope, bias_slope))
    return *slopes, losses * grad_total  # type: ignore[return-value]


def _fake(hidden: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(hidden.new_empty(hidden.shape[0], dtype=math_dtype(hidden.dtype)) for _ in range(4))


def _backward_fake(
    grad_losses: Tensor, grad_lse: Tensor | None, maximum: Tensor, total: Tensor, hidden: Tensor, weight: Tensor,
    labels: Tensor, bias: Tensor | None, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return head_gradients_fake(hidden, weight, bias, rest[-1])


def _sum_fake(
    hidden: Tensor, weight: Tensor, labels: Tensor, token_weights: Tensor, z_weights: Tensor | None,
    bias: Tensor | None, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    *_, hidden_grad, weight_grad, _ = rest
    dtype = math_dtype(hidden.dtype)
    shapes = ((), hidden.shape[:1], hidden.shape if hidden_grad else (0,), weight.shape if weight_grad else (0,))
    bias_shape = bias.shape if bias is not None and weight_grad else (0,)
    return tuple(hidden.new_empty(shape, dtype=dtype) for shape in (*shapes, bias_shape))


def _sum_backward_fake(
    grad_total: Tensor, losses: Tensor, hidden_slope: Tensor, weight_slope: Tensor, bias_slope: Tensor,
    grad_dtype: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    slopes = (slope.new_empty(slope.shape, dtype=grad_dtype) for slope in (hidden_slope, weight_slope, bias_slope))
    return *slopes, losses.new_empty(losses.shape)


_HEAD = "Tensor hidden, Tensor weight, Tensor labels"
_OPTIONS = (
    "Tensor? bias, Tensor? class_weights, int ignore_index, float logit_scale, float softcap, float label_smoothing,"
    " int rows, int columns"
)
_SHAPES = {"hidden": "N D", "weight": "V D", "labels": "N", "bias": "V", "class_weights": "V"}
_SOURCE = "chunked head: arXiv 2410.10989, arXiv 2411.09009; z-loss: arXiv 2204.02311"

define_op(
    "linear_cross_entropy",
    f"({_HEAD}, {_OPTIONS}) -> (Tensor losses, Tensor lse, Tensor maximum, Tensor total)",
    lambda *arguments: forward(REFERENCE, *arguments),
    _fake,
    backward_schema=f"(Tensor grad_losses, Tensor? grad_lse, Tensor maximum, Tensor total, {_HEAD}, {_OPTIONS},"
    " bool[]? needed=None) -> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)",
    backward=lambda *arguments: backward(REFERENCE, *arguments),
    backward_fake=_backward_fake,
    shapes=_SHAPES,
    flops="2*N*V*D",
    backward_flops="2*N*V*D*(1 + need_hidden + Max(need_weight, need_bias))",
    source=_SOURCE,
    summary="output head and cross entropy per row, in chunks of rows and classes",
)
define_op(
    "linear_cross_entropy_sum",
    f"({_HEAD}, Tensor token_weights, Tensor? z_weights, {_OPTIONS}, bool hidden_grad, bool weight_grad,"
    " ScalarType grad_dtype) -> (Tensor total, Tensor losses, Tensor hidden_slope, Tensor weight_slope,"
    " Tensor bias_slope)",
    lambda *arguments: sum_forward(REFERENCE, *arguments),
    _sum_fake,
    backward_schema="(Tensor grad_total, Tensor losses, Tensor hidden_slope, Tensor weight_slope, Tensor bias_slope,"
    " ScalarType grad_dtype) -> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias, Tensor grad_token_weights)",
    backward=sum_backward,
    backward_fake=_sum_backward_fake,
    shapes=_SHAPES | {"token_weights": "N", "z_weights": "N"},
    flops="2*N*V*D*(1 + hidden_grad + weight_grad + Max(hidden_grad, weight_grad)*Min(1, floor((V - 1)/columns)))",
    backward_flops="N*D + V*D",
    source=_SOURCE,
    summary="weighted sum of cross entropies through the output head, with its gradients made in the forward",
)
