"""Copies that run beside the compute, in order: a CUDA stream, or on the CPU a thread that behaves like one.

A lane copies in the order of the calls. `copy` returns an event; the compute waits for it with `wait`, and a copy waits
for others with `after`. What was enqueued for compute before `copy` is done when the copy begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A copy that may still run. `done` asks without waiting."""

    def done(self) -> bool: ...

    def wait(self) -> None:
        """Whatever the caller computes from here on happens after the copy."""


class Lane(Protocol):
    """One direction of the host link."""

    def copy(self, into: Tensor, source: Tensor, after: Sequence[Event] = ()) -> Event:
        """Start a copy of `source`; neither tensor may be changed, and both must be kept, until the event is done."""
        ...


def lane(device: torch.device) -> Lane:
    """A lane between a device and host memory."""
    return StreamLane(device) if device.type == "cuda" else ThreadLane()


class ThreadEvent:
    """A copy of a `ThreadLane`."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()


class ThreadLane:
    """Copies in a thread of its own."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, "moec copies")
        weakref.finalize(self, self._worker.shutdown, wait=False)

    def copy(self, into: Tensor, source: Tensor, after: Sequence[Event] = ()) -> Event:
        return ThreadEvent(self._worker.submit(_copy, into, source, tuple(after)))


def _copy(into: Tensor, source: Tensor, after: Sequence[Event]) -> None:
    for event in after:
        event.wait()
    into.copy_(source)


class StreamEvent:
    """A copy of a `StreamLane`, which the compute stream of its device may wait for."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self.event = event
        self._device = device

    def done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.event)


class StreamLane:
    """Copies in a CUDA stream of its own; host memory that is not pinned makes them wait for each other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, into: Tensor, source: Tensor, after: Sequence[Event] = ()) -> Event:
        # The compute stream made the source, and last used the memory of the target.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for event in after:
            assert isinstance(event, StreamEvent)
            self._stream.wait_event(event.event)
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        return StreamEvent(done, self._device)
