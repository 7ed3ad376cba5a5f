"""Gates: how fast KDA forgets, and what attention layers let out."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moec.models.k3.config import K3Config
from moec.models.k3.numerics import precise_dtype, widen

_DT_RANGE = (1e-3, 1e-1)


class DecayGate(nn.Module):
    """Per-channel log-decay of KDA from a low-rank projection z of the layer's input.

    bounded (Kimi K3 report, eq. 5):       g = lower_bound * sigmoid(exp(A) * (z + b)), in (lower_bound, 0)
    softplus (Kimi Linear, 2510.26692):    g = -exp(A) * softplus(z + b)

    A_log [H], dt_bias [H * K]: A starts at 0, softplus(dt_bias) log-uniform in [1e-3, 1e-1] as in Mamba-2.
    """

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.heads, self.head_dim = config.kda_heads, config.kda_head_dim
        self.bounded, self.lower_bound = config.kda_decay == "bounded", config.kda_lower_bound
        self.down_proj = nn.Linear(config.hidden_size, config.decay_rank, bias=False)
        self.up_proj = nn.Linear(config.decay_rank, self.heads * self.head_dim, bias=False)
        self.A_log = nn.Parameter(torch.zeros(self.heads, dtype=precise_dtype()))
        self.dt_bias = nn.Parameter(torch.empty(self.heads * self.head_dim, dtype=precise_dtype()))
        with torch.no_grad():
            dt = self.dt_bias.uniform_(math.log(_DT_RANGE[0]), math.log(_DT_RANGE[1])).exp()
            self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> log-decay float32 [B, T, H, K]"""
        z = widen(self.up_proj(self.down_proj(x))) + widen(self.dt_bias)
        z = z.unflatten(-1, (self.heads, self.head_dim))
        rate = widen(self.A_log).exp().unsqueeze(-1)
        if self.bounded:
            return self.lower_bound * torch.sigmoid(rate * z)
        return -rate * F.softplus(z)


class LowRankGate(nn.Module):
    """Logits of an output gate through a narrow layer: D -> rank -> size, no bias, no activation between."""

    def __init__(self, hidden_size: int, rank: int, size: int) -> None:
        super().__init__()
        self.down_proj = nn.Linear(hidden_size, rank, bias=False)
        self.up_proj = nn.Linear(rank, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, size]"""
        return self.up_proj(self.down_proj(x))


def apply_sigmoid_gate(x: Tensor, logits: Tensor) -> Tensor:
    """`x * sigmoid(logits)`, float32 inside, in the dtype of x; both [..., D]."""
    return (widen(x) * widen(logits).sigmoid()).to(x.dtype)
