"""Names and shapes of the published Hugging Face checkpoints.

The table says how each of our tensors is called there, relative to its layer or to the model. Stacked experts are one
set of matrices per expert there, and some vectors have more dimensions, or padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from moec.compiler.errors import CheckpointError
from moec.compiler.pieces import Piece
from moec.models.k3.config import K3Config
from moec.models.k3.model import K3Model

_LATENT_ATTENTION = {
    "query.proj.weight": "q_proj.weight",
    "query.down_proj.weight": "q_a_proj.weight",
    "query.norm.weight": "q_a_layernorm.weight",
    "query.up_proj.weight": "q_b_proj.weight",
    "key_value.down_proj.weight": "kv_a_proj_with_mqa.weight",
    "key_value.norm.weight": "kv_a_layernorm.weight",
    "key_value.up_proj.weight": "kv_b_proj.weight",
    "output_gate.weight": "g_proj.weight",
    "o_proj.weight": "o_proj.weight",
}
_MIXERS = {
    "kda": {
        "q_proj.weight": "q_proj.weight",
        "k_proj.weight": "k_proj.weight",
        "v_proj.weight": "v_proj.weight",
        "q_conv.weight": "q_conv1d.weight",
        "k_conv.weight": "k_conv1d.weight",
        "v_conv.weight": "v_conv1d.weight",
        "decay.down_proj.weight": "f_a_proj.weight",
        "decay.up_proj.weight": "f_b_proj.weight",
        "decay.A_log": "A_log",
        "decay.dt_bias": "dt_bias",
        "beta_proj.weight": "b_proj.weight",
        "output_gate.weight": "g_proj.weight",
        "output_gate.down_proj.weight": "g_a_proj.weight",
        "output_gate.up_proj.weight": "g_b_proj.weight",
        "output_norm.weight": "o_norm.weight",
        "o_proj.weight": "o_proj.weight",
    },
    "mla": _LATENT_ATTENTION,
    "dsa": _LATENT_ATTENTION
    | {
        "indexer.q_proj.weight": "indexer.wq_b.weight",
        "indexer.k_proj.weight": "indexer.wk.weight",
        "indexer.k_norm.weight": "indexer.k_norm.weight",
        "indexer.k_norm.bias": "indexer.k_norm.bias",
        "indexer.weight_proj.weight": "indexer.weights_proj.weight",
    },
    "gqa": {f"{name}_proj.weight": f"{name}_proj.weight" for name in "qkvo"},
}
_GATED_MLP = {f"{name}_proj.weight": f"{name}_proj.weight" for name in ("gate", "up", "down")}
_EXPERTS = {
    "router.weight": "gate.weight",
    "router.correction_bias": "gate.e_score_correction_bias",
    "latent_down_proj.weight": "routed_expert_down_proj.weight",
    "latent_norm.weight": "routed_expert_norm.weight",
    "latent_up_proj.weight": "routed_expert_up_proj.weight",
    **{f"shared.{ours}": f"shared_experts.{theirs}" for ours, theirs in _GATED_MLP.items()},
}
_LAYER = {
    "attention.norm.weight": "input_layernorm.weight",
    "feed_forward.norm.weight": "post_attention_layernorm.weight",
    "attention_mix.norm": "self_attention_res_norm.weight",
    "attention_mix.proj": "self_attention_res_proj.weight",
    "feed_forward_mix.norm": "mlp_res_norm.weight",
    "feed_forward_mix.proj": "mlp_res_proj.weight",
}
_MODEL = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output_mix.norm": "model.output_attn_res_norm.weight",
    "output_mix.proj": "model.output_attn_res_proj.weight",
    "lm_head.weight": "lm_head.weight",
}
_A_LOG_MULTIPLE = 128


def published_pieces(config: K3Config) -> list[Piece]:
    """Where every tensor of a published checkpoint lies in the model's `state_dict()`."""
    with torch.device("meta"):
        shapes = {path: tuple(value.shape) for path, value in K3Model(config).state_dict().items()}
    pieces: list[Piece] = []
    for path, shape in shapes.items():
        if _is_stacked(path):
            pieces += _expert_pieces(path, shape, config)
        else:
            pieces.append(Piece(_name(path, config), _published_shape(path, shape, config), path))
    return pieces


def to_huggingface(state: Mapping[str, Tensor], config: K3Config) -> Iterator[tuple[str, Tensor]]:
    """Yield (published name, tensor) for a model's `state_dict()`; raises CheckpointError for a tensor it lacks."""
    pieces = published_pieces(config)
    missing = sorted({piece.path for piece in pieces} - state.keys())
    if missing:
        raise CheckpointError(f"the state dict lacks {', '.join(missing[:3])}", hint="check the config")
    for piece in pieces:
        values = state[piece.path].reshape(-1)[piece.start : piece.start + piece.numel]
        padding = values.new_zeros(piece.numel - values.numel())
        yield piece.name, torch.cat([values, padding]).view(piece.shape)


def _name(path: str, config: K3Config) -> str:
    prefix = "language_model." if config.checkpoint_names == "kimi_k3" else ""
    if path in _MODEL:
        return prefix + _MODEL[path]
    _, layer, inner = path.split(".", 2)
    return f"{prefix}model.layers.{layer}.{_layer_name(inner, int(layer), config)}"


def _layer_name(inner: str, layer: int, config: K3Config) -> str:
    dense = config.is_dense(layer)
    for start, stored, table in (
        ("attention.mixer.", "self_attn.", _MIXERS[config.mixer(layer)]),
        ("feed_forward.mlp.", "mlp." if dense else "block_sparse_moe.", _GATED_MLP if dense else _EXPERTS),
    ):
        if inner.startswith(start):
            return stored + table[inner.removeprefix(start)]
    return _LAYER[inner]


def _published_shape(path: str, shape: tuple[int, ...], config: K3Config) -> tuple[int, ...]:
    if path.endswith("_conv.weight"):
        return (shape[0], 1, shape[1])
    if path.endswith("_mix.proj"):
        return (1, *shape)
    if path.endswith("A_log"):
        if config.checkpoint_names == "kimi_linear":
            return (1, 1, *shape, 1)
        return (-(-shape[0] // _A_LOG_MULTIPLE) * _A_LOG_MULTIPLE,)
    return shape


def _is_stacked(path: str) -> bool:
    return ".experts." in path


def _expert_pieces(path: str, shape: tuple[int, ...], config: K3Config) -> Iterator[Piece]:
    """One published matrix after the other: gate and up are two, stacked along the rows."""
    prefix = "language_model." if config.checkpoint_names == "kimi_k3" else ""
    start = f"{prefix}model.layers.{path.split('.')[1]}.block_sparse_moe.experts"
    parts = ("w1", "w3") if path.endswith("gate_up") else ("w2",)
    experts, rows, width = shape[0], shape[1] // len(parts), shape[2]
    for expert in range(experts):
        for index, part in enumerate(parts):
            first = (expert * len(parts) + index) * rows * width
            yield Piece(f"{start}.{expert}.{part}.weight", (rows, width), path, first)
