"""One layer: two sublayers, each a norm and what it feeds.

Sublayers are what the compiler sees as one template per kind (`moec_region`): everything that differs between layers
of a kind, the depth mixes and the residual sums, stays outside in the model's forward.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from moec.models.k3.config import K3Config
from moec.models.k3.dsa import DSA
from moec.models.k3.gqa import GQA
from moec.models.k3.kda import KDA
from moec.models.k3.mla import MLA
from moec.models.k3.mlp import GatedMLP
from moec.models.k3.moe import LatentMoE
from moec.models.k3.norms import RMSNorm
from moec.models.k3.residual import DepthMix

MIXERS = {"kda": KDA, "mla": MLA, "gqa": GQA}


class Attention(nn.Module):
    """Norm and token mixer: (hidden [B, T, D], document_ids) -> [B, T, D]"""

    moec_region: ClassVar[bool] = True

    def __init__(self, norm: nn.Module, mixer: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.mixer = mixer

    def forward(self, hidden: Tensor, document_ids: Tensor | None = None) -> Tensor:
        return self.mixer(self.norm(hidden), document_ids)


class SparseAttention(nn.Module):
    """Norm and sparse mixer: also takes valid bool [B, T], and returns the indexer's divergence summed over it."""

    moec_region: ClassVar[bool] = True

    def __init__(self, norm: nn.Module, mixer: DSA) -> None:
        super().__init__()
        self.norm = norm
        self.mixer = mixer

    def forward(self, hidden: Tensor, document_ids: Tensor | None, valid: Tensor) -> tuple[Tensor, Tensor]:
        """(hidden [B, T, D], document_ids, valid) -> output [B, T, D] and a float32 scalar"""
        output, divergence = self.mixer(self.norm(hidden), document_ids)
        return output, divergence.masked_fill(~valid, 0.0).sum()


class FeedForward(nn.Module):
    """Norm and MLP or experts: hidden [B, T, D] -> [B, T, D]"""

    moec_region: ClassVar[bool] = True

    def __init__(self, norm: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.mlp = mlp

    def forward(self, hidden: Tensor) -> Tensor:
        return self.mlp(self.norm(hidden))


class Layer(nn.Module):
    """The parts of one layer; the model's forward connects them.

    attention_mix and feed_forward_mix are None without attention residuals. Layer 0's attention_mix exists, as in the
    published checkpoint, and is never used: there is nothing to mix before the first block is stored.
    """

    def __init__(self, config: K3Config, index: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        kind = config.mixer(index)
        self.attention: Attention | SparseAttention = (
            SparseAttention(RMSNorm(size, eps), DSA(config))
            if kind == "dsa"
            else Attention(RMSNorm(size, eps), MIXERS[kind](config))
        )
        mlp = GatedMLP(config, config.dense_size) if config.is_dense(index) else LatentMoE(config)
        self.feed_forward = FeedForward(RMSNorm(size, eps), mlp)
        self.attention_mix = DepthMix(size, eps) if config.residual_block else None
        self.feed_forward_mix = DepthMix(size, eps) if config.residual_block else None
