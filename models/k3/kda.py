"""Kimi Delta Attention: a linear attention whose state forgets per channel (arXiv:2510.26692, Kimi K3 report 2.1).

1. queries, keys, values: linear, short convolution with SiLU; queries and keys are L2-normalised per head
2. log-decay g per channel, write strength beta = sigmoid per head
3. the delta rule: S <- diag(exp g) S;  S <- S + beta k (v - S^T k)^T;  o = S^T q / sqrt(K)
4. gated RMS norm per head, output projection
"""

from __future__ import annotations

from torch import Tensor, nn

from moec.compiler import dialect
from moec.models.k3.config import K3Config
from moec.models.k3.gates import DecayGate, LowRankGate
from moec.models.k3.norms import GatedRMSNorm, l2_norm
from moec.models.k3.numerics import widen
from moec.models.k3.short_conv import ShortConv


class KDA(nn.Module):
    """One KDA mixer; all projections bias-free."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.kda_heads * config.kda_head_dim
        self.heads, self.head_dim, self.l2_eps = config.kda_heads, config.kda_head_dim, config.l2_eps
        self.q_proj = nn.Linear(hidden, size, bias=False)
        self.k_proj = nn.Linear(hidden, size, bias=False)
        self.v_proj = nn.Linear(hidden, size, bias=False)
        self.q_conv = ShortConv(size, config.conv_width)
        self.k_conv = ShortConv(size, config.conv_width)
        self.v_conv = ShortConv(size, config.conv_width)
        self.decay = DecayGate(config)
        self.beta_proj = nn.Linear(hidden, config.kda_heads, bias=False)
        self.output_gate = (
            nn.Linear(hidden, size, bias=False)
            if config.kda_output_gate == "full_rank"
            else LowRankGate(hidden, config.decay_rank, size)
        )
        self.output_norm = GatedRMSNorm(config.kda_head_dim, config.norm_eps)
        self.o_proj = nn.Linear(size, hidden, bias=False)

    def forward(self, x: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """x [B, T, D], already normalised -> [B, T, D]"""
        q = l2_norm(self._heads(self.q_conv(self.q_proj(x), document_ids)), self.l2_eps)
        k = l2_norm(self._heads(self.k_conv(self.k_proj(x), document_ids)), self.l2_eps)
        v = self._heads(self.v_conv(self.v_proj(x), document_ids))
        g = self.decay(x)
        beta = widen(self.beta_proj(x)).sigmoid()
        o, _ = dialect.delta_rule(q, k, v, g, beta, document_ids, None, self.head_dim**-0.5)
        o = self.output_norm(o, self._heads(self.output_gate(x)))
        return self.o_proj(o.flatten(-2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, self.head_dim))
