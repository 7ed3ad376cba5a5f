"""Real ranks that die, hang or raise at any moment: the others stop soon, and name them and the way back."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moec.compiler.errors import NonFiniteError, RankError
from moec.compiler.plan import MeshPlan
from moec.runtime.groups import connect, watch_of
from moec.runtime.process import Process
from moec.runtime.ranks import Ranks
from moec.runtime.watch import EXIT_CODE, Terminated, Watch, watched
from tests.runtime.outcomes import run_ranks

CPU = torch.device("cpu")
WORLD, STEPS = 4, 400
f = torch.ops._c10d_functional


def run(rank: int, victim: int, case: str, moment: float, folder: Path | None = None) -> str:
    """Collectives on several roles for some seconds; `victim` fails `moment` seconds after the start.

    folder: for files with what each rank prints.
    """
    if folder is not None:
        os.dup2(os.open(folder / f"{rank}", os.O_WRONLY | os.O_CREAT), 2)
    ranks = connect(MeshPlan(fsdp=WORLD, ep=2), CPU)
    watch = watch_of(ranks, 2.0, lambda: "the last good checkpoint is out/step-00000007")
    assert watch is not None
    watch = replace(watch, grace=2.0)
    if rank == victim and case in _FROM_OUTSIDE:
        threading.Timer(moment, _FROM_OUTSIDE[case]).start()
    began = time.monotonic()
    with watched(watch):
        for step in range(STEPS):
            gathered = f.all_gather_into_tensor(torch.ones(1000), WORLD, "gather")
            f.wait_tensor(f.all_reduce(torch.ones(100), "sum", "exchange"))
            f.wait_tensor(gathered)
            if case == "raises" and rank == victim and time.monotonic() - began > moment:
                raise KeyError("no such layer")
            if case == "stuck" and step == 10:
                if rank == victim:
                    time.sleep(moment)
                    _kill()
                threading.Event().wait()
            f.wait_tensor(f.all_reduce(torch.ones(100), "sum", "control"))
            time.sleep(0.02)
    return "whole"


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


_FROM_OUTSIDE = {"killed": _kill, "hangs": _stop, "terminated": _terminate}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "how", "seconds"),
    [
        ("killed", "died: process", 8),
        ("raises", "raised KeyError: 'no such layer'", 8),
        ("terminated", "stopped: this rank was told to end (SIGTERM)", 8),
    ],
)
@pytest.mark.parametrize("victim", [0, 2])
def test_the_others_stop_and_name_the_rank(case: str, how: str, seconds: float, victim: int) -> None:
    moment = random.Random(f"{case} {victim}").uniform(0.1, 1.5)
    outcomes = run_ranks(WORLD, run, victim, case, moment, seconds=60)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        assert outcome.error.startswith(f"RankError: rank {victim} {how}"), outcome
        assert f"seen by rank {rank} of 4" in outcome.error
        assert "do:    the last good checkpoint is out/step-00000007" in outcome.error
        assert outcome.seconds < seconds + moment
    if case == "raises":
        assert outcomes[victim].error == "KeyError: 'no such layer'"
    if case == "killed":
        assert outcomes[victim].code == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_hangs_is_named_and_those_that_wait_for_it_end(victim: int, tmp_path: Path) -> None:
    """gloo waits for a stopped process until its own timeout, so most are ended with their processes."""
    outcomes = run_ranks(WORLD, run, victim, "hangs", 0.5, tmp_path, seconds=60, hanging=(victim,))
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.seconds < 12
            said = outcome.error or (tmp_path / f"{rank}").read_text()
            assert bool(outcome.error) == (outcome.code != EXIT_CODE)
            assert f"rank {victim} has not been heard of for 2 s\n  where: seen by rank {rank} of 4" in said
            assert "do:    the last good checkpoint is out/step-00000007" in said


@pytest.mark.slow
def test_main_threads_that_do_not_come_back_are_ended_with_their_processes() -> None:
    outcomes = run_ranks(WORLD, run, 1, "stuck", 0.5, seconds=60)
    assert [outcome.code for outcome in outcomes] == [EXIT_CODE, -signal.SIGKILL, EXIT_CODE, EXIT_CODE]
    assert all(outcome.seconds < 15 for outcome in outcomes)


@pytest.mark.slow
def test_ranks_that_end_at_different_times_are_no_failure() -> None:
    outcomes = run_ranks(2, uneven, seconds=60)
    assert [outcome.value for outcome in outcomes] == [0, 1]


def uneven(rank: int) -> int:
    ranks = connect(MeshPlan(fsdp=2), CPU)
    for seconds in (0.0, 1.5):
        with watched(watch_of(ranks, 1.0, str)):
            time.sleep(seconds if rank else 0)
    return rank


@pytest.mark.slow
def test_an_error_that_every_rank_raises_stays_itself() -> None:
    outcomes = run_ranks(2, all_raise, seconds=60)
    assert [outcome.error for outcome in outcomes] == ["NonFiniteError: the loss is nan"] * 2


def all_raise(rank: int) -> None:
    ranks = connect(MeshPlan(fsdp=2), CPU)
    with watched(watch_of(ranks, 5.0, str)):
        time.sleep(1.5 * rank)
        raise NonFiniteError("the loss is nan")


@pytest.mark.slow
def test_a_collective_that_breaks_although_all_are_alive() -> None:
    outcomes = run_ranks(2, too_slow, seconds=60)
    assert outcomes[0].error.startswith("RankError: a collective failed, and every other rank is alive")
    assert "Timed out" in outcomes[0].error
    assert outcomes[1].error.startswith("RankError: rank 0 stopped: ")


def too_slow(rank: int) -> None:
    ranks = connect(MeshPlan(fsdp=2), CPU, collective_seconds=1.0)
    with watched(watch_of(ranks, 1.0, str)):
        for _ in range(50):
            if rank == 1:
                time.sleep(4)
            f.wait_tensor(f.all_reduce(torch.ones(1), "sum", "control"))


# One rank's watch of others that this test plays


def watch_with(others: dict[int, str], seconds: float = 1.0, **processes: Process) -> Watch:
    """A started watch of rank 0; the other ranks' words are given, their processes are this one's by default."""
    store = dist.HashStore()
    own = Process.own()
    for rank, text in others.items():
        process = processes.get(f"of_{rank}", own)
        store.set(f"t/process/{rank}", _json(process))
        store.set(f"t/alive/{rank}", text)
    store.add("t/process/read", len(others))
    watch = Watch(store, "t", 0, 1 + len(others), seconds, grace=60.0)
    watch.start()
    return watch


def _json(process: Process) -> str:
    return json.dumps(asdict(process))


def test_what_other_ranks_say() -> None:
    watch = watch_with({1: "3", 2: "failed:raised OSError: disk"})
    failure = watch.failure(5)
    assert failure is not None
    assert str(watch.error(failure)).startswith("rank 2 raised OSError: disk\n  where: seen by rank 0 of 3")
    watch.stop("followed", "{}")


def test_a_rank_that_followed_names_the_one_that_failed_first() -> None:
    watch = watch_with({1: 'followed:{"rank": 5, "how": "died"}', 2: "4"})
    failure = watch.failure(5)
    watch.stop("done")
    assert failure is not None
    assert (failure.rank, failure.how) == (5, "died")


def test_silence_is_a_failure_after_the_time_but_not_of_a_rank_that_is_done() -> None:
    began = time.monotonic()
    watch = watch_with({1: "done:", 2: "3"}, seconds=0.5)
    failure = watch.failure(5)
    watch.stop("done")
    assert failure is not None
    assert (failure.rank, failure.how) == (2, "has not been heard of for 0.5 s")
    assert 0.5 < time.monotonic() - began < 3


def test_a_process_that_is_gone_is_seen_at_once() -> None:
    own = Process.own()
    gone = replace(own, pid=os.getppid(), started="1")  # the number is in use, by another process
    watch = watch_with({1: "3", 2: "7"}, seconds=30.0, of_2=gone)
    failure = watch.failure(5)
    watch.stop("done")
    assert failure is not None
    assert (failure.rank, failure.how) == (2, f"died: process {gone.pid} is gone")
    assert not own.is_gone()
    assert replace(own, pid=2**22 + 5).is_gone()
    assert not replace(gone, machine="another").is_gone()


def test_without_groups_there_is_nothing_to_watch() -> None:
    assert watch_of(Ranks(), 1.0, str) is None
    with watched(None), pytest.raises(RankError):
        raise RankError("as it is")


def test_sigterm_raises_within_a_watch_and_ends_the_process_outside() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def end() -> None:
        with watched(watch_with_rank_1()):
            assert signal.getsignal(signal.SIGTERM) is not before
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    with pytest.raises(Terminated):
        end()
    assert signal.getsignal(signal.SIGTERM) is before


def watch_with_rank_1() -> Watch:
    store = dist.HashStore()
    store.set("t/process/1", _json(Process.own()))
    store.set("t/alive/1", "done:")
    store.add("t/process/read", 1)
    return Watch(store, "t", 0, 2, 30.0)


def test_the_way_back_is_asked_for_when_it_is_needed(tmp_path: Path) -> None:
    said: list[str] = ["first"]
    watch: Any = watch_with({1: "failed:x"})
    watch.way_back = lambda: said[-1]
    said.append("second")
    failure = watch.failure(5)
    watch.stop("done")
    assert watch.error(failure).hint == "second"
