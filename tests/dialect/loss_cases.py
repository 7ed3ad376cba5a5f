"""Inputs for the loss ops, and the same losses from whole logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS, WIDTH, CLASSES = 7, 5, 11


def operands(rows: int = ROWS, classes: int = CLASSES, bias: bool = False, seed: int = 0) -> list[Tensor]:
    """hidden, weight (and bias) in float64."""
    generator = torch.Generator().manual_seed(seed)
    shapes: list[tuple[int, ...]] = [(rows, WIDTH), (classes, WIDTH)]
    shapes += [(classes,)] if bias else []
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def labels_for(rows: int = ROWS, classes: int = CLASSES, ignore_index: int = -100, seed: int = 0) -> Tensor:
    """Random labels, some of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (rows,), generator=generator)
    return labels.masked_fill(torch.rand(rows, generator=generator) < 0.3, ignore_index)


def weights_for(count: int, seed: int = 1) -> Tensor:
    """Positive weights of classes or tokens."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.25


def eager_logits(inputs: Sequence[Tensor], logit_scale: float = 1.0, softcap: float = 0.0) -> Tensor:
    logits = F.linear(*inputs)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def eager(
    inputs: Sequence[Tensor],
    labels: Tensor,
    *,
    class_weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    **form: Any,
) -> Tensor:
    """What `dialect.linear_cross_entropy` computes."""
    logits = eager_logits(inputs, **form)
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": "none"}
    losses = F.cross_entropy(logits, labels, class_weights, **options)
    counted = (labels != ignore_index).to(losses.dtype)
    tokens = counted if token_weights is None else counted * token_weights
    losses = (losses + z_loss * logits.logsumexp(1).square()) * tokens
    if reduction == "none":
        return losses
    if class_weights is not None:
        tokens = tokens * class_weights[labels.clamp(min=0)]
    return losses.sum() / tokens.sum() if reduction == "mean" else losses.sum()
