"""Notice a rank that dies, and end this one with an error that says which.

1. Each rank has a thread that counts in the store of torch.distributed, and reads how far the others have counted.
2. A rank has failed when it says so, when its process is gone (seen at once by the ranks of the same machine), or when
   its count has stood still for `seconds`. A rank that ends because another failed says which one that was, so that
   all name the same.
3. The error of a collective that broke is replaced by one that names the failed rank and how to go on.
4. A main thread that does not come back, for example out of a kernel of NCCL, is ended with the process after another
   `grace` seconds; the error is printed first.

So every rank has stopped `seconds + grace` after another one died, and usually within a second or two.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType
from typing import NoReturn

from torch.distributed import DistError, Store

from moec.compiler.errors import AgreedError, RankError
from moec.runtime.bulletin import Bulletin
from moec.runtime.process import Process

EXIT_CODE = 2
_INTERVAL, _PARTS = 0.5, 10
_SIGNS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "timed out")
_FAILED, _FOLLOWED, _DONE = "failed", "followed", "done"


@dataclass(frozen=True)
class Failure:
    """A rank that failed, and how ("died", "raised KeyError: 'x'")."""

    rank: int
    how: str


class Terminated(RankError):
    """This process was told to end (SIGTERM), as launchers do when another rank has failed."""


@dataclass
class Watch:
    """One rank's view of the others.

    store: of all ranks. topic: of this watch, the same on every rank and used once. seconds, grace: see above.
    way_back: says how to go on after a failure.
    """

    store: Store
    topic: str
    rank: int
    world: int
    seconds: float = 30.0
    grace: float = 10.0
    way_back: Callable[[], str] = str

    def start(self) -> None:
        """Meet the others, which call this together, and start to look after them."""
        # A client of its own: a call that waits blocks a shared one, and with it the counting.
        self.store = self.store.clone()  # type: ignore[attr-defined]
        self.store.set_timeout(timedelta(seconds=self.seconds))
        self._interval = min(_INTERVAL, self.seconds / _PARTS)
        self._keys = [f"{self.topic}/alive/{other}" for other in range(self.world)]
        self.store.set(self._keys[self.rank], "0")
        bulletin = Bulletin(self.store, self.rank, self.world)
        said = bulletin.exchange(f"{self.topic}/process", json.dumps(asdict(Process.own())), self.seconds)
        self._processes = [Process(**json.loads(text)) for text in said]
        self._heard: dict[int, tuple[str, float]] = {}
        self._failure: Failure | None = None
        self._noticed, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch of other ranks", daemon=True)
        self._thread.start()

    def stop(self, kind: str, text: str = "") -> None:
        """End the watch and tell the others why: "done", "failed" how, or "followed" whom."""
        self._stopped.set()
        self._thread.join()
        try:
            self.store.set(self._keys[self.rank], f"{kind}:{text}")
        except RuntimeError:
            return  # The process that holds the store is gone, and everybody who would read this knows.

    def failure(self, patience: float) -> Failure | None:
        """How another rank failed, waited for up to `patience` seconds."""
        self._noticed.wait(patience)
        return self._failure

    def error(self, failure: Failure) -> RankError:
        """What this rank raises when another has failed."""
        return RankError(
            f"rank {failure.rank} {failure.how}",
            where=f"seen by rank {self.rank} of {self.world}",
            why="a step needs every rank, so this one stops too",
            hint=self.way_back(),
        )

    def _run(self) -> None:
        count = 0
        while not self._stopped.wait(self._interval):
            count += 1
            self._failure = self._look(str(count))
            if self._failure is not None:
                self._noticed.set()
                if not self._stopped.wait(self.grace):
                    self._end_process(self._failure)
                return

    def _look(self, count: str) -> Failure | None:
        try:
            self.store.set(self._keys[self.rank], count)
            said = [value.decode() for value in self.store.multi_get(self._keys)]
        except RuntimeError:
            return self._gone(set()) or Failure(0, "or the launcher, whichever holds the store, does not answer")
        for rank, text in enumerate(said):
            kind, _, rest = text.partition(":")
            if kind == _FAILED:
                return Failure(rank, rest)
            if kind == _FOLLOWED:
                return Failure(**json.loads(rest))
        done = {rank for rank, text in enumerate(said) if text.startswith(_DONE)}
        return self._gone(done) or self._silent(done, said)

    def _gone(self, done: set[int]) -> Failure | None:
        for rank, process in enumerate(self._processes):
            if rank != self.rank and rank not in done and process.is_gone():
                return Failure(rank, f"died: process {process.pid} is gone")
        return None

    def _silent(self, done: set[int], said: list[str]) -> Failure | None:
        now = time.monotonic()
        for rank, text in enumerate(said):
            before, since = self._heard.get(rank, ("", now))
            if text != before:
                self._heard[rank] = (text, now)
            elif now - since > self.seconds and rank not in done:
                return Failure(rank, f"has not been heard of for {self.seconds:g} s")
        return None

    def _end_process(self, failure: Failure) -> NoReturn:
        print(f"error: {self.error(failure)}", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)


@contextmanager
def watched(watch: Watch | None) -> Iterator[None]:
    """A context in which the failure of another rank becomes a RankError that names it; None watches nothing.

    Errors of this rank's own are told to the others and raised as they are.
    """
    if watch is None:
        yield
        return
    watch.start()
    with _sigterm_raises():
        try:
            yield
        except BaseException as error:
            if not _is_about_others(error):
                watch.stop(_FAILED, f"raised {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
                raise
            failure = watch.failure(watch.seconds + 1 if not isinstance(error, Terminated) else 2.0)
            if failure is not None:
                watch.stop(_FOLLOWED, json.dumps(asdict(failure)))
                raise watch.error(failure) from error
            watch.stop(_FAILED, f"stopped: {str(error).splitlines()[0]}")
            if isinstance(error, RankError):
                raise
            raise RankError(
                "a collective failed, and every other rank is alive",
                where=f"rank {watch.rank} of {watch.world}",
                why=str(error).splitlines()[0],
                hint=watch.way_back(),
            ) from error
    watch.stop(_DONE)


def _is_about_others(error: BaseException) -> bool:
    if isinstance(error, RankError | DistError):
        return not isinstance(error, AgreedError)
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM raises Terminated in the main thread, unless the program has a handler of its own."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise Terminated("this rank was told to end (SIGTERM)", hint="read the output of the rank that failed first")

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
