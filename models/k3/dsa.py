"""Gated DeepSeek Sparse Attention: latent attention over the keys that an indexer selects (DeepSeek-V3.2-Exp).

1. queries and the key-value latent as in MLA; the key expansion is absorbed into the queries, so that all heads attend
   to the same entries (latent | shared key part)
2. the indexer scores all keys; each query keeps its best top_k among the earlier tokens of its document
3. attention over those; the value expansion follows, then the sigmoid gate and the output projection
4. the indexer's loss per token
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moec.models.k3.config import K3Config
from moec.models.k3.documents import visible
from moec.models.k3.gates import apply_sigmoid_gate
from moec.models.k3.indexer import LightningIndexer, indexer_divergence, select
from moec.models.k3.latent import LatentKeyValue, query_projection
from moec.models.k3.numerics import widen


class DSA(nn.Module):
    """One sparse attention mixer. With at most top_k tokens every key is selected, and it equals MLA."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.heads, self.nope_dim, self.rope_dim = config.heads, config.nope_dim, config.rope_dim
        self.top_k, self.scale = config.indexer_top_k, (config.nope_dim + config.rope_dim) ** -0.5
        size = config.heads * config.value_dim
        self.query = query_projection(config)
        self.key_value = LatentKeyValue(config)
        self.indexer = LightningIndexer(config)
        self.output_gate = nn.Linear(config.hidden_size, size, bias=False) if config.attention_gate else None
        self.o_proj = nn.Linear(size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, document_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [B, T, D], already normalised -> output [B, T, D] and the indexer's divergence float32 [B, T]"""
        queries, query_latent = self.query(x)
        q_nope, q_rope = queries.unflatten(-1, (self.heads, -1)).split([self.nope_dim, self.rope_dim], dim=-1)
        latent, shared = self.key_value(x)
        key_weight, value_weight = self.key_value.halves()
        q = torch.cat([_per_head(q_nope, key_weight), q_rope], dim=-1)
        entries = torch.cat([latent, shared], dim=-1)

        scores = self.indexer(x, query_latent)
        allowed = visible(document_ids, x.shape[1], x.device)
        indices, best, chosen = select(scores, allowed, self.top_k)
        o, probabilities = sparse_attention(q, entries, indices, chosen, self.scale, latent.shape[-1])
        divergence = indexer_divergence(best, chosen, probabilities)

        o = _per_head(o, value_weight.transpose(1, 2)).flatten(-2)
        if self.output_gate is not None:
            o = apply_sigmoid_gate(o, self.output_gate(x))
        return self.o_proj(o), divergence


def sparse_attention(
    q: Tensor, entries: Tensor, indices: Tensor, chosen: Tensor, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """Softmax attention of each query over its own list of entries, shared by all heads.

    q [B, T, H, K]; entries [B, T, K], whose first value_dim columns are the values; indices int64 [B, T, S] with
    chosen bool [B, T, S]. Returns the output [B, T, H, value_dim] in the dtype of q and the probabilities
    [B, T, H, S] in float32.
    """
    rows = torch.arange(q.shape[0], device=q.device).unsqueeze(1).unsqueeze(2)
    picked = widen(entries[rows, indices])
    logits = (widen(q) @ picked.transpose(-1, -2)) * scale
    probabilities = logits.masked_fill(~chosen.unsqueeze(2), float("-inf")).softmax(-1)
    return (probabilities @ picked[..., :value_dim]).to(q.dtype), probabilities


def _per_head(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply each head by its own matrix: x [B, T, H, I], weight [H, I, O] -> [B, T, H, O]"""
    return (x.transpose(1, 2) @ weight).transpose(1, 2)
