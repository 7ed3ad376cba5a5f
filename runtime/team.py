"""What ranks say to each other outside of programs: small Python values, and whether something went well everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from moec.runtime.sharded_state import ShardedState
from moec.runtime.state import StepState

T = TypeVar("T")


class PeerError(Exception):
    """Another rank failed. rank: the lowest that did; why: the text of its error."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank}: {why}")
        self.rank, self.why = rank, why


@dataclass(frozen=True)
class Team:
    """The ranks of a run; alone by default. All of them call the same methods in the same order."""

    rank: int = 0
    world: int = 1

    @classmethod
    def of(cls, state: StepState) -> Team:
        """The ranks that hold parts of the same state."""
        return cls(state.rank, state.mesh.world) if isinstance(state, ShardedState) else cls()

    @property
    def first(self) -> bool:
        """Whether this rank does what is done once."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in rank order, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def together(self, action: Callable[[], T]) -> T:
        """Run an action on every rank and return what it gave on this one.

        When it raises anywhere, every rank raises: its own error where there is one, PeerError elsewhere.
        """
        if self.world == 1:
            return action()
        try:
            outcome, failure = [action()], None
        except Exception as error:
            outcome, failure = [], error
        reasons = self.gather("" if failure is None else str(failure) or type(failure).__name__)
        if failure is not None:
            raise failure
        for rank, why in enumerate(reasons):
            if why:
                raise PeerError(rank, why)
        return outcome[0]

    def once(self, action: Callable[[], None]) -> None:
        """Run an action on the first rank while the others wait; raises on all of them as `together` does."""
        self.together(action if self.first else _nothing)


def _nothing() -> None:
    return None
