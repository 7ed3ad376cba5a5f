"""Queries and the key-value latent of multi-head latent attention (arXiv:2405.04434), shared by MLA and DSA.

There is no position encoding: the "rope" part of a head is one more part of its query, whose keys all heads share.
"""

from __future__ import annotations

from torch import Tensor, nn

from moec.models.k3.config import K3Config
from moec.models.k3.norms import RMSNorm


class LatentQuery(nn.Module):
    """Queries through a normalised latent: D -> q_rank -> H * (nope + rope)."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.down_proj = nn.Linear(config.hidden_size, config.q_rank, bias=False)
        self.norm = RMSNorm(config.q_rank, config.low_rank_norm_eps)
        self.up_proj = nn.Linear(config.q_rank, config.heads * (config.nope_dim + config.rope_dim), bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, D] -> queries [B, T, H * (nope + rope)] and the latent [B, T, q_rank]"""
        latent = self.norm(self.down_proj(x))
        return self.up_proj(latent), latent


class DirectQuery(nn.Module):
    """Queries in one projection; the "latent" is then the layer's input itself."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden_size, config.heads * (config.nope_dim + config.rope_dim), bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, D] -> queries [B, T, H * (nope + rope)] and x"""
        return self.proj(x), x


class LatentKeyValue(nn.Module):
    """The key-value latent: D -> (kv_rank, normalised | rope, as it is), and its expansion to heads.

    up_proj [H * (nope + value), kv_rank]: per head the key rows first, then the value rows.
    """

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.heads, self.rank, self.rope_dim = config.heads, config.kv_rank, config.rope_dim
        self.nope_dim, self.value_dim = config.nope_dim, config.value_dim
        self.down_proj = nn.Linear(config.hidden_size, self.rank + self.rope_dim, bias=False)
        self.norm = RMSNorm(self.rank, config.low_rank_norm_eps)
        self.up_proj = nn.Linear(self.rank, self.heads * (self.nope_dim + self.value_dim), bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, D] -> latent [B, T, kv_rank] and the shared key part [B, T, rope]"""
        latent, shared = self.down_proj(x).split([self.rank, self.rope_dim], dim=-1)
        return self.norm(latent), shared

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """latent [B, T, kv_rank] -> keys [B, T, H, nope] and values [B, T, H, value]"""
        both = self.up_proj(latent).unflatten(-1, (self.heads, self.nope_dim + self.value_dim))
        keys, values = both.split([self.nope_dim, self.value_dim], dim=-1)
        return keys, values

    def halves(self) -> tuple[Tensor, Tensor]:
        """The expansion's weight per head: keys [H, nope, kv_rank] and values [H, value, kv_rank]."""
        weight = self.up_proj.weight.unflatten(0, (self.heads, self.nope_dim + self.value_dim))
        keys, values = weight.split([self.nope_dim, self.value_dim], dim=1)
        return keys, values


def query_projection(config: K3Config) -> LatentQuery | DirectQuery:
    """The query projection that the config asks for."""
    return LatentQuery(config) if config.q_rank else DirectQuery(config)
