"""Overlap of FSDP's collectives with compute: gathers start early, reductions are waited for late.

A gather is started `plan.mesh.prefetch` buckets before the one that is waited for next, in forward and in backward, so
that it runs while layers compute; at most that many buckets lie gathered beside the one in use. A reduction is waited
for when as many later ones have started. The numbers and the order of collectives within a group stay as they are.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import fx

from moec.compiler.pass_manager import Change, PassContext, Report
from moec.compiler.placement import JointProgram, PlacementPass
from moec.passes.joint_edit import BACKWARD

c10d = torch.ops._c10d_functional


class PrefetchGathers(PlacementPass):
    """Move the start of each gather ahead of earlier waits, and the wait of each reduction behind later starts."""

    name: ClassVar[str] = "prefetch_gathers"
    stage: ClassVar[str] = "scheduled"
    requires: ClassVar[tuple[str, ...]] = ("shards",)

    def run(self, program: JointProgram, context: PassContext) -> Report:
        """Reorder the outer program; nothing else changes."""
        report, ahead = Report(), context.plan.mesh.prefetch
        if ahead == 0:
            return report
        graph = program.outer.graph
        for side in ("forward", "backward"):
            waits = [w for w in _waits(graph, c10d.all_gather_into_tensor.default) if _side(w) == side]
            for index, wait in enumerate(waits):
                earlier, start = waits[max(0, index - ahead)], wait.args[0]
                assert isinstance(start, fx.Node)
                earlier.prepend(start)
                start.meta["custom"] = earlier.meta["custom"]  # where it stands in the program, not what it is for
            if waits:
                report.matches.append(Change("", f"{len(waits)} gathers of {side} start {ahead} ahead"))
        reductions = _waits(graph, c10d.reduce_scatter_tensor.default)
        for index, wait in enumerate(reductions):
            reductions[min(len(reductions) - 1, index + ahead)].args[0].append(wait)  # type: ignore[union-attr]
        if reductions:
            report.matches.append(Change("", f"{len(reductions)} reductions waited for {ahead} later"))
        return report


def _waits(graph: fx.Graph, collective: object) -> list[fx.Node]:
    """Waits for one kind of collective, in order."""
    waits = graph.find_nodes(op="call_function", target=c10d.wait_tensor.default)
    return [wait for wait in waits if isinstance(wait.args[0], fx.Node) and wait.args[0].target is collective]


def _side(node: fx.Node) -> str:
    return "backward" if node.meta.get("partitioner_tag") == BACKWARD else "forward"
