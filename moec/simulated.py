"""`step.simulate_ranks()`: all ranks of a step in this process, in lock step, on batches of all ranks together.

Every rank runs the emitted program, or the graphs of a stage, on a state of its own; collectives are compared and
moved by `runtime/simulate.py`. So the numbers of a mesh can be checked where there is one CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from torch import Tensor

from moec.compiler.errors import BatchError
from moec.compiler.plan import Plan
from moec.runtime.protocol import StepResult
from moec.runtime.sharded_state import ShardedState
from moec.runtime.simulate import simulate
from moec.runtime.whole import whole_gradients, whole_weights
from moec.step import CompiledStep

T = TypeVar("T")


@dataclass
class SimulatedRanks:
    """`simulated(batch)` is one optimizer step of all ranks; `steps` are theirs, by rank.

    A batch holds the rows of all ranks: [A, world * B, T] or [world * B, T], those of rank r at r*B .. (r+1)*B.
    """

    plan: Plan
    steps: Sequence[CompiledStep]
    origin: CompiledStep  # its files are there as long as it is

    def __call__(self, batch: Mapping[str, Tensor], *, lr: float | None = None) -> StepResult:
        """One step of every rank; the result is the same on each, the first one's is returned."""
        rows = self._rows(batch)
        return self.run(lambda rank: self.steps[rank](rows[rank], lr=lr))[0]

    def loss(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Results of the forward alone, over all ranks; changes nothing."""
        rows = self._rows(batch)
        return self.run(lambda rank: self.steps[rank].loss(rows[rank]))[0]

    def gradients(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weight path -> whole gradient of the objective over the batch; changes nothing."""
        rows = self._rows(batch)

        def one(rank: int) -> dict[str, Tensor]:
            step = self.steps[rank]
            state = cast(ShardedState, step.state)
            return whole_weights(state, step.gradients(rows[rank]))

        return self.run(one)[0]

    def summed_gradients(self) -> dict[str, Tensor]:
        """Weight path -> whole gradient that the last step summed, as its update left it."""
        return self.run(lambda rank: whole_gradients(cast(ShardedState, self.steps[rank].state)))[0]

    def weights(self) -> dict[str, Tensor]:
        """Path -> whole weight."""
        return self.run(lambda rank: whole_weights(cast(ShardedState, self.steps[rank].state)))[0]

    def run(self, function: Callable[[int], T]) -> list[T]:
        """Call `function(rank)` on all ranks in lock step."""
        return simulate(self.plan.mesh, function)

    def _rows(self, batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        return split_rows(batch, self.plan)


def split_rows(batch: Mapping[str, Tensor], plan: Plan) -> list[dict[str, Tensor]]:
    """A batch of all ranks as one batch per rank; BatchError when its rows do not divide over them."""
    world = plan.mesh.world
    parts: list[dict[str, Tensor]] = [{} for _ in range(world)]
    for name, value in batch.items():
        dim = value.dim() - 2
        if value.shape[dim] % world:
            raise BatchError(
                f"{name} has {value.shape[dim]} rows, which {world} ranks cannot share",
                where=name,
                hint=f"give {plan.batch} rows for each of the {world} ranks",
            )
        for part, piece in zip(parts, value.chunk(world, dim), strict=True):
            part[name] = piece
    return parts
