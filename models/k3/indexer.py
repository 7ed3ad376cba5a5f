"""The lightning indexer of DeepSeek Sparse Attention: which keys each query attends to (DeepSeek-V3.2-Exp, section 2).

It scores every earlier token cheaply, `I_ts = sum_h w_th relu(q_th . k_s)`, and learns only to predict where the main
attention looks: its inputs are detached, and its loss is KL(p || softmax I) with the main attention's p detached.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moec.models.k3.config import K3Config
from moec.models.k3.numerics import widen


class LightningIndexer(nn.Module):
    """Scores of all keys for each query; no positions, no gradient into its inputs."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.heads, self.head_dim = config.indexer_heads, config.indexer_dim
        self.q_proj = nn.Linear(config.q_rank or config.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.head_dim, bias=False)
        self.k_norm = nn.LayerNorm(self.head_dim, eps=1e-6)
        self.weight_proj = nn.Linear(config.hidden_size, self.heads, bias=False)

    def forward(self, x: Tensor, query_latent: Tensor) -> Tensor:
        """x [B, T, D] and query_latent [B, T, q_rank] -> scores float32 [B, T, T] (query, key), not masked"""
        x, query_latent = x.detach(), query_latent.detach()
        q = self.q_proj(query_latent).unflatten(-1, (self.heads, self.head_dim))
        k = self.k_norm(self.k_proj(x))
        w = widen(self.weight_proj(x)) * (self.heads * self.head_dim) ** -0.5
        return index_scores(q, k, w)


def index_scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """`sum_h w_th relu(q_th . k_s)`; q [B, T, H, D], k [B, T, D], w [B, T, H] -> float32 [B, T, T]"""
    products = widen(q).transpose(1, 2) @ widen(k).transpose(1, 2).unsqueeze(1)
    return (products.relu() * w.transpose(1, 2).unsqueeze(-1)).sum(1)


def select(scores: Tensor, allowed: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best keys of each query among the allowed ones.

    scores [B, T, T]; allowed bool [B or 1, T, T]. Returns indices int64 [B, T, S] with S = min(top_k, T), their
    scores [B, T, S], and chosen bool [B, T, S], False in slots that a query with fewer than S allowed keys cannot
    fill.
    """
    masked = scores.masked_fill(~allowed, float("-inf"))
    best, indices = masked.topk(torch.sym_min(top_k, scores.shape[-1]), dim=-1)
    return indices, best, best > float("-inf")


def indexer_divergence(scores: Tensor, chosen: Tensor, probabilities: Tensor) -> Tensor:
    """KL(p || softmax of the scores) over the chosen keys, per query.

    scores [B, T, S]; chosen bool [B, T, S]; probabilities [B, T, H, S] of the main attention, which gets no gradient:
    p is their sum over heads, made to sum to 1. Returns float32 [B, T].
    """
    target = probabilities.detach().sum(2)
    target = target / target.sum(-1, keepdim=True)
    log_prediction = scores.log_softmax(-1).masked_fill(~chosen, 0.0)
    return (torch.xlogy(target, target) - target * log_prediction).sum(-1)
