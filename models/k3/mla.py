"""Gated multi-head latent attention without positions (Kimi K3 report, eq. 7)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moec.models.k3.config import K3Config
from moec.models.k3.documents import visible
from moec.models.k3.gates import apply_sigmoid_gate
from moec.models.k3.latent import LatentKeyValue, query_projection


class MLA(nn.Module):
    """Softmax attention over expanded heads; the output is multiplied by sigmoid(W x) when the config asks for it."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.heads, self.query_dim = config.heads, config.nope_dim + config.rope_dim
        size = config.heads * config.value_dim
        self.query = query_projection(config)
        self.key_value = LatentKeyValue(config)
        self.output_gate = nn.Linear(config.hidden_size, size, bias=False) if config.attention_gate else None
        self.o_proj = nn.Linear(size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """x [B, T, D], already normalised -> [B, T, D]"""
        queries, _ = self.query(x)
        q = queries.unflatten(-1, (self.heads, self.query_dim))
        latent, shared = self.key_value(x)
        keys, values = self.key_value.expand(latent)
        k = torch.cat([keys, shared.unsqueeze(2).expand(-1, -1, self.heads, -1)], dim=-1)
        o = causal_attention(q, k, values, document_ids, self.query_dim**-0.5).flatten(-2)
        if self.output_gate is not None:
            o = apply_sigmoid_gate(o, self.output_gate(x))
        return self.o_proj(o)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None, scale: float) -> Tensor:
    """Softmax attention within documents; q, k [B, T, H, K], v [B, T, H, V] -> [B, T, H, V]"""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if document_ids is None:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    else:
        mask = visible(document_ids, q.shape[2], q.device).unsqueeze(1)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return o.transpose(1, 2)
