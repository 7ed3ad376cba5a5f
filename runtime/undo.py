"""A step that fails leaves a run as it was, or says what it has changed.

1. Before anything runs: copies of the buffers that a step writes, and the random generators that it draws from. There
   are no copies of weights, masters and moments: nothing but the optimizer writes them; nor of buffers that are
   known to be zero, as the counts of routers are before every step, which can be large.
2. An error before the optimizer's first write: buffers and generators are put back, sums are forgotten.
3. An interrupt (Ctrl-C, or another signal that raises) waits from that write on until the step is complete.
4. Any other error after it is told apart: an UpdateError names the weights that have changed.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from moec.compiler.errors import UpdateError
from moec.runtime.state import StepState

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NAMED = 3


class Before:
    """A run as it is before a step.

    written: paths of the buffers and weights that the step's forward and balance write.
    """

    def __init__(self, state: StepState, written: Iterable[str], device: torch.device) -> None:
        self._state, self._device = state, device
        paths = list(written)
        self._zeros = [path for path in paths if path in state.buffers and state.is_cleared(path)]
        tensors = [(state.buffers if p in state.buffers else state.weights)[p] for p in paths if p not in self._zeros]
        self._copies: list[tuple[Tensor, Tensor]] = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self._random = torch.get_rng_state()
        self._device_random = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._versions = state.written_versions()

    @property
    def weights_written(self) -> bool:
        """Whether the optimizer has begun to write."""
        return self._state.written_versions() != self._versions

    @torch.no_grad()
    def restore(self) -> None:
        """Put back everything but weights, masters and moments."""
        for tensor, value in self._copies:
            tensor.detach().copy_(value)
        for path in self._zeros:
            self._state.clear_buffer(path)
        torch.set_rng_state(self._random)
        if self._device_random is not None:
            torch.cuda.set_rng_state(self._device_random, self._device)
        self._state.clear_gradients()

    def half_done(self, error: BaseException) -> UpdateError | None:
        """What to raise for an error that came after the optimizer's first write, None where it came before."""
        state, versions = self._state, self._state.written_versions()
        changed = [path for path, a, b in zip(state.trainable, self._versions, versions, strict=True) if a != b]
        if not changed:
            return None
        named = ", ".join(changed[:_NAMED]) + (f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else "")
        text = (str(error).splitlines() or [""])[0]
        return UpdateError(
            f"step {state.step + 1} failed after it had updated {len(changed)} of {len(state.trainable)} weights",
            where=f"changed, with their moments: {named}",
            why=f"{type(error).__name__}: {text}",
            hint="load the last checkpoint; buffers, random generators and the count of steps are as before the step",
        )


@contextmanager
def interrupts_wait(until_done: Callable[[], bool]) -> Iterator[None]:
    """Within the context a signal that raises is held back while `until_done()`, and delivered on exit.

    Only Python handlers in the main thread raise, so all others are left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: handler for number in _SIGNALS if callable(handler := signal.getsignal(number))}
    held: list[tuple[int, FrameType | None]] = []

    def handle(number: int, frame: FrameType | None) -> Any:
        if until_done():
            held.append((number, frame))
            return None
        return before[signal.Signals(number)](number, frame)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for received, frame in held:
            before[signal.Signals(received)](received, frame)
