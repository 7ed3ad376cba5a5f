"""Many processes compile at a time, few hold the device's memory, and one that measures time is alone on the device.

That holds over all benchmarks that run on a machine: they share one lock.
"""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any

import torch

_LOCK = Path(tempfile.gettempdir()) / "moec-benchmarks-device"
_room: Semaphore


def start_worker(room: Semaphore, threads: int) -> None:
    """Once in every process."""
    global _room
    _room = room
    torch.set_num_threads(threads)


@contextmanager
def room() -> Iterator[None]:
    """A place for a model with its state on the device; it is empty again on exit."""
    with _room:
        try:
            yield
        finally:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


class Device:
    """The device, shared with others or alone."""

    def __init__(self) -> None:
        self._file = _LOCK.open("w")

    def share(self) -> None:
        self._take(fcntl.LOCK_SH)

    def alone(self) -> None:
        """From here on, until it is shared or left again; others finish before."""
        self._take(fcntl.LOCK_UN)
        self._take(fcntl.LOCK_EX)

    def _take(self, kind: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        fcntl.flock(self._file, kind)

    def leave(self) -> None:
        self._take(fcntl.LOCK_UN)
        self._file.close()


@contextmanager
def device() -> Iterator[Device]:
    """The device, at first shared with others."""
    found = Device()
    found.share()
    try:
        yield found
    finally:
        found.leave()


class Workers:
    """Processes that run tasks, and what they have found. seconds: after which no task begins."""

    def __init__(self, processes: int, rooms: int, seconds: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(processes, context, start_worker, (context.Semaphore(rooms), 1))
        self._end = time.time() + seconds
        self._pending: dict[Future[Any], Any] = {}

    def add(self, task: Any, function: Callable[..., Any], *arguments: Any) -> None:
        self._pending[self._pool.submit(_before, self._end, function, *arguments)] = task

    def results(self) -> Iterator[tuple[Any, Any]]:
        """(task, result) as they come: an exception as its text, None for what did not begin."""
        while self._pending:
            done, _ = wait(self._pending, return_when=FIRST_COMPLETED)
            for future in done:
                task, error = self._pending.pop(future), future.exception()
                yield task, f"{type(error).__name__}: {str(error)[:300]}" if error else future.result()

    def close(self) -> None:
        self._pool.shutdown()


def _before(end: float, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments) if time.time() < end else None
