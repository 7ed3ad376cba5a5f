"""Passes: one class per transformation, a contract each, and a report of what happened and what nearly did.

The pipeline validates all contracts before anything runs, runs each pass over every unit of the program, checks the
stage's spec afterwards when asked, and keeps one `PassRecord` per pass and unit for the log.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import fx

from moec.compiler.cost import Cost, graph_cost
from moec.compiler.errors import PassError
from moec.compiler.graph import Program, Unit, module_path, op_histogram


@dataclass(frozen=True)
class Change:
    """Something a pass changed: the module path, what was found there, and what it became."""

    path: str
    what: str


@dataclass(frozen=True)
class NearMiss:
    """Something that looked like a match and was left alone, with the reason and what would help."""

    path: str
    what: str
    reason: str


@dataclass
class Report:
    """What one pass did to one unit."""

    matches: list[Change] = field(default_factory=list)
    near_misses: list[NearMiss] = field(default_factory=list)

    def match(self, node: fx.Node, what: str) -> None:
        self.matches.append(Change(module_path(node), what))

    def near_miss(self, node: fx.Node, what: str, reason: str) -> None:
        self.near_misses.append(NearMiss(module_path(node), what, reason))


@dataclass
class PassContext:
    """What a pass may know beside the graph.

    plan: of the compilation. documents: unit name -> names of its inputs that are document ids, and never fall along a
    row (`document_inputs.py`). facts: what earlier passes left under their name.
    """

    plan: Any = None
    documents: Mapping[str, Collection[str]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def documents_of(self, unit: Unit) -> set[fx.Node]:
        """The placeholders of a unit that are document ids."""
        names = self.documents.get(unit.name, ())
        return {node for node, value in unit.placeholders() if value.kind == "input" and value.name in names}


class Contract(ABC):
    """What a pass promises.

    name: also the file's name. stage: the stage whose spec the result fulfils.
    requires / provides / conflicts: names of facts ("norms", "attention", ...) that order the pipeline.
    changes_numerics: True when results may differ by rounding. touches_state: True when parameters change.
    routine: what to call matches that nobody reads one by one; '' for all others.
    device: the kind of device that the pass is for, '' for all; on others it runs where plan.enable names it.
    """

    name: ClassVar[str]
    stage: ClassVar[str] = "recognized"
    requires: ClassVar[tuple[str, ...]] = ()
    provides: ClassVar[tuple[str, ...]] = ()
    conflicts: ClassVar[tuple[str, ...]] = ()
    changes_numerics: ClassVar[bool] = False
    touches_state: ClassVar[bool] = False
    routine: ClassVar[str] = ""
    device: ClassVar[str] = ""


class Pass(Contract):
    """A transformation graph -> graph on one unit."""

    @abstractmethod
    def run(self, unit: Unit, context: PassContext) -> Report:
        """Rewrite `unit.graph` in place and say what was matched and what nearly was."""

    def wanted(self, plan: Any) -> bool:
        """Whether a plan asks for this pass at all."""
        return True

    def expected(self, unit: Unit) -> str:
        """Why this unit looks as if it should have matched ('' when it does not): text for the warning."""
        return ""


@dataclass(frozen=True)
class PassRecord:
    """One line of the log: one pass on one unit.

    instances: the layers that share the unit. cost_before, cost_after: of one run of its graph, in forward direction.
    routine: see `Contract`.
    """

    name: str
    stage: str
    unit: str
    instances: tuple[str, ...]
    seconds: float
    matches: tuple[Change, ...]
    near_misses: tuple[NearMiss, ...]
    nodes_before: int
    nodes_after: int
    added: dict[str, int]
    removed: dict[str, int]
    cost_before: Cost
    cost_after: Cost
    warning: str = ""
    routine: str = ""


@dataclass
class Pipeline:
    """Passes in order. `after_pass(pass, unit)` runs after each one (spec check, per-pass verification, snapshots)."""

    passes: Sequence[Pass]
    cost: Callable[[fx.Graph], Cost] = graph_cost
    after_pass: Callable[[Pass, Unit], None] | None = None

    def validate(self, given: Sequence[str] = ()) -> None:
        """Check names, requirements and conflicts before anything runs; raises PassError naming both passes."""
        have: dict[str, str] = dict.fromkeys(given, "the capture")
        seen: set[str] = set()
        for step in self.passes:
            if step.name in seen:
                raise PassError(f"pass {step.name} is listed twice", hint="remove one of them")
            seen.add(step.name)
            for need in step.requires:
                if need not in have:
                    later = [other.name for other in self.passes if need in other.provides]
                    raise PassError(
                        f"pass {step.name} requires {need!r}, which no earlier pass provides",
                        why=f"{', '.join(later)} provides it, but comes later" if later else "no pass provides it",
                        hint="reorder the passes, or leave this one out",
                    )
            for clash in step.conflicts:
                if clash in have:
                    raise PassError(
                        f"pass {step.name} conflicts with {clash!r}",
                        why=f"{have[clash]} already provided it",
                        hint="leave one of the two out",
                    )
            have.update(dict.fromkeys(step.provides, step.name))

    def run(self, program: Program, context: PassContext) -> list[PassRecord]:
        """Run every pass on every unit, in order, and return the log's records."""
        records = []
        costs = {name: self.cost(unit.graph) for name, unit in program.units.items()}
        for step in self.passes:
            for unit in program.units.values():
                records.append(self._run_one(step, unit, context, costs[unit.name]))
                costs[unit.name] = records[-1].cost_after
        return records

    def _run_one(self, step: Pass, unit: Unit, context: PassContext, cost_before: Cost) -> PassRecord:
        before = op_histogram(unit.graph)
        nodes_before = len(unit.graph.nodes)
        started = time.perf_counter()
        report = step.run(unit, context)
        unit.graph.eliminate_dead_code()
        unit.graph.lint()
        unit.module.recompile()
        seconds = time.perf_counter() - started
        if self.after_pass is not None:
            self.after_pass(step, unit)
        after = op_histogram(unit.graph)
        return PassRecord(
            name=step.name,
            stage=step.stage,
            unit=unit.name,
            instances=unit.instances,
            seconds=seconds,
            matches=tuple(report.matches),
            near_misses=tuple(report.near_misses),
            nodes_before=nodes_before,
            nodes_after=len(unit.graph.nodes),
            added={op: n - before.get(op, 0) for op, n in after.items() if n > before.get(op, 0)},
            removed={op: n - after.get(op, 0) for op, n in before.items() if n > after.get(op, 0)},
            cost_before=cost_before,
            cost_after=self.cost(unit.graph) if report.matches else cost_before,
            warning="" if report.matches else step.expected(unit),
            routine=step.routine,
        )
