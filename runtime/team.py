"""What ranks do together outside of programs: tell each other JSON values, and whether something went well."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from moec.compiler.errors import MoecError
from moec.runtime.control import gathered_texts
from moec.runtime.sharded_state import ShardedState
from moec.runtime.state import StepState

T = TypeVar("T")


class PeerError(MoecError):
    """Something that all ranks did together failed on another. rank: the lowest on which it did; why: its error."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank}: {why}")


@dataclass(frozen=True)
class Team:
    """The ranks of a run. All of them call the same methods in the same order.

    device: where small exchanges run.
    """

    rank: int
    world: int
    device: torch.device

    @classmethod
    def of(cls, state: StepState) -> Team:
        """The ranks that hold parts of the same state."""
        rank = state.rank if isinstance(state, ShardedState) else 0
        return cls(rank, state.world, state.device)

    @property
    def first(self) -> bool:
        """Whether this rank does what is done once."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """The JSON values of all ranks, in rank order, on every rank."""
        if self.world == 1:
            return [value]
        return [json.loads(text) for text in gathered_texts(json.dumps(value), self.world, self.device)]

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
