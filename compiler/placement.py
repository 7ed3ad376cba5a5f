"""Passes on the differentiated program: sharding, scheduling. They see forward and backward of every unit at once.

A placement pass has the same contract as a semantic one (`compiler/pass_manager.py`) and leaves the same record.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import fx

from moec.compiler.capture import Capture
from moec.compiler.cost import Cost, graph_cost
from moec.compiler.differentiate import Joint
from moec.compiler.graph import OUTER, op_histogram
from moec.compiler.layout import BucketInstance
from moec.compiler.partition import Choices
from moec.compiler.pass_manager import Contract, PassContext, PassRecord, Report
from moec.compiler.template import Template


@dataclass
class JointProgram:
    """Every differentiated unit of a program.

    templates: by name; several may share a unit. joints: by unit name. outer: the program that calls the templates.
    shared: path of a layer's weight that more than one place of the program uses -> the outer program's name for it.
    tied: other name of a weight -> the one that owns it.
    buckets: what is gathered and reduced together, by name; filled in by sharding.
    choices: template, or OUTER -> how its values reach the backward; filled in by `place_cache`, all are kept where it
    is not.
    """

    templates: dict[str, Template]
    joints: dict[str, Joint]
    outer: Joint
    shared: Mapping[str, str] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    buckets: dict[str, BucketInstance] = field(default_factory=dict)
    choices: dict[str, Choices] = field(default_factory=dict)

    def graphs(self) -> Iterator[tuple[str, fx.Graph]]:
        """(unit name, joint graph) of every unit, the outer one last."""
        yield from ((name, joint.graph) for name, joint in self.joints.items())
        yield OUTER, self.outer.graph


class PlacementPass(Contract):
    """A transformation of the differentiated program."""

    stage: ClassVar[str] = "sharded"

    @abstractmethod
    def run(self, program: JointProgram, context: PassContext) -> Report:
        """Rewrite the joints in place and say what was matched and what nearly was."""


def run_placement(
    passes: Sequence[PlacementPass],
    program: JointProgram,
    context: PassContext,
    *,
    after_pass: Callable[[PlacementPass, JointProgram], None] | None = None,
) -> list[PassRecord]:
    """Run the passes in order; one record each, over all units together."""
    records = []
    now = _cost(program)
    for step in passes:
        before, nodes_before = _histogram(program), _nodes(program)
        started = time.perf_counter()
        report = step.run(program, context)
        for _, graph in program.graphs():
            graph.lint()
        seconds = time.perf_counter() - started
        if after_pass is not None:
            after_pass(step, program)
        after = _histogram(program)
        before_cost, now = now, _cost(program)
        records.append(
            PassRecord(
                name=step.name,
                stage=step.stage,
                unit=OUTER,
                instances=("",),
                seconds=seconds,
                matches=tuple(report.matches),
                near_misses=tuple(report.near_misses),
                nodes_before=nodes_before,
                nodes_after=_nodes(program),
                added={op: n - before.get(op, 0) for op, n in after.items() if n > before.get(op, 0)},
                removed={op: n - after.get(op, 0) for op, n in before.items() if n > after.get(op, 0)},
                cost_before=before_cost,
                cost_after=now,
            )
        )
    return records


def shared_weights(captured: Capture) -> dict[str, str]:
    """Path of each layer's weight that more than one place of a captured program uses -> the outer program's name."""
    outer = captured.program.outer
    named = {node: value.name for node, value in outer.placeholders() if value.kind == "weight"}
    shared = {}
    calls = outer.graph.find_nodes(op="call_function", target=torch.ops.moec.region.default)
    uses: Counter[fx.Node] = Counter(weight for node in calls for weight in node.args[3])  # type: ignore[union-attr, misc]
    for node in calls:
        template, path, _, weights = node.args
        for name, weight in zip(captured.templates[str(template)].weight_names, weights, strict=True):  # type: ignore[arg-type]
            if weight in named and (named[weight] != f"{path}.{name}" or uses[weight] > 1 or len(weight.users) > 1):
                shared[f"{path}.{name}"] = named[weight]
    return shared


def _histogram(program: JointProgram) -> dict[str, int]:
    counts: dict[str, int] = {}
    for _, graph in program.graphs():
        for op, count in op_histogram(graph).items():
            counts[op] = counts.get(op, 0) + count
    return counts


def _nodes(program: JointProgram) -> int:
    return sum(len(graph.nodes) for _, graph in program.graphs())


def _cost(program: JointProgram) -> Cost:
    """Of one run of every unit: a layer's cost counts once, however often it is called."""
    total = Cost()
    for _, graph in program.graphs():
        total += graph_cost(graph)
    return total
