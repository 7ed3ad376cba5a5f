"""Short convolution: each channel mixes its last few tokens, then SiLU (Kimi Linear, arXiv:2510.26692, section 4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moec.models.k3.numerics import precise_dtype, widen


class ShortConv(nn.Module):
    """Causal depthwise convolution with zeros before each document's start, no bias.

    weight [C, W], the last tap for the current token: `y_t = silu(sum_j weight[:, W-1-j] * x_{t-j})`.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width, dtype=precise_dtype()))
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)

    def forward(self, x: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """x [B, T, C] -> [B, T, C], float32 inside, in the dtype of x."""
        length, width = x.shape[1], self.weight.shape[1]
        wide, weight = widen(x), widen(self.weight)
        y = wide * weight[:, width - 1]
        for back in range(1, width):
            earlier = F.pad(wide, (0, 0, back, 0))[:, :length]
            if document_ids is not None:
                same = document_ids == F.pad(document_ids, (back, 0), value=-1)[:, :length]
                earlier = torch.where(same.unsqueeze(-1), earlier, 0.0)
            y = y + earlier * weight[:, width - 1 - back]
        return F.silu(y).to(x.dtype)
