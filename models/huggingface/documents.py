"""Packed documents: from document ids to what transformers' layers understand.

`document_ids` int64 [B, T] reach the swapped-in ops of a layer as the ambient tensor of that name; everything else
that depends on them is derived in the graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moec.compiler.ambient import ambient

NAME = "document_ids"


def current_document_ids() -> Tensor | None:
    """int64 [B, T] of the forward pass under way, or None when each row is one document."""
    return ambient(NAME)


def position_ids(document_ids: Tensor) -> Tensor:
    """Positions int64 [B, T] that restart at 0 with each document, as transformers expects them."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device)
    # Ids do not decrease along a row, so the first place that holds an id is where its document starts.
    return index - torch.searchsorted(document_ids.contiguous(), document_ids.contiguous())


def attention_mask(document_ids: Tensor | None, like: Tensor, window: int) -> Tensor:
    """Dense additive mask [B or 1, 1, T, T] for implementations that take nothing else.

    like: [B, H, T, D], gives length, dtype and device. window: keys s with t - window < s <= t, 0 for all s <= t.
    """
    index = torch.arange(like.shape[2], device=like.device)
    distance = index[:, None] - index[None, :]
    allowed = distance >= 0
    if window:
        allowed = allowed & (distance < window)
    allowed = allowed[None, None]
    if document_ids is not None:
        allowed = allowed & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    return torch.zeros_like(allowed, dtype=like.dtype).masked_fill(~allowed, torch.finfo(like.dtype).min)
