"""Log-probabilities of given tokens, so that preference and reinforcement losses never hold logits.

    log_prob_i = z_iy - log sum_c exp z_ic

in chunks of rows and classes (`head.py`), forward and backward.
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
)
from moec.compiler.dialect.loss_chunks import head_sizes


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    rows: int | None = None,
    columns: int | None = None,
) -> Tensor:
    """Log-probability of labels int64 [..., ] given hidden [..., D] through the head weight [V,D] (and bias [V]).

    Float32 (float64 for float64 inputs), 0 where the label is ignore_index. logit_scale is one over a temperature;
    softcap > 0 caps the scaled logits. rows, columns: the most logits that exist at a time, also in backward; by
    default as many as `LossPlan` says. Labels out of range as for `linear_cross_entropy`.
    """
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(f"moec::token_log_probs: hidden {tuple(hidden.shape)} and labels {tuple(labels.shape)} differ")
    sizes = head_sizes(hidden, weight.shape[0], rows, columns)
    found, *_ = torch.ops.moec.token_log_probs(
        hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1), bias, ignore_index, logit_scale, softcap,
        sizes.rows, sizes.columns,
    )  # fmt: skip
    return found.view(labels.shape)


def _head(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, ignore_index: int, logit_scale: float,
    softcap: float, rows: int, columns: int,
) -> Head:  # fmt: skip
    return Head(
        hidden, weight, labels, bias, ignore_index=ignore_index, logit_scale=logit_scale, softcap=softcap,
        rows=rows, columns=columns,
    )  # fmt: skip


def forward(kernels: Kernels, *arguments: Any) -> tuple[Tensor, ...]:
    """`moec::token_log_probs` with the given kernels."""
    head = _head(*arguments)
    found = statistics(head, kernels)
    return losses_of(head, found).neg_(), found.maximum, found.total


def backward(
    kernels: Kernels,
    grad_log_probs: Tensor,
    maximum: Tensor,
    total: Tensor,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    logit_scale: float,
    softcap: float,
    rows: int,
    columns: int,
    needed: Sequence[bool] | None = None,
) -> tuple[Tensor, ...]:
    """`moec::token_log_probs_backward` with the given kernels."""
    head = _head(hidden, weight, labels, bias, ignore_index, logit_scale, softcap, rows, columns)
    of_rows = Statistics(maximum, total, maximum, maximum)
    return gradients_asked_for(head, coefficients_of(head, of_rows, -grad_log_probs, None), kernels, needed)


def _fake(hidden: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(hidden.new_empty(hidden.shape[0], dtype=math_dtype(hidden.dtype)) for _ in range(3))


def _backward_fake(
    grad_log_probs: Tensor, maximum: Tensor, total: Tensor, hidden: Tensor, weight: Tensor, labels: Tensor,
    bias: Tensor | None, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return head_gradients_fake(hidden, weight, bias, rest[-1])


_ARGUMENTS = (
    "Tensor hidden, Tensor weight, Tensor labels, Tensor? bias, int ignore_index, float logit_scale, float softcap,"
    " int rows, int columns"
)

define_op(
    "token_log_probs",
    f"({_ARGUMENTS}) -> (Tensor log_probs, Tensor maximum, Tensor total)",
    lambda *arguments: forward(REFERENCE, *arguments),
    _fake,
    backward_schema=f"(Tensor grad_log_probs, Tensor maximum, Tensor total, {_ARGUMENTS}, bool[]? needed=None)"
    " -> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)",
    backward=lambda *arguments: backward(REFERENCE, *arguments),
    backward_fake=_backward_fake,
    shapes={"hidden": "N D", "weight": "V D", "labels": "N", "bias": "V"},
    flops="2*N*V*D",
    backward_flops="2*N*V*D*(1 + need_hidden + Max(need_weight, need_bias))",
    summary="log-probabilities of given tokens through the output head, in chunks",
)
