"""Stable LatentMoE: routed experts that work in a narrow latent space (Kimi K3 report, 2.3).

    experts, weights = router(x)                    on the full width
    z = W_down x                                    once per token, before tokens are sent to experts
    u = sum_j weights_j expert_j(z)                 SiTU-GLU experts
    y = W_up norm(u) + shared(x)                    the norm comes after the sum

Without a latent width, experts read x and u is added as it is (Kimi Linear).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moec.compiler import dialect
from moec.models.k3.config import K3Config
from moec.models.k3.mlp import GatedActivation, GatedMLP
from moec.models.k3.norms import RMSNorm
from moec.models.k3.router import Router


class Experts(nn.Module):
    """All routed experts, stacked.

    gate_up [E, 2I, D]: gate rows first, then up rows; down [E, D, I]; D is the width that experts work in.
    """

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        width, size = config.expert_width, config.expert_size
        self.count = config.experts
        self.gate_up = nn.Parameter(torch.empty(config.experts, 2 * size, width))
        self.down = nn.Parameter(torch.empty(config.experts, width, size))
        self.activation = GatedActivation(config)

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x [N, D]; weights float32 [N, k]; experts int64 [N, k] -> [N, D], summed in float32 and cast once"""
        rows, order, offsets = dialect.permute(x, experts, experts=self.count)
        gate, up = dialect.grouped_linear(rows, self.gate_up, offsets).chunk(2, dim=-1)
        rows = dialect.grouped_linear(self.activation(gate, up), self.down, offsets)
        return dialect.unpermute(rows, order, weights)


class LatentMoE(nn.Module):
    """Router, latent projections, routed experts and shared experts of one layer."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        self.latent = config.latent_size > 0
        if self.latent:
            self.latent_down_proj = nn.Linear(config.hidden_size, config.latent_size, bias=False)
            self.latent_norm = RMSNorm(config.latent_size, config.norm_eps)
            self.latent_up_proj = nn.Linear(config.latent_size, config.hidden_size, bias=False)
        self.shared = GatedMLP(config, config.shared_size) if config.shared_size else None

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D], already normalised -> [B, T, D]"""
        tokens = x.flatten(0, 1)
        weights, experts = self.router(tokens)
        if self.latent:
            y = self.experts(self.latent_down_proj(tokens), weights, experts)
            y = self.latent_up_proj(self.latent_norm(y))
        else:
            y = self.experts(tokens, weights, experts)
        if self.shared is not None:
            y = y + self.shared(tokens)
        return y.view_as(x)
