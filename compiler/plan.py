"""The plan: everything about a training step that is a decision and not a property of the model.

A plan is typed, validated when it is made, immutable, and the same as its YAML text. Fields exist only if they work.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import yaml

from moec.compiler.byte_sizes import parse_bytes
from moec.compiler.errors import PlanError


@dataclass(frozen=True)
class OptimizerPlan:
    """AdamW and its schedule.

    lr: peak learning rate. clip_norm: bound of the global gradient norm, 0 for none. schedule: how lr moves after
    `warmup_steps` of linear rise; "cosine" ends at lr * min_lr_ratio at step `total_steps`, which `moec train` sets
    from its number of steps; while it is 0 the rate stays at its peak.
    """

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_steps: int = 0
    total_steps: int = 0
    min_lr_ratio: float = 0.1

    def __post_init__(self) -> None:
        _convert_fields(self, "optimizer.")
        _require(self.lr >= 0, "optimizer.lr", f"is {self.lr}", "a learning rate is at least 0")
        for beta in self.betas:
            _require(0 <= beta < 1, "optimizer.betas", f"holds {beta}", "each beta lies in [0, 1)")
        _require(self.eps > 0, "optimizer.eps", f"is {self.eps}", "eps is above 0")
        _require(self.weight_decay >= 0, "optimizer.weight_decay", f"is {self.weight_decay}", "it is at least 0")
        _require(self.clip_norm >= 0, "optimizer.clip_norm", f"is {self.clip_norm}", "it is at least 0; 0 turns it off")
        _require(self.warmup_steps >= 0, "optimizer.warmup_steps", f"is {self.warmup_steps}", "it is at least 0")
        _require(
            self.total_steps == 0 or self.total_steps > self.warmup_steps,
            "optimizer.total_steps",
            f"is {self.total_steps}",
            f"it is 0, or above the {self.warmup_steps} steps of warm-up",
        )
        _require(0 <= self.min_lr_ratio <= 1, "optimizer.min_lr_ratio", f"is {self.min_lr_ratio}", "it is 0 to 1")


@dataclass(frozen=True)
class MeshPlan:
    """How many ranks work on a step, and how they share it.

    fsdp: all ranks; each holds its part of every parameter, gradient and moment. ep: ranks that share the experts
    among them; it divides fsdp, and each expert lies on fsdp / ep ranks in parts.
    gather: "again" gathers a layer's weights anew for backward, "keep" holds them from forward on.
    prefetch: how many buckets are gathered ahead of the layer that runs; 0 gathers each one when it is needed.
    reduce_dtype: dtype in which gradients are summed over ranks.
    capacity: rows that an expert takes from each rank, as a multiple of an even share; 0 takes what comes.
    overflow: with a capacity, "refuse" stops the step when rows are too many, "drop" leaves them out and counts them.
    """

    fsdp: int = 1
    ep: int = 1
    gather: Literal["again", "keep"] = "again"
    prefetch: int = 1
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    capacity: float = 0.0
    overflow: Literal["refuse", "drop"] = "refuse"

    def __post_init__(self) -> None:
        _convert_fields(self, "mesh.")
        _require(self.fsdp >= 1, "mesh.fsdp", f"is {self.fsdp}", "there is at least one rank")
        _require(self.ep >= 1, "mesh.ep", f"is {self.ep}", "there is at least one rank")
        _require(self.fsdp % self.ep == 0, "mesh.ep", f"is {self.ep}, mesh.fsdp is {self.fsdp}", "ep must divide fsdp")
        _require(self.prefetch >= 0, "mesh.prefetch", f"is {self.prefetch}", "it is at least 0")
        _require(self.capacity >= 0, "mesh.capacity", f"is {self.capacity}", "it is at least 0; 0 takes all rows")
        _require(
            self.capacity == 0 or self.ep > 1,
            "mesh.capacity",
            f"is {self.capacity}, mesh.ep is {self.ep}",
            "only ranks that exchange rows have a capacity",
        )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.fsdp

    @property
    def edp(self) -> int:
        """Ranks that hold parts of the same experts."""
        return self.fsdp // self.ep


@dataclass(frozen=True)
class LossPlan:
    """How many logits exist at a time in the output head, forward and backward.

    memory: their bytes, such as "1.25GiB"; None: 1.25 GiB, or what the returned gradient of the head's weight takes if
    that is more, since it is made where the last chunk is gone. rows, columns: rows of hidden states and classes of the
    vocabulary per chunk; what is None follows from the memory: all classes as long as 512 rows of them fit, fewer
    classes then.
    """

    memory: str | None = None
    rows: int | None = None
    columns: int | None = None

    def __post_init__(self) -> None:
        _convert_fields(self, "loss.")
        try:
            size = self.memory_bytes
        except ValueError as error:
            raise PlanError(
                f"plan field loss.memory is {self.memory!r}", where="plan.loss.memory", why=str(error)
            ) from None
        _require(size is None or size >= 1, "loss.memory", f"is {self.memory}", "it is at least 1B")
        for name in ("rows", "columns"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"loss.{name}", f"is {value}", "it is at least 1")

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else parse_bytes(self.memory)


@dataclass(frozen=True)
class CacheRule:
    """How values of layers reach the backward.

    decision: keep in device memory, offload to host memory, or recompute. path: pattern of module paths, as `fnmatch`
    reads it ("layers.*.experts", "*"); it covers everything inside of what it matches. op: pattern of the names of the
    ops whose results are meant ("moec.grouped_linear"); "input" are the inputs of a layer.
    """

    decision: Literal["keep", "offload", "recompute"]
    path: str = "*"
    op: str = "*"

    def __post_init__(self) -> None:
        _convert_fields(self, "cache.policy.")


@dataclass(frozen=True)
class CachePlan:
    """How forward values reach the backward, and how much memory there is for it.

    hbm: device memory of one rank for everything, such as "60GiB" or a number of bytes; a step that is predicted to
    need more is refused. None sets no limit. host: the same for values that wait in host memory.
    policy: "keep" keeps all, "recompute" recomputes all in layers that may be, "auto" lets a solver choose within the
    limits; or a list of rules, of which the last one that covers a value counts, and others are kept.
    """

    hbm: int | str | None = None
    host: int | str | None = None
    policy: Literal["keep", "recompute", "auto"] | tuple[CacheRule, ...] = "keep"

    def __post_init__(self) -> None:
        _convert_fields(self, "cache.")
        for name in ("hbm", "host"):
            _bytes_of(getattr(self, name), f"cache.{name}")
        free = self.policy == "auto" and self.hbm is None
        _require(not free, "cache.hbm", "is not set, cache.policy is auto", "the solver needs to know the limit")

    @property
    def hbm_bytes(self) -> int | None:
        return _bytes_of(self.hbm, "cache.hbm")

    @property
    def host_bytes(self) -> int | None:
        return _bytes_of(self.host, "cache.host")

    @property
    def rules(self) -> tuple[CacheRule, ...]:
        """The policy as rules, for policies that are."""
        named = {"recompute": (CacheRule("recompute"),), "keep": (), "auto": ()}
        return named[self.policy] if isinstance(self.policy, str) else self.policy


@dataclass(frozen=True)
class Plan:
    """How to run one training step.

    batch: rows per microbatch and rank (B). length: tokens per row (T). accumulation: microbatches per step (A).
    dtype: dtype of the model's matrices; None takes the model as it is.
    image_tokens: placeholder tokens per microbatch that take a row of `image_features` each; 0 for text alone.
    packing: rows may hold several documents, told apart by `document_ids`.
    dynamic: "length" compiles one step for every length from `min_length` to `length`; None for exactly `length`.
    cache: which forward values are kept, offloaded or computed again in backward.
    loss: how many logits exist at a time.
    disable: names of passes to leave out.
    check: verify the stage's spec after every pass.
    """

    batch: int = 1
    length: int = 512
    accumulation: int = 1
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None
    packing: bool = False
    image_tokens: int = 0
    dynamic: Literal["length"] | None = None
    min_length: int = 2
    cache: CachePlan = field(default_factory=CachePlan)
    loss: LossPlan = field(default_factory=LossPlan)
    mesh: MeshPlan = field(default_factory=MeshPlan)
    optimizer: OptimizerPlan = field(default_factory=OptimizerPlan)
    disable: tuple[str, ...] = ()
    check: bool = False

    def __post_init__(self) -> None:
        _convert_fields(self, "")
        for name in ("batch", "length", "accumulation", "min_length"):
            value = getattr(self, name)
            _require(value >= 1, name, f"is {value}", "it is at least 1")
        _require(
            0 <= self.image_tokens <= self.batch * self.length,
            "image_tokens",
            f"is {self.image_tokens}",
            f"it is 0 to batch x length, {self.batch * self.length}: each is a token of the microbatch",
        )
        if self.dynamic == "length":
            _require(
                2 <= self.min_length < self.length,
                "min_length",
                f"is {self.min_length}, length is {self.length}",
                "dynamic lengths need 2 <= min_length < length (length 1 cannot share a graph with longer ones)",
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """A plan from nested plain values; an unknown field or a wrong type raises PlanError naming the field."""
        return _build(cls, values, "")

    @classmethod
    def from_yaml(cls, source: str | Path) -> Self:
        """A plan from a YAML file (Path) or YAML text (str)."""
        where = str(source) if isinstance(source, Path) else ""
        if isinstance(source, Path):
            if not source.is_file():
                raise PlanError(f"no plan file at {source}", hint="give the path of a YAML file with plan fields")
            source = source.read_text(encoding="utf-8")
        try:
            values = yaml.safe_load(source)
        except yaml.YAMLError as error:
            raise PlanError("the plan is not YAML", where=where, why=str(error)) from error
        if values is None:
            values = {}
        if not isinstance(values, Mapping):
            raise PlanError(f"a plan is a mapping of fields, not a {type(values).__name__}", where=where)
        return cls.from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, all fields, in declared order."""
        return _plain(dataclasses.asdict(self))

    def with_schedule_of(self, other: Plan) -> Self:
        """This plan with the learning rate and its schedule of another: inputs of a step, not a part of its program."""
        names = ("lr", "schedule", "warmup_steps", "total_steps", "min_lr_ratio")
        taken = {name: getattr(other.optimizer, name) for name in names}
        return dataclasses.replace(self, optimizer=dataclasses.replace(self.optimizer, **taken))

    def to_yaml(self) -> str:
        """YAML text that `from_yaml` reads back to an equal plan."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    def override(self, settings: Sequence[str]) -> Self:
        """A plan with "field=value" settings applied; dots reach nested fields, values are YAML (optimizer.lr=1e-3)."""
        values = self.to_dict()
        for setting in settings:
            name, separator, text = setting.partition("=")
            if not separator:
                raise PlanError(f"{setting!r} is not field=value", hint="for example --set optimizer.lr=1e-3")
            *parents, leaf = name.strip().split(".")
            target = values
            for parent in parents:
                target = target.setdefault(parent, {})
                if not isinstance(target, dict):
                    raise PlanError(f"plan field {name!r}: {parent!r} has no fields of its own", where=f"plan.{name}")
            target[leaf] = _number(_yaml_value(setting, text))
        return type(self).from_dict(values)


def _yaml_value(setting: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PlanError(
            f"{setting!r} does not read as YAML", why=str(error).splitlines()[0], hint="quote it: --set 'name=\"*\"'"
        ) from error


def _convert_fields(plan: Any, prefix: str) -> None:
    """Check every field's type, and give it the exact one: a list becomes a tuple, a whole number a float."""
    for name, hint in typing.get_type_hints(type(plan)).items():
        object.__setattr__(plan, name, _convert(hint, getattr(plan, name), f"{prefix}{name}"))


def _build(cls: type[Any], values: Mapping[str, Any], prefix: str) -> Any:
    known = {item.name: item for item in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    arguments = {}
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.4)
            raise PlanError(
                f"unknown plan field {prefix}{name}",
                where=f"plan.{prefix}{name}",
                hint=f"did you mean {', '.join(near)}?" if near else f"known fields: {', '.join(known)}",
            )
        arguments[name] = _convert(hints[name], value, f"{prefix}{name}")
    return cls(**arguments)


def _convert(hint: Any, value: Any, name: str) -> Any:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        if isinstance(value, typing.cast(type[Any], hint)):
            return value
        if not isinstance(value, Mapping):
            raise _type_error(name, value, "a mapping of fields")
        return _build(typing.cast(type[Any], hint), value, f"{name}.")
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        return _convert_to_one([option for option in options if option is not type(None)], value, name)
    if origin is Literal:
        if value not in options:
            raise _type_error(name, value, f"one of {', '.join(map(str, options))}")
        return value
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise _type_error(name, value, "a list")
        if options[-1] is not Ellipsis and len(options) != len(value):
            raise _type_error(name, value, f"a list of {len(options)}")
        return tuple(_convert(options[0], item, name) for item in value)
    given, value = value, _number(value) if hint in (int, float) else value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise _type_error(name, given, _WORDS.get(hint, "text"))
    return value


def _convert_to_one(options: Sequence[Any], value: Any, name: str) -> Any:
    """The value as the first of several types that it is one of; the error is that of the last one."""
    for option in options[:-1]:
        try:
            return _convert(option, value, name)
        except PlanError:
            continue
    wants_list = typing.get_origin(options[-1]) is tuple and isinstance(value, str)
    return _convert(options[0] if wants_list else options[-1], value, name)


def _bytes_of(size: int | str | None, name: str) -> int | None:
    if size is None or isinstance(size, int):
        _require(size is None or size >= 0, name, f"is {size}", "it is at least 0")
        return size
    try:
        return parse_bytes(size)
    except ValueError as error:
        raise PlanError(f"plan field {name} is {size!r}", where=f"plan.{name}", why=str(error)) from None


_WORDS = {int: "a whole number", float: "a number", bool: "true or false"}


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-3 as text; a plan means the number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _type_error(name: str, value: Any, wanted: str) -> PlanError:
    return PlanError(f"plan field {name} is {value!r}", where=f"plan.{name}", why=f"it must be {wanted}")


def _require(condition: bool, name: str, found: str, rule: str) -> None:
    if not condition:
        raise PlanError(f"plan field {name} {found}", where=f"plan.{name}", why=rule)
