"""Names and shapes of the published Hugging Face checkpoints, both ways, one tensor at a time.

The table says how each of our tensors is called there, relative to its layer or to the model; `to_huggingface` and
`from_huggingface` are generators, so that only the tensor at hand (and a stack of experts under construction) is in
memory. Stacked experts become one set of matrices per expert. A missing or an unexpected name is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moec.compiler.errors import CheckpointError
from moec.models.k3.config import K3Config

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


@dataclass(frozen=True)
class _Place:
    """Where one of our tensors is stored: a name, and how its shape differs."""

    name: str
    write: Callable[[Tensor], Tensor]
    read: Callable[[Tensor], Tensor]


@dataclass
class _Stack:
    """A stacked expert tensor [E, ...] being filled from per-expert matrices."""

    value: Tensor
    waiting: set[tuple[int, str]] = field(default_factory=set)


def to_huggingface(state: Mapping[str, Tensor], config: K3Config) -> Iterator[tuple[str, Tensor]]:
    """Yield (published name, tensor) for a model's `state_dict()`; raises CheckpointError for a tensor it lacks."""
    _compare(set(state), set(parameter_paths(config)), "the state dict")
    for path, tensor in state.items():
        if _is_stacked(path):
            for expert, part, rows in _expert_parts(path, config):
                yield _expert_name(path, expert, part, config), tensor[expert, rows].contiguous()
        else:
            place = _place(path, config)
            yield place.name, place.write(tensor)


def from_huggingface(
    tensors: Iterable[tuple[str, Tensor]], config: K3Config, ignore: tuple[str, ...] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield (our path, tensor) for published (name, tensor) pairs in any order.

    ignore: prefixes of names to leave out, e.g. ("vision_tower.", "mm_projector."). Raises CheckpointError for a name
    that the model has no place for, for a wrong shape, and at the end for names that never came.
    """
    places = {_place(path, config).name: path for path in parameter_paths(config) if not _is_stacked(path)}
    parts = {
        _expert_name(path, expert, part, config): (path, expert, part, rows)
        for path in filter(_is_stacked, parameter_paths(config))
        for expert, part, rows in _expert_parts(path, config)
    }
    stacks: dict[str, _Stack] = {}
    missing = set(places) | set(parts)
    for name, tensor in tensors:
        if name.startswith(ignore) and ignore:
            continue
        if name not in missing:
            known = name in places or name in parts
            raise CheckpointError(
                f"{name} comes twice" if known else f"unexpected tensor {name}",
                why="" if known else "the model has no parameter for it",
                hint="" if known else "check the config, or list its prefix in `ignore`",
            )
        missing.remove(name)
        if name in places:
            path = places[name]
            yield path, _place(path, config).read(tensor)
            continue
        path, expert, part, rows = parts[name]
        stack = stacks.get(path) or stacks.setdefault(path, _new_stack(path, tensor, config))
        _shaped(name, tensor, stack.value[expert, rows].shape)
        stack.value[expert, rows] = tensor
        stack.waiting.remove((expert, part))
        if not stack.waiting:
            yield path, stacks.pop(path).value
    _compare(set(), missing, "the checkpoint")


def parameter_paths(config: K3Config) -> list[str]:
    """Paths of all tensors in the model's `state_dict()`, in no particular order."""
    paths = [path for path in _MODEL if config.residual_block or not path.startswith("output_mix")]
    for layer in range(config.layers):
        kind = config.mixer(layer)
        inner = [path for path in _LAYER if config.residual_block or "_mix" not in path]
        inner += [f"attention.mixer.{path}" for path in _MIXERS[kind] if _mixer_has(path, kind, config)]
        if config.is_dense(layer):
            inner += [f"feed_forward.mlp.{path}" for path in _GATED_MLP]
        else:
            inner += [f"feed_forward.mlp.{path}" for path in _EXPERTS if _experts_have(path, config)]
            inner += [f"feed_forward.mlp.experts.{name}" for name in ("gate_up", "down")]
        paths += [f"layers.{layer}.{path}" for path in inner]
    return paths


def _mixer_has(path: str, kind: str, config: K3Config) -> bool:
    part, _, inner = path.partition(".")
    if part == "output_gate":
        gated = kind == "kda" or config.attention_gate
        low_rank = kind == "kda" and config.kda_output_gate == "low_rank"
        return gated and (inner != "weight") == low_rank
    return part != "query" or (inner == "proj.weight") == (config.q_rank == 0)


def _experts_have(path: str, config: K3Config) -> bool:
    if path.startswith("latent"):
        return config.latent_size > 0
    return config.shared_size > 0 or not path.startswith("shared")


def _place(path: str, config: K3Config) -> _Place:
    prefix = "language_model." if config.checkpoint_names == "kimi_k3" else ""
    if path in _MODEL:
        name = _MODEL[path]
    else:
        _, layer, inner = path.split(".", 2)
        name = f"model.layers.{layer}.{_layer_name(inner, int(layer), config)}"
    return _Place(prefix + name, *_shapes(path, prefix + name, config))


def _layer_name(inner: str, layer: int, config: K3Config) -> str:
    for start, stored, table in (
        ("attention.mixer.", "self_attn.", _MIXERS[config.mixer(layer)]),
        ("feed_forward.mlp.", "mlp." if config.is_dense(layer) else "block_sparse_moe.", _mlp_table(config, layer)),
    ):
        if inner.startswith(start):
            return stored + table[inner.removeprefix(start)]
    return _LAYER[inner]


def _mlp_table(config: K3Config, layer: int) -> dict[str, str]:
    return _GATED_MLP if config.is_dense(layer) else _EXPERTS


def _shapes(path: str, name: str, config: K3Config) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """How to write and read the tensors that are stored in another shape."""
    if path.endswith("_conv.weight"):
        size = config.kda_heads * config.kda_head_dim
        return _reshaped(name, (size, config.conv_width), (size, 1, config.conv_width))
    if path.endswith("_mix.proj"):
        return _reshaped(name, (config.hidden_size,), (1, config.hidden_size))
    if path.endswith("A_log"):
        heads = config.kda_heads
        if config.checkpoint_names == "kimi_linear":
            return _reshaped(name, (heads,), (1, 1, heads, 1))
        stored = -(-heads // _A_LOG_MULTIPLE) * _A_LOG_MULTIPLE
        return (
            lambda value: torch.cat([value, value.new_zeros(stored - heads)]),
            lambda value: _shaped(name, value, (stored,))[:heads].clone(),
        )
    return (lambda value: value), (lambda value: value)


def _reshaped(
    name: str, ours: tuple[int, ...], theirs: tuple[int, ...]
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    return (lambda value: value.reshape(theirs)), (lambda value: _shaped(name, value, theirs).reshape(ours))


def _is_stacked(path: str) -> bool:
    return ".experts." in path


def _expert_parts(path: str, config: K3Config) -> Iterator[tuple[int, str, slice]]:
    """(expert, published matrix, its rows in the stacked tensor's slice) for one stacked tensor."""
    size = config.expert_size
    gate_up = path.endswith("gate_up")
    parts = [("w1", slice(0, size)), ("w3", slice(size, 2 * size))] if gate_up else [("w2", slice(None))]
    for expert in range(config.experts):
        for part, rows in parts:
            yield expert, part, rows


def _expert_name(path: str, expert: int, part: str, config: K3Config) -> str:
    prefix = "language_model." if config.checkpoint_names == "kimi_k3" else ""
    return f"{prefix}model.layers.{path.split('.')[1]}.block_sparse_moe.experts.{expert}.{part}.weight"


def _new_stack(path: str, like: Tensor, config: K3Config) -> _Stack:
    size, width = config.expert_size, config.expert_width
    shape = (2 * size, width) if path.endswith("gate_up") else (width, size)
    waiting = {(expert, part) for expert, part, _ in _expert_parts(path, config)}
    return _Stack(like.new_empty(config.experts, *shape), waiting)


def _shaped(name: str, value: Tensor, shape: Iterable[int]) -> Tensor:
    if tuple(value.shape) != tuple(shape):
        raise CheckpointError(f"{name} has shape {tuple(value.shape)}, expected {tuple(shape)}")
    return value


def _compare(found: set[str], wanted: set[str], what: str) -> None:
    missing, extra = sorted(wanted - found), sorted(found - wanted)
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(f"{what} lacks {', '.join(missing[:3])}{more}", hint="check the config and the shards")
    if extra:
        raise CheckpointError(f"{what} holds unexpected {', '.join(extra[:3])}", hint="check the config")
