"""Grouped-query attention (arXiv:2305.13245) with rotary positions (arXiv:2104.09864) that restart at each document."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moec.models.k3.config import K3Config
from moec.models.k3.documents import positions
from moec.models.k3.mla import causal_attention
from moec.models.k3.numerics import widen


class GQA(nn.Module):
    """Causal attention whose H query heads share G key-value heads; query head h uses key head h // (H / G)."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.theta = config.rope_theta
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """x [B, T, D], already normalised -> [B, T, D]"""
        q = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        where = positions(document_ids, x.shape[1], x.device)
        q, k = rotate(q, where, self.theta), rotate(k, where, self.theta)
        repeat = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeat, dim=2), v.repeat_interleave(repeat, dim=2)
        return self.o_proj(causal_attention(q, k, v, document_ids, self.head_dim**-0.5).flatten(-2))


def rotate(x: Tensor, where: Tensor, theta: float) -> Tensor:
    """Rotate the pairs (i, i + D/2) of each head by `where * theta^(-2i/D)`; x [B, T, H, D], where int64 [B, T]."""
    half = x.shape[-1] // 2
    wide = widen(x)
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=wide.dtype) / half)
    angle = (where.unsqueeze(-1) * frequency).unsqueeze(2)
    cos, sin = torch.cos(angle), torch.sin(angle)
    first, second = wide[..., :half], wide[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
