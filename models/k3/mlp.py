"""Gated MLPs and their activations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moec.models.k3.config import K3Config
from moec.models.k3.numerics import widen


class GatedActivation(nn.Module):
    """`act(gate) * up`.

    situ (Kimi K3 report, 2.3.2): `beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta)`, float32 inside,
    so that no output exceeds beta * linear_beta. silu (arXiv:2002.05202): `silu(g) * u`.
    """

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.kind, self.beta, self.linear_beta = config.activation, config.situ_beta, config.situ_linear_beta

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate, up [..., I] -> [..., I]"""
        if self.kind == "silu":
            return F.silu(gate) * up
        g, u = widen(gate), widen(up)
        g = self.beta * torch.tanh(g / self.beta) * torch.sigmoid(g)
        u = self.linear_beta * torch.tanh(u / self.linear_beta)
        return (g * u).to(gate.dtype)

    def extra_repr(self) -> Any:
        return self.kind


class GatedMLP(nn.Module):
    """`W_down act(W_gate x, W_up x)`, no bias: the dense MLP, and the shared experts as one."""

    def __init__(self, config: K3Config, size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, size, bias=False)
        self.down_proj = nn.Linear(size, config.hidden_size, bias=False)
        self.activation = GatedActivation(config)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]"""
        return self.down_proj(self.activation(self.gate_proj(x), self.up_proj(x)))
