"""Norms over the last dimension: RMS, gated RMS, L2. All compute in float32 and cast once at the end."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moec.models.k3.numerics import precise_dtype, widen


class RMSNorm(nn.Module):
    """`weight * x / sqrt(mean(x^2) + eps)` (arXiv:1910.07467); weight [D]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]"""
        wide = widen(x)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale * widen(self.weight)).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """`sigmoid(gate) * weight * x / sqrt(mean(x^2) + eps)`, per head with one weight for all heads; weight [V]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=precise_dtype()))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [..., V] -> [..., V]"""
        wide = widen(x)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale * widen(self.weight) * widen(gate).sigmoid()).to(x.dtype)


def l2_norm(x: Tensor, eps: float) -> Tensor:
    """`x / sqrt(sum(x^2) + eps)`; x [..., K] -> [..., K]"""
    wide = widen(x)
    return (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + eps)).to(x.dtype)
