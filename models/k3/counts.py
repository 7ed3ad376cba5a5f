"""How large a model of a configuration is, without making it: the shapes of its modules multiplied out.

Imports no torch, so that lists of models are there at once. A module that gets another parameter needs its term here;
tests compare every term with the modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from moec.models.k3.config import K3Config, MixerKind


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters, the router's correction biases among them.

    total: all. active: those that one token meets, top_k of the routed experts. active_in_layers: the same without
    the input embedding, of which a token reads one row.
    """

    total: int
    active: int
    active_in_layers: int


def count_parameters(config: K3Config) -> Counts:
    """Of the model that `moec.models.build.build` makes of a configuration."""
    hidden, layers = config.hidden_size, config.layers
    mixers = Counter(config.mixer(layer) for layer in range(layers))
    sparse = sum(not config.is_dense(layer) for layer in range(layers))
    embedding = config.vocab_size * hidden
    mixes = 2 * layers + 1 if config.residual_block else 0
    total = 2 * embedding + (2 * layers + 1) * hidden + mixes * 2 * hidden
    total += sum(count * _MIXERS[kind](config) for kind, count in mixers.items())
    total += (layers - sparse) * _gated_mlp(config, config.dense_size) + sparse * _latent_moe(config)
    active = total - sparse * (config.experts - config.top_k) * _expert(config)
    return Counts(total, active, active - embedding)


def _kda(config: K3Config) -> int:
    hidden, heads, size = config.hidden_size, config.kda_heads, config.kda_heads * config.kda_head_dim
    low_rank = (hidden + size) * config.decay_rank
    projections = 4 * hidden * size + hidden * heads + 3 * size * config.conv_width
    gate = hidden * size if config.kda_output_gate == "full_rank" else low_rank
    return projections + low_rank + heads + size + gate + config.kda_head_dim


def _mla(config: K3Config) -> int:
    hidden, heads, width = config.hidden_size, config.heads, config.nope_dim + config.rope_dim
    query = hidden * heads * width
    if config.q_rank:
        query = (hidden + 1 + heads * width) * config.q_rank
    latent = hidden * (config.kv_rank + config.rope_dim) + config.kv_rank
    latent += config.kv_rank * heads * (config.nope_dim + config.value_dim)
    outward = hidden * heads * config.value_dim
    return query + latent + outward * (2 if config.attention_gate else 1)


def _dsa(config: K3Config) -> int:
    width, heads = config.indexer_dim, config.indexer_heads
    queries = (config.q_rank or config.hidden_size) * heads * width
    return _mla(config) + queries + config.hidden_size * (width + heads) + 2 * width


def _gqa(config: K3Config) -> int:
    return 2 * config.hidden_size * (config.heads + config.kv_heads) * config.head_dim


_MIXERS: dict[MixerKind, Callable[[K3Config], int]] = {"kda": _kda, "mla": _mla, "dsa": _dsa, "gqa": _gqa}


def _gated_mlp(config: K3Config, size: int) -> int:
    return 3 * config.hidden_size * size


def _expert(config: K3Config) -> int:
    return 3 * config.expert_width * config.expert_size


def _latent_moe(config: K3Config) -> int:
    router = config.experts * (config.hidden_size + 1)
    latent = config.latent_size * (2 * config.hidden_size + 1)
    return router + latent + config.experts * _expert(config) + _gated_mlp(config, config.shared_size)
