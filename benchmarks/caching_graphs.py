"""The models of `caching.py`: few layers in real widths, so that a step takes about a tenth of a second on an H200."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from memory import k3
from torch import nn

from moec.compiler.plan import Plan
from moec.models.huggingface.adapter import from_config
from moec.models.huggingface.tiny import tiny_config

Make = Callable[[torch.dtype, str, int], nn.Module]


@dataclass(frozen=True)
class Graph:
    """make: dtype, device, divisor of all widths -> model. batch, length: of its plan."""

    make: Make
    batch: int
    length: int

    def plan(self, scale: int = 1) -> Plan:
        dtype: Any = "bfloat16" if scale == 1 else "float32"
        return Plan(batch=max(1, self.batch // scale), length=max(64, self.length // scale), dtype=dtype)


def dense(layers: int, hidden: int, inner: int) -> Make:
    """Qwen3: grouped-query attention and a gated MLP."""

    def make(dtype: torch.dtype, device: str, scale: int) -> nn.Module:
        heads = max(1, hidden // 128 // scale)
        return from_config(
            {
                "model_type": "qwen3",
                "num_hidden_layers": layers,
                "hidden_size": hidden // scale,
                "intermediate_size": inner // scale,
                "num_attention_heads": heads,
                "num_key_value_heads": max(1, heads // 4),
                "head_dim": 128 // scale,
                "vocab_size": 32768 // scale,
                "max_position_embeddings": 32768,
                "tie_word_embeddings": False,
            },
            dtype,
            device,
        )

    return make


def experts(kind: str, **wide: int) -> Make:
    """A Hugging Face model with experts; widths at scale 1."""

    def make(dtype: torch.dtype, device: str, scale: int) -> nn.Module:
        keep = {"num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"}
        small = {name: value if name in keep else max(8, value // scale) for name, value in wide.items()}
        return from_config(tiny_config(kind, **small), dtype, device)

    return make


GRAPHS: dict[str, Graph] = {
    "k3": Graph(k3(layers=4), 4, 4096),
    "dense": Graph(dense(6, 2048, 6144), 6, 2048),
    "mixtral": Graph(
        experts(
            "mixtral",
            num_hidden_layers=4,
            hidden_size=2048,
            intermediate_size=3072,
            num_attention_heads=16,
            num_key_value_heads=4,
            vocab_size=32768,
            max_position_embeddings=8192,
        ),
        6,
        2048,
    ),
    "deepseek": Graph(
        experts(
            "deepseek_v3",
            num_hidden_layers=5,
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=1024,
            num_attention_heads=16,
            num_key_value_heads=16,
            q_lora_rank=768,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            vocab_size=32768,
            max_position_embeddings=8192,
        ),
        6,
        2048,
    ),
}
