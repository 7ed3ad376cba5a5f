"""The output head of a vocabulary that is sharded over ranks.

Each rank holds the rows [first_class, first_class + V) of the head's weight.

1. `moec::logit_statistics` gives, per row of hidden: the maximum m of the shard's logits, the sum of exp(z - m), the
   label's z (0 where the label belongs to another shard), and sum_c w_c z_c where labels are smoothed.
2. `combine` makes them those of all classes: one all-reduce of maxima, one of sums (three numbers a row).
3. `loss_of_statistics` is then the same small computation on every rank.
4. Backward: the gradients of the four results per row are coefficients (`head.py`) of the gradient of the shard's
   logits. The maxima are constants: they cancel. The gradient of hidden is this shard's part, to be summed over the
   ranks; those of weight and bias belong to the shard.

Logits are made again in backward: four products, since the sums of all shards are not known inside the op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moec.compiler.dialect._define import define_op, math_dtype
from moec.compiler.dialect.head import REFERENCE, Coefficients, Head, Kernels, Statistics, gradients, statistics
from moec.compiler.dialect.loss_chunks import head_sizes


def logit_statistics(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    first_class: int = 0,
    class_weights: Tensor | None = None,
    smoothed: bool = False,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    rows: int | None = None,
    columns: int | None = None,
) -> Statistics:
    """Statistics [N] of hidden [N,D] over the classes of a shard: weight [V,D], bias and class_weights [V].

    labels int64 [N] are those of the whole vocabulary; what is no class of this shard is no error. smoothed: whether
    the weighted sum of all logits is wanted (0 otherwise). Float32 (float64 for float64 inputs).
    """
    sizes = head_sizes(hidden, weight.shape[0], rows, columns)
    return Statistics(
        *torch.ops.moec.logit_statistics(
            hidden, weight, labels, bias, class_weights, first_class, smoothed, logit_scale, softcap, sizes.rows,
            sizes.columns,
        )
    )  # fmt: skip


def combine(
    found: Statistics, all_reduce_max: Callable[[Tensor], Tensor], all_reduce_sum: Callable[[Tensor], Tensor]
) -> Statistics:
    """The statistics of all shards from those of this one; the two functions reduce over the ranks, elementwise."""
    with torch.no_grad():
        maximum = all_reduce_max(found.maximum)
        scale = (found.maximum - maximum).exp()
    total, target, weighted = all_reduce_sum(torch.stack((found.total * scale, found.target, found.weighted)))
    return Statistics(maximum, total, target, weighted)


def loss_of_statistics(
    found: Statistics,
    labels: Tensor,
    classes: int,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    label_weights: Tensor | None = None,
    weight_of_all_classes: float | Tensor | None = None,
) -> Tensor:
    """Losses [N] as `linear_cross_entropy` with reduction none gives them, from statistics of all `classes` classes.

    label_weights [N]: the class weight of each row's label, and weight_of_all_classes their sum over classes, with
    class weights.
    """
    losses = (found.maximum - found.target + found.total.log()) * (1 - label_smoothing)
    losses = losses if label_weights is None else losses * label_weights
    if label_smoothing:
        weight = classes if weight_of_all_classes is None else weight_of_all_classes
        losses = losses + (label_smoothing / classes) * (weight * found.lse - found.weighted)
    ignored = labels == ignore_index
    wrong = ~ignored & ((labels < 0) | (labels >= classes))
    return losses.masked_fill(ignored, 0).masked_fill(wrong, float("nan"))


def _head(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, class_weights: Tensor | None,
    first_class: int, smoothed: bool, logit_scale: float, softcap: float, rows: int, columns: int,
) -> Head:  # fmt: skip
    return Head(
        hidden, weight, labels, bias, class_weights, NO_LABEL, logit_scale, softcap, float(smoothed), rows, columns,
        first_class, shard=True,
    )  # fmt: skip


def forward(kernels: Kernels, *arguments: Any) -> tuple[Tensor, ...]:
    """`moec::logit_statistics` with the given kernels."""
    return tuple(statistics(_head(*arguments), kernels))


def backward(
    kernels: Kernels,
    grad_total: Tensor,
    grad_target: Tensor,
    grad_weighted: Tensor,
    maximum: Tensor,
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """`moec::logit_statistics_backward` with the given kernels."""
    head = _head(*arguments)
    given = (grad.to(head.dtype) for grad in (grad_total, -grad_target, -grad_weighted))
    found = gradients(head, Coefficients(maximum, *given), kernels)
    bias_dtype = head.hidden.dtype if head.bias is None else head.bias.dtype
    return found.hidden.to(head.hidden.dtype), found.weight.to(head.weight.dtype), found.bias.to(bias_dtype)


def _fake(hidden: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(hidden.new_empty(hidden.shape[0], dtype=math_dtype(hidden.dtype)) for _ in range(4))


def _backward_fake(
    grad_total: Tensor, grad_target: Tensor, grad_weighted: Tensor, maximum: Tensor, hidden: Tensor, weight: Tensor,
    labels: Tensor, bias: Tensor | None, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grad_bias = hidden.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape), grad_bias


# A shard asks of a label only whether it is one of its classes.
NO_LABEL = -(2**63)
_ARGUMENTS = (
    "Tensor hidden, Tensor weight, Tensor labels, Tensor? bias, Tensor? class_weights, int first_class, bool smoothed,"
    " float logit_scale, float softcap, int rows, int columns"
)

define_op(
    "logit_statistics",
    f"({_ARGUMENTS}) -> (Tensor maximum, Tensor total, Tensor target, Tensor weighted)",
    lambda *arguments: forward(REFERENCE, *arguments),
    _fake,
    backward_schema=f"(Tensor grad_total, Tensor grad_target, Tensor grad_weighted, Tensor maximum, {_ARGUMENTS})"
    " -> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)",
    backward=lambda *arguments: backward(REFERENCE, *arguments),
    backward_fake=_backward_fake,
    shapes={"hidden": "N D", "weight": "V D", "labels": "N", "bias": "V", "class_weights": "V"},
    flops="2*N*V*D",
    backward_flops="6*N*V*D",
    source="vocabulary-parallel cross entropy: arXiv 1909.08053",
    summary="maximum, sum of exponentials and label's logit over one shard of the vocabulary",
)
