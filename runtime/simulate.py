"""Several ranks in one process, in lock step: the collectives of a program without processes or a network.

    losses = simulate(MeshPlan(fsdp=4, ep=2), lambda rank: steps[rank](batches[rank]).loss)

1. Every rank is a thread, and one of them runs at a time, in rank order, up to its next collective. Each has random
   generators of its own, which start where the caller's are. Grad mode, inference mode, autocast and the device are
   the caller's too.
2. A dispatch mode in each thread takes the collectives whose group is a role. When every rank is at one, the calls
   are compared: op and role over all ranks; dtype, shape, reduction and splits within each group.
3. Data is moved in rank order, so that results are the same in every run.
4. Ranks that do not fit together, or one that ends while others wait, raise CollectiveError on every rank. Nothing
   waits for a clock: that no rank can go on is known at once.

Stricter than real groups: a result that is read before its `wait_tensor`, and an input that is written before it, are
errors.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from moec.compiler._torch_compat import OpOverload
from moec.compiler.collectives import COLLECTIVES, NAMESPACE, WAIT, groups_of
from moec.compiler.errors import CollectiveError
from moec.compiler.plan import MeshPlan
from moec.runtime.collective import Call, CollectiveMode
from moec.runtime.meeting import flaw, mismatch, move

T = TypeVar("T")
_SECONDS_TO_END = 5.0


def simulate(mesh: MeshPlan, function: Callable[[int], T]) -> list[T]:
    """Run `function(rank)` on every rank of the mesh; returns the results in rank order.

    Raises what a rank raised of its own accord (the lowest rank that did), otherwise CollectiveError naming the first
    collective in which ranks do not fit together: its number, and op, role, dtype and shapes of both ranks.
    """
    return _Simulation(mesh, function).run()


@dataclass
class _Rank(Generic[T]):
    """One thread and where it stands. call, value: the collective it waits in. calls: those it has entered."""

    index: int
    random: tuple[Any, ...]
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    thread: threading.Thread | None = None
    call: Call | None = None
    value: Tensor | None = None
    answer: Tensor | None = None
    calls: int = 0
    ended: bool = False
    result: T | None = None
    error: BaseException | None = None


class _Simulation(Generic[T]):
    def __init__(self, mesh: MeshPlan, function: Callable[[int], T]) -> None:
        self.mesh, self.function = mesh, function
        self.ranks = [_Rank[T](index, _random_state()) for index in range(mesh.world)]
        self.paused = threading.Semaphore(0)
        self.interrupted = False
        self.failure: CollectiveError | None = None
        self._settings = _caller_settings()

    def run(self) -> list[T]:
        before = _random_state()
        try:
            while running := [rank for rank in self.ranks if not rank.ended]:
                for rank in running:
                    self._give_turn(rank)
                self._meet()
        except BaseException:
            self._stop_all()
            raise
        finally:
            _set_random_state(before)
        self._raise_error()
        return [rank.result for rank in self.ranks]  # type: ignore[misc]

    def meet(self, rank: _Rank[T], call: Call, value: Tensor) -> Tensor:
        """In a rank's thread: give the turn away until all ranks are at a collective; returns its result."""
        if threading.current_thread() is not rank.thread:
            raise CollectiveError(
                f"rank {rank.index} calls {call} in a thread of its own making",
                why="autograd runs the backward of all ranks in one thread per CUDA device",
                hint="simulate on the CPU, or call backward functions without autograd",
            )
        self._check_failure()
        rank.calls += 1
        why = flaw(self.mesh, rank.index, call, value)
        if why:
            self.fail(rank, f"collective {rank.calls - 1} of rank {rank.index} is wrong: {call}", why)
        rank.call, rank.value = call, value
        self.paused.release()
        rank.turn.acquire()
        rank.call = rank.value = None
        if self.interrupted:
            raise KeyboardInterrupt
        self._check_failure()
        assert rank.answer is not None
        answer, rank.answer = rank.answer, None
        return answer

    def fail(self, rank: _Rank[T], what: str, why: str) -> NoReturn:
        """In a rank's thread: raise an error that every other rank will raise too."""
        self.failure = CollectiveError(what, where=_at(rank).removeprefix(" at "), why=why)
        self._check_failure()
        raise AssertionError

    def _check_failure(self) -> None:
        if self.failure is not None:
            # An error of its own for each rank: a raised error carries the traceback of its thread.
            error = self.failure
            raise CollectiveError(error.what, where=error.where, why=error.why, hint=error.hint)

    def _give_turn(self, rank: _Rank[T]) -> None:
        _set_random_state(rank.random)
        if rank.thread is None:
            rank.thread = threading.Thread(target=self._live, args=(rank,), name=f"rank {rank.index}", daemon=True)
            rank.thread.start()
        else:
            rank.turn.release()
        self.paused.acquire()
        rank.random = _random_state()

    def _live(self, rank: _Rank[T]) -> None:
        try:
            with _applied(self._settings), _SimulationMode(self, rank):
                rank.result = self.function(rank.index)
        except BaseException as error:
            rank.error = error
        finally:
            rank.ended = True
            self.paused.release()

    def _meet(self) -> None:
        """Called when every rank is at a collective or has ended."""
        waiting = [rank for rank in self.ranks if rank.call is not None]
        if not waiting or self.failure is not None:
            return
        ended = [rank for rank in self.ranks if rank.ended]
        if ended:
            self.failure = self._left_alone(ended[0], waiting)
            return
        calls = [rank.call for rank in waiting if rank.call is not None]
        found = mismatch(self.mesh, calls)
        if found is not None:
            first, second = found.ranks
            self.failure = CollectiveError(
                f"ranks {first} and {second} do not fit together in collective {waiting[0].calls - 1}",
                where="; ".join(f"rank {r}: {calls[r]}{_at(self.ranks[r])}" for r in sorted({first, second})),
                why=found.why,
                hint="every rank has to run the same program with the same plan",
            )
            return
        with torch.no_grad():
            for group in groups_of(self.mesh, calls[0].role):
                members = [self.ranks[index] for index in group]
                values = [member.value for member in members if member.value is not None]
                for member, answer in zip(members, move(values, [calls[index] for index in group]), strict=True):
                    member.answer = answer

    def _left_alone(self, ended: _Rank[T], waiting: Sequence[_Rank[T]]) -> CollectiveError:
        how = f"raised {type(ended.error).__name__}" if ended.error else "ended"
        return CollectiveError(
            f"rank {ended.index} {how} after {ended.calls} collectives, "
            f"{len(waiting)} of {self.mesh.world} ranks wait in collective {waiting[0].calls - 1}",
            where="; ".join(f"rank {rank.index}: {rank.call}{_at(rank)}" for rank in waiting[:2]),
            why=str(ended.error) if ended.error else "a collective needs every rank",
            hint="every rank has to run the same collectives in the same order",
        )

    def _raise_error(self) -> None:
        own = [rank for rank in self.ranks if rank.error is not None and not _follows(rank.error)]
        for rank in own or [rank for rank in self.ranks if rank.error is not None]:
            assert rank.error is not None
            rank.error.add_note(f"raised on simulated rank {rank.index} of {self.mesh.world}")
            raise rank.error
        self._check_failure()

    def _stop_all(self) -> None:
        """After Ctrl-C: waiting ranks raise at once, a running one at its next op."""
        self.interrupted = True
        for rank in self.ranks:
            rank.turn.release()
        for rank in self.ranks:
            if rank.thread is not None:
                rank.thread.join(_SECONDS_TO_END)


@dataclass
class _InFlight:
    """A collective between launch and wait; the result is kept, so that its memory is nobody else's."""

    call: Call
    result: Tensor
    value: Tensor
    version: int


class _SimulationMode(CollectiveMode):
    """In one rank's thread: collectives go to the meeting, and are followed until they are waited for."""

    def __init__(self, simulation: _Simulation[Any], rank: _Rank[Any]) -> None:
        super().__init__()
        self._simulation, self._rank = simulation, rank
        self._in_flight: dict[int, _InFlight] = {}

    def dispatch(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self._simulation.interrupted:
            raise KeyboardInterrupt
        if func is WAIT:
            return self._wait(args[0])
        if self._in_flight and not func.is_view:
            self._check_unread(func, args)
        if func in COLLECTIVES:
            return self._launch(Call.of(func, args, kwargs), args[0])
        if func.namespace.startswith(NAMESPACE):
            known = ", ".join(COLLECTIVES.values())
            self._simulation.fail(self._rank, f"{func} is not simulated", f"the simulated collectives are {known}")
        return func(*args, **kwargs)

    def _launch(self, call: Call, value: Tensor) -> Tensor:
        result = self._simulation.meet(self._rank, call, value)
        if result.numel():
            place = result.untyped_storage().data_ptr()
            self._in_flight[place] = _InFlight(call, result, value, _version(value))
        return result

    def _wait(self, result: Tensor) -> Tensor:
        ended = self._in_flight.pop(result.untyped_storage().data_ptr(), None)
        if ended is not None and _version(ended.value) != ended.version:
            what = f"rank {self._rank.index} wrote the input of {ended.call} before it waited for the result"
            self._simulation.fail(self._rank, what, "a collective may read its input until then")
        return result

    def _check_unread(self, func: OpOverload, args: Sequence[Any]) -> None:
        for argument in args:
            for value in argument if isinstance(argument, list | tuple) else (argument,):
                # Subclasses have no memory of their own.
                if type(value) is Tensor and value.untyped_storage().data_ptr() in self._in_flight:
                    call = self._in_flight[value.untyped_storage().data_ptr()].call
                    what = f"rank {self._rank.index} uses the result of {call} in {func} before wait_tensor"
                    self._simulation.fail(self._rank, what, "it is there only after the wait")


def _version(value: Tensor) -> int:
    return 0 if value.is_inference() else value._version


def _follows(error: BaseException) -> bool:
    """Whether an error is, or was raised from, that ranks do not fit together."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, CollectiveError):
            return True
        seen = seen.__cause__
    return False


_MACHINERY = ("torch", "threading", "contextlib", "moec.runtime.simulate", "moec.runtime.collective")


def _at(rank: _Rank[Any]) -> str:
    """' at FILE:LINE' of what a rank waits in; '' when its thread has ended."""
    thread = rank.thread
    frame: FrameType | None = sys._current_frames().get(thread.ident) if thread and thread.ident else None
    while frame is not None and _is_machinery(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return f" at {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def _is_machinery(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in _MACHINERY)


def _random_state() -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), random.getstate(), np.random.get_state(), cuda


def _set_random_state(state: tuple[Any, ...]) -> None:
    of_torch, of_python, of_numpy, of_cuda = state
    torch.set_rng_state(of_torch)
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    if of_cuda is not None:
        torch.cuda.set_rng_state(of_cuda)


def _caller_settings() -> list[Callable[[], AbstractContextManager[Any]]]:
    """What a thread has of its own and starts with defaults for, as contexts that repeat the caller's."""
    grad, inference, device = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_device()
    settings: list[Callable[[], AbstractContextManager[Any]]] = [
        lambda: torch.inference_mode(inference),
        lambda: torch.set_grad_enabled(grad),
    ]
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            settings.append(lambda kind=kind, dtype=dtype: torch.autocast(kind, dtype))  # type: ignore[misc]
    if device.type != "cpu":
        settings.append(lambda: device)
    if torch.cuda.is_initialized():
        current = torch.cuda.current_device()
        settings.append(lambda: torch.cuda.device(current))
    return settings


@contextmanager
def _applied(settings: Sequence[Callable[[], AbstractContextManager[Any]]]) -> Iterator[None]:
    with ExitStack() as stack:
        for setting in settings:
            stack.enter_context(setting())
        yield
