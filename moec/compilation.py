"""What the stages of a compilation produce."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import nn

from moec.codegen.program import HostCopies, ProgramText, Section
from moec.compiler.cache_timing import Timing
from moec.compiler.capture import Capture
from moec.compiler.differentiate import Joint
from moec.compiler.layout import BucketInstance
from moec.compiler.log import PassLog
from moec.compiler.partition import Partitioned
from moec.compiler.placement import PlacementPass
from moec.compiler.plan import Plan
from moec.compiler.printer import StageGraphs
from moec.compiler.view import TrainingView
from moec.compiler.wire import Collective, microbatch_collectives
from moec.passes import SHARDING_PASSES
from moec.runtime.host_pool import ALIGNMENT


@dataclass
class Compilation:
    """Everything the stages produced; `compile` wraps it into a step, the command line prints it.

    stages: stage name -> graphs as text. unreached: trainable parameters that no gradient reaches by the model's own
    design; the optimizer leaves them alone. buckets: what lies sharded where, on several ranks. timing: when copies to
    host memory run. sharding: the passes for several ranks. joint: the graph around the layers, differentiated; outer:
    its two parts.
    """

    model: nn.Module
    view: TrainingView
    plan: Plan
    captured: Capture
    log: PassLog
    sharding: Sequence[PlacementPass] = SHARDING_PASSES
    sections: list[Section] = field(default_factory=list)
    joint: Joint | None = None
    outer: Partitioned | None = None
    unreached: list[str] = field(default_factory=list)
    buckets: dict[str, BucketInstance] = field(default_factory=dict)
    stages: dict[str, StageGraphs] = field(default_factory=dict)
    timing: Timing | None = None
    program: ProgramText | None = None

    def collectives(self) -> list[Collective]:
        """Those of one microbatch, in program order."""
        layers = {section.template.name: section.parts for section in self.sections}
        return microbatch_collectives(self.outer, layers) if self.outer is not None else []

    def host_copies(self) -> HostCopies | None:
        """What goes to host memory; None where nothing does.

        The pool has a tenth more than what is used at a time, and what the alignment of every value may take.
        """
        memory = self.log.memory
        if memory is None or memory.host == 0 or self.timing is None:
            return None
        calls = {section.template.name: len(section.template.calls) for section in self.sections}
        moved = {unit: sum(row.decision == "offload" for row in rows) for unit, rows in self.log.placements.items()}
        values = sum(count * calls.get(unit, 1) for unit, count in moved.items())
        size, limit = int(1.1 * memory.host) + ALIGNMENT * values, self.plan.cache.host_bytes
        return HostCopies(self.timing.schedule, size if limit is None else min(size, limit))

    def balanced_routers(self) -> list[tuple[str, str, int]]:
        """(bias path, histogram path, top-k) of every router whose counts the program writes."""
        return [router for router in self.view.balanced if router[1] in self._buffers()]

    def written_paths(self) -> list[str]:
        """What a step writes beside the optimizer's updates: buffers of the forward, and biases of balanced routers."""
        written = [*self._buffers(), *(bias for bias, _, _ in self.balanced_routers())]
        return sorted({self.captured.tied.get(path, path) for path in written})

    def copied_paths(self) -> list[str]:
        """Of these, what a step copies before it runs: all but the counts of routers, which are zero then."""
        counts = {self.captured.tied.get(path, path) for _, path, _ in self.balanced_routers()}
        return [path for path in self.written_paths() if path not in counts]

    def joined_buffers(self) -> list[str]:
        """Buffers that the forwards of several ranks write apart; what routers count is summed where it is used."""
        if self.plan.mesh.world == 1:
            return []
        counts = {histogram for _, histogram, _ in self.view.balanced}
        return sorted({self.captured.tied.get(path, path) for path in self._buffers() if path not in counts})

    def _buffers(self) -> Collection[str]:
        """Those that the forward writes."""
        return self.joint.buffers if self.joint is not None else ()
