"""The plan: everything about a training step that is a decision and not a property of the model.

A plan is typed, validated when it is made, immutable, and the same as its YAML text. Fields exist only if they work.
Its parts are in plan_parts.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import yaml

from moec.compiler.errors import PlanError
from moec.compiler.plan_fields import build_fields, convert_fields, number, require
from moec.compiler.plan_parts import CachePlan, CacheRule, LossPlan, MeshPlan, OptimizerPlan

__all__ = ["CachePlan", "CacheRule", "LossPlan", "MeshPlan", "OptimizerPlan", "Plan"]


@dataclass(frozen=True)
class Plan:
    """How to run one training step.

    batch: rows per microbatch and rank (B). length: tokens per row (T). accumulation: microbatches per step (A).
    dtype: dtype of the model's matrices; None takes the model as it is.
    image_tokens: placeholder tokens per microbatch that take a row of `image_features` each; 0 for text alone.
    packing: rows may hold several documents, told apart by `document_ids`.
    dynamic: "length" compiles one step for every length from `min_length` to `length`; None for exactly `length`.
    min_length: the shortest of these; None takes the shortest that the graph takes, which is found while compiling.
    cache: which forward values are kept, offloaded or computed again in backward.
    loss: how many logits exist at a time.
    disable: names of passes to leave out.
    enable: names of passes for another kind of device that are to run all the same.
    check: verify the stage's spec after every pass.
    """

    batch: int = 1
    length: int = 512
    accumulation: int = 1
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None
    packing: bool = False
    image_tokens: int = 0
    dynamic: Literal["length"] | None = None
    min_length: int | None = None
    cache: CachePlan = field(default_factory=CachePlan)
    loss: LossPlan = field(default_factory=LossPlan)
    mesh: MeshPlan = field(default_factory=MeshPlan)
    optimizer: OptimizerPlan = field(default_factory=OptimizerPlan)
    disable: tuple[str, ...] = ()
    enable: tuple[str, ...] = ()
    check: bool = False

    def __post_init__(self) -> None:
        convert_fields(self, "")
        for name in ("batch", "length", "accumulation"):
            value = getattr(self, name)
            require(value >= 1, name, f"is {value}", "it is at least 1")
        require(
            0 <= self.image_tokens <= self.batch * self.length,
            "image_tokens",
            f"is {self.image_tokens}",
            f"it is 0 to batch x length, {self.batch * self.length}: each is a token of the microbatch",
        )
        if self.dynamic == "length":
            require(
                2 <= self.shortest < self.length,
                "min_length",
                f"is {self.shortest}, length is {self.length}",
                "dynamic lengths need 2 <= min_length < length (length 1 cannot share a graph with longer ones)",
            )

    @property
    def shortest(self) -> int:
        """The shortest length of a dynamic step, as far as it is known: a graph takes no length below 2."""
        return 2 if self.min_length is None else self.min_length

    def completed_by(self, other: Plan) -> Self:
        """This plan with what it leaves open as a compilation of it has found: the shortest length."""
        same = self.dynamic is not None and self.dynamic == other.dynamic and self.min_length is None
        return dataclasses.replace(self, min_length=other.min_length) if same else self

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """A plan from nested plain values; an unknown field or a wrong type raises PlanError naming the field."""
        return build_fields(cls, values, "")

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
            target[leaf] = number(_yaml_value(setting, text))
        return type(self).from_dict(values)


def _yaml_value(setting: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PlanError(
            f"{setting!r} does not read as YAML", why=str(error).splitlines()[0], hint="quote it: --set 'name=\"*\"'"
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
