"""The next-token loss."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from moec.models.k3.numerics import widen

IGNORED = -100


def next_token_labels(labels: Tensor) -> Tensor:
    """Label of each position's prediction: int64 [B, T], the labels moved one to the left, -100 at the end."""
    return F.pad(labels, (0, 1), value=IGNORED)[:, 1:]


def valid_tokens(labels: Tensor) -> Tensor:
    """Number of predictions that count, an int64 scalar, for unshifted labels [B, T]."""
    return (labels[:, 1:] != IGNORED).sum()


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum over valid positions of the cross entropy; logits [B, T, V], targets int64 [B, T] -> float32 scalar"""
    return F.cross_entropy(widen(logits).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
