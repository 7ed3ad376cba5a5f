"""`step.simulate_ranks(stage=...)`: the graphs of a stage on all ranks in lock step, before or after any pass.

1. The model is compiled again without the passes behind the stage, and its graphs are interpreted (graph_program.py).
   Stages behind `sharded` add no pass: their graphs are the same ones, with implementations chosen.
2. Every rank holds the same shards at every stage. A graph in which nothing is sharded yet reads whole weights, which
   are gathered for each read, and its gradients are summed over the ranks that hold a part of the weight: FSDP with no
   compiler, which is what the passes have to equal.
3. Clipping and update are those of the emitted program, on the shards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moec.compiler.errors import ArtifactError
from moec.compiler.layout import rows_per_rank
from moec.driver import build
from moec.graph_program import GraphProgram
from moec.passes import SEMANTIC_PASSES, SHARDING_PASSES
from moec.passes.shard_experts import ShardExperts
from moec.passes.shard_parameters import ShardParameters
from moec.rank_files import read_buckets
from moec.runtime.sharded_state import ShardedState
from moec.runtime.state import StepState
from moec.runtime.whole import whole
from moec.simulated import SimulatedRanks
from moec.step import CompiledStep

if TYPE_CHECKING:
    from moec.placing import UnconnectedStep

_functional = torch.ops._c10d_functional
_SHARDING = tuple(step.name for step in SHARDING_PASSES)
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "captured": (*(step.name for step in SEMANTIC_PASSES), *_SHARDING),
    "fused": _SHARDING,
    "joint": _SHARDING,
    "sharded": (),
    "placed": (),
    "lowered": (),
}
"""Stage -> names of the passes that come after it."""


def simulate_stage(step: UnconnectedStep, stage: str) -> SimulatedRanks:
    """All ranks of a step's mesh on the graphs of one stage; ArtifactError for a name that is none."""
    if stage not in LEFT_OUT:
        raise ArtifactError(f"no stage {stage!r} to simulate", hint=f"stages: {', '.join(LEFT_OUT)}, emitted")
    return simulate_without(step, LEFT_OUT[stage])


def simulate_without(step: UnconnectedStep, passes: Collection[str]) -> SimulatedRanks:
    """All ranks of a step's mesh on the graphs that come out when these passes do not run."""
    plan, mesh = step.plan, step.plan.mesh
    off = (*plan.disable, *(known.name for known in SEMANTIC_PASSES if known.name in passes))
    sharding = tuple(known for known in SHARDING_PASSES if known.name not in passes)
    found = build(step.model, replace(plan, disable=off), sharding=sharding)
    assert found.outer is not None
    program = GraphProgram(found.sections, found.outer, found.captured.program.outer.signature.outputs, step.program)
    buckets, steps = read_buckets(step.folder), []
    for rank in range(mesh.world):
        kind = ShardedState if ShardParameters.name not in passes else GatheredState
        state = kind.from_module(step.model, step.without_gradient, buckets=buckets, mesh=mesh, rank=rank)
        state.separate_buffers()
        if isinstance(state, GatheredState):
            state.spread = mesh.ep > 1 and ShardExperts.name not in passes
        steps.append(CompiledStep.of(program, state, step.folder, step.log, plan))  # type: ignore[arg-type]
    return SimulatedRanks(plan, steps, step)


@dataclass(kw_only=True)
class GatheredState(ShardedState):
    """Shards for a program that knows of none. spread: it sees the experts of its rank only, and not all of them."""

    spread: bool = False

    def scope(self, path: str) -> Mapping[str, Tensor]:
        """See `StepState.scope`; a weight is gathered when it is read, by all ranks together."""
        return _Scope(self, f"{path}." if path else "")

    @torch.no_grad()
    def accumulate(self, path: str, gradient: Tensor) -> None:
        """Sum a gradient over the ranks that computed a part of it, and keep the rows of this rank."""
        shard = self.shards[self.owner(path)]
        own = self._own_experts(path)
        role = "control" if own is None else "expert_scatter"
        total = _functional.wait_tensor(_functional.all_reduce(gradient.contiguous(), "sum", role))
        first = 0 if own is None else own.start
        rows = total.reshape(total.shape or (1,))[shard.rows.start - first : shard.rows.stop - first]
        StepState.accumulate(self, path, rows)

    def read(self, path: str) -> Tensor:
        """What the program sees of a weight or buffer."""
        owner = self.owner(path)
        if owner not in self.shards:
            return (self.buffers if path in self.buffers else self.weights)[path].detach()
        value, own = whole(self, owner, self.weights[owner].detach()), self._own_experts(path)
        if own is None:
            return value
        part = value[own.start : own.stop]
        padding = value.new_zeros(len(own) - len(part), *part.shape[1:])
        return torch.cat((part, padding))

    def _own_experts(self, path: str) -> range | None:
        """The experts of this rank's share, padded ones included; None for a weight that the program sees whole."""
        shard = self.shards[self.owner(path)]
        if not self.spread or shard.role != "experts":
            return None
        share = rows_per_rank(shard.shape[0], self.mesh.ep)
        start = share * (self.rank % self.mesh.ep)
        return range(start, start + share)


@dataclass
class _Scope(Mapping[str, Tensor]):
    state: GatheredState
    prefix: str

    def __getitem__(self, name: str) -> Tensor:
        return self.state.read(self.prefix + name)

    def __iter__(self) -> Iterator[str]:
        known = {**self.state.weights, **self.state.buffers}
        return (name.removeprefix(self.prefix) for name in known if name.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)
