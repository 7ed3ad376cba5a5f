"""Short texts that every rank reads from every other, through the key-value store of torch.distributed.

Needs no process group, and names the ranks that are silent: what runs before there are groups, and when they fail.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from torch.distributed import Store

from moec.compiler.errors import RankError

_SHORTEST, _LONGEST = 0.002, 0.1
_SECONDS_TO_READ = 5.0


class Bulletin:
    """One rank's view. store: the same on every rank. Each topic is used once."""

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self._store, self._rank, self._world = store, rank, world

    def exchange(self, topic: str, text: str, seconds: float) -> list[str]:
        """The texts of all ranks in rank order. Raises RankError naming those that were silent for `seconds`."""
        keys = [f"{topic}/{rank}" for rank in range(self._world)]
        try:
            self._store.set(keys[self._rank], text)
            missing = set(range(self._world))
            for _ in _until(time.monotonic() + seconds):
                missing = {rank for rank in missing if not self._store.check([keys[rank]])}
                if not missing:
                    break
            if missing:
                raise _silent(sorted(missing), self._world, topic, seconds)
            texts = [self._store.get(key).decode() for key in keys]
            self._leave(f"{topic}/read")
            return texts
        except RuntimeError as error:
            raise RankError(
                "the store of the process group does not answer",
                where=topic,
                why=str(error).splitlines()[0],
                hint="the process that holds it, rank 0 or the launcher, has ended: read its output",
            ) from error

    def _leave(self, counter: str) -> None:
        """Rank 0 may hold the store, and end after an error in what it read: it waits until the others have read."""
        self._store.add(counter, 1)
        if self._rank == 0:
            for _ in _until(time.monotonic() + _SECONDS_TO_READ):
                if self._store.add(counter, 0) >= self._world:
                    break


def _until(deadline: float) -> Iterator[None]:
    """Attempts with growing pauses; polling, since a blocking wait of the store cannot be interrupted."""
    pause = _SHORTEST
    while True:
        yield
        if time.monotonic() > deadline:
            return
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)


def _silent(missing: list[int], world: int, topic: str, seconds: float) -> RankError:
    named = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
    return RankError(
        f"rank{'s' if len(missing) > 1 else ''} {named} of {world} did not arrive within {seconds:g} s",
        where=topic,
        why="they have ended, or are still on the way",
        hint="read their output",
    )
