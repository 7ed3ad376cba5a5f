"""Packed documents: a row may hold several, and no token may see another document.

`document_ids` is int64 [B, T], non-decreasing along T; None means that each row is one document.
"""

from __future__ import annotations

import torch
from torch import Tensor


def visible(document_ids: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Which keys a query may attend to: bool [B, T, T] (query, key), or [1, T, T] without documents."""
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril().unsqueeze(0)
    if document_ids is None:
        return causal
    return causal & (document_ids.unsqueeze(2) == document_ids.unsqueeze(1))


def positions(document_ids: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Position of each token within its document: int64 [B, T], or [1, T] without documents."""
    index = torch.arange(length, device=device).unsqueeze(0)
    if document_ids is None:
        return index
    first = torch.ones_like(document_ids[:, :1], dtype=torch.bool)
    starts = torch.cat([first, document_ids[:, 1:] != document_ids[:, :-1]], dim=1)
    return index - torch.where(starts, index, 0).cummax(dim=1).values
