"""The configuration of one member of the Kimi K3 family, checked when it is made."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from moec.compiler.errors import PresetError

MixerKind = Literal["kda", "mla", "dsa", "gqa"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "full_attention": ("mla", "dsa", "gqa"),
    "kda_decay": ("bounded", "softplus"),
    "kda_output_gate": ("full_rank", "low_rank"),
    "activation": ("situ", "silu"),
    "checkpoint_names": ("kimi_k3", "kimi_linear"),
}
_MAY_BE_ZERO = {"full_attention_layers", "residual_block", "q_rank", "rope_dim", "latent_size", "shared_size"}
_MAY_BE_ZERO |= {"dense_layers", "experts", "image_token"}


@dataclass(frozen=True)
class K3Config:
    """Shapes and choices of a model; a wrong value raises PresetError naming the field.

    vocab_size, hidden_size, layers: as usual.
    full_attention_layers: numbers of the layers that are not KDA, counted from 1 as the published configs do.
    full_attention: what those layers are: gated MLA, gated DSA, or grouped-query attention with RoPE.
    residual_block: layers per attention-residual block; 0 is the ordinary residual stream.
    norm_eps: of all RMSNorms but the low-rank ones of MLA and DSA, which use low_rank_norm_eps.

    KDA. kda_heads, kda_head_dim: K = V = kda_head_dim. conv_width: taps of the short convolutions.
    kda_decay: log-decay `kda_lower_bound * sigmoid(...)` or `-exp(A) softplus(...)`. decay_rank: inner width of the
    decay projection, and of the output gate when kda_output_gate is "low_rank". l2_eps: of the query and key norms.

    MLA and DSA. heads; q_rank: width of the query latent, 0 projects queries directly; kv_rank: width of the key-value
    latent; nope_dim + rope_dim: width of a query head, the second part's keys shared by all heads (and never rotated);
    value_dim; attention_gate: multiply the output by sigmoid(W x).

    DSA. indexer_heads, indexer_dim: the lightning indexer. indexer_top_k: keys that each query attends to.

    GQA. heads, kv_heads, head_dim, rope_theta.

    MLPs. The first dense_layers layers have one gated MLP of dense_size, the others LatentMoE. activation "situ" uses
    situ_beta (gate) and situ_linear_beta (up). experts: routed experts per layer. top_k: experts per token.
    expert_size: intermediate width of an expert. latent_size: width that experts work in, 0 for hidden_size without
    the projections and the norm around them. shared_size: intermediate width of all shared experts as one MLP, 0 for
    none. routed_scale: factor on the routing weights. balancing: move the router's correction bias after each
    training step (quantile balancing).

    image_token: id of the placeholder that image features replace, 0 for a model without images.
    init_std: standard deviation of matrices at initialisation.
    checkpoint_names: which published naming `published_pieces` gives.
    """

    vocab_size: int
    hidden_size: int
    layers: int
    full_attention_layers: tuple[int, ...] = ()
    full_attention: Literal["mla", "dsa", "gqa"] = "mla"
    residual_block: int = 0
    norm_eps: float = 1e-5
    low_rank_norm_eps: float = 1e-6

    kda_heads: int = 1
    kda_head_dim: int = 128
    conv_width: int = 4
    kda_decay: Literal["bounded", "softplus"] = "bounded"
    kda_lower_bound: float = -5.0
    kda_output_gate: Literal["full_rank", "low_rank"] = "full_rank"
    decay_rank: int = 128
    l2_eps: float = 1e-6

    heads: int = 1
    q_rank: int = 0
    kv_rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128
    attention_gate: bool = True

    indexer_heads: int = 64
    indexer_dim: int = 128
    indexer_top_k: int = 2048

    kv_heads: int = 1
    head_dim: int = 128
    rope_theta: float = 10000.0

    dense_layers: int = 0
    dense_size: int = 1
    activation: Literal["situ", "silu"] = "situ"
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    experts: int = 0
    top_k: int = 1
    expert_size: int = 1
    latent_size: int = 0
    shared_size: int = 0
    routed_scale: float = 1.0
    balancing: bool = True

    image_token: int = 0
    init_std: float = 0.02
    checkpoint_names: Literal["kimi_k3", "kimi_linear"] = "kimi_k3"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            _require(value in choices, name, f"is {value!r}", f"it is one of {', '.join(choices)}")
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, bool | str | tuple) or item.name == "kda_lower_bound":
                continue
            least = 0 if item.name in _MAY_BE_ZERO else None
            _require(value > 0 or value == least, item.name, f"is {value}", "it is above 0")
        self._check_layers()
        self._check_mixers()
        self._check_experts()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """A config from plain values, as a preset file holds them; an unknown or ill-typed field is a PresetError."""
        known = {item.name: item for item in dataclasses.fields(cls)}
        arguments: dict[str, Any] = {}
        for name, value in values.items():
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
                hint = f"did you mean {', '.join(near)}?" if near else f"known fields: {', '.join(known)}"
                raise PresetError(f"unknown model field {name}", where=f"model.{name}", hint=hint)
            arguments[name] = _typed(name, str(known[name].type), value)
        missing = [n for n, item in known.items() if item.default is dataclasses.MISSING and n not in arguments]
        if missing:
            raise PresetError(f"model field {missing[0]} is missing", where=f"model.{missing[0]}")
        return cls(**arguments)

    def to_dict(self) -> dict[str, Any]:
        """Plain values of all fields; `from_dict` reads them back to an equal config."""
        values = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def mixer(self, layer: int) -> MixerKind:
        """What mixes tokens in the layer with this index (counted from 0)."""
        return self.full_attention if layer + 1 in self.full_attention_layers else "kda"

    def is_dense(self, layer: int) -> bool:
        """Whether the layer with this index (counted from 0) has a dense MLP instead of experts."""
        return layer < self.dense_layers

    @property
    def expert_width(self) -> int:
        """Width of the vectors that experts read and write."""
        return self.latent_size or self.hidden_size

    def _check_layers(self) -> None:
        numbers = self.full_attention_layers
        _require(
            list(numbers) == sorted(set(numbers)) and all(1 <= number <= self.layers for number in numbers),
            "full_attention_layers",
            f"is {list(numbers)}",
            f"it holds increasing layer numbers from 1 to {self.layers}",
        )
        _require(
            self.dense_layers <= self.layers, "dense_layers", f"is {self.dense_layers}", f"layers is {self.layers}"
        )
        _require(
            self.image_token < self.vocab_size,
            "image_token",
            f"is {self.image_token}",
            f"it is a token id below vocab_size, {self.vocab_size}",
        )

    def _check_mixers(self) -> None:
        _require(self.kda_lower_bound < 0, "kda_lower_bound", f"is {self.kda_lower_bound}", "a log-decay is below 0")
        if self.full_attention == "gqa":
            _require(
                self.heads % self.kv_heads == 0, "kv_heads", f"is {self.kv_heads}", f"it divides heads, {self.heads}"
            )
            _require(self.head_dim % 2 == 0, "head_dim", f"is {self.head_dim}", "RoPE rotates pairs, so it is even")

    def _check_experts(self) -> None:
        if self.dense_layers == self.layers:
            return
        _require(self.experts > 0, "experts", "is 0", f"layers {self.dense_layers + 1} to {self.layers} need experts")
        limit = self.experts - 1 if self.balancing else self.experts
        why = "balancing looks at the expert after the chosen ones" if self.balancing else "a token cannot take more"
        _require(self.top_k <= limit, "top_k", f"is {self.top_k}", f"it is at most {limit} of {self.experts}: {why}")


def _typed(name: str, annotation: str, value: Any) -> Any:
    if annotation.startswith("tuple"):
        good = isinstance(value, list | tuple) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
        if good:
            return tuple(value)
        wanted = "a list of whole numbers"
    elif annotation == "bool":
        good, wanted = isinstance(value, bool), "true or false"
    elif annotation == "int":
        good, wanted = isinstance(value, int) and not isinstance(value, bool), "a whole number"
    elif annotation == "float":
        if isinstance(value, str):  # YAML 1.1 reads 1e-5 as text
            with contextlib.suppress(ValueError):
                value = float(value)
        good, wanted = isinstance(value, int | float) and not isinstance(value, bool), "a number"
        value = float(value) if good else value
    else:
        good, wanted = isinstance(value, str), "text"
    if not good:
        raise PresetError(f"model field {name} is {value!r}", where=f"model.{name}", why=f"it must be {wanted}")
    return value


def _require(condition: bool, name: str, found: str, rule: str) -> None:
    if not condition:
        raise PresetError(f"model field {name} {found}", where=f"model.{name}", why=rule)
