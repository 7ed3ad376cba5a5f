"""The sigmoid router, and quantile balancing of its correction bias (Kimi K3 report, 2.3 and appendix D).

Balancing has no auxiliary loss. In training each forward counts, per expert, how far the scores lie from the value
that would have been chosen; after the optimizer the counts of the whole step become the next bias, one that would have
given every expert the same number of tokens. The bias decides only who is chosen, never the weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moec.compiler import dialect
from moec.models.k3.config import K3Config
from moec.models.k3.numerics import precise_dtype, widen

BINS = 1000


class Router(nn.Module):
    """Chooses top_k experts per token, in float32.

    weight [E, D]; correction_bias [E], a buffer that no gradient moves; histogram int64 [E, BINS], the counts of the
    current step, not saved. Balancing is on in training while `balancing` is True.
    """

    correction_bias: Tensor
    histogram: Tensor

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.top_k, self.scale, self.balancing = config.top_k, config.routed_scale, config.balancing
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden_size))
        self.register_buffer("correction_bias", torch.zeros(config.experts, dtype=precise_dtype()))
        if self.balancing:
            counts = torch.zeros(config.experts, BINS, dtype=torch.int64)
            self.register_buffer("histogram", counts, persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, D] -> weights float32 [N, k] that sum to `scale`, and experts int64 [N, k]"""
        logits = F.linear(widen(x), widen(self.weight))
        if self.training and self.balancing:
            counts = dialect.route_histogram(logits.detach(), self.correction_bias, top_k=self.top_k, bins=BINS)
            self.histogram.add_(counts)
        scores = logits.sigmoid()
        experts = (scores + self.correction_bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, experts)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scale, experts

    @torch.no_grad()
    def update_balance(self) -> None:
        """Move the correction bias by the counts of the finished step, and start counting anew."""
        self.correction_bias.copy_(dialect.balanced_bias(self.correction_bias, self.histogram, self.top_k))
        self.histogram.zero_()
