"""Processes with a time limit, whose whole family ends with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TIMED_OUT = "timed out"
_LINES = 60


@dataclass(frozen=True)
class Job:
    """A command of this repository, and the seconds that it may take."""

    name: str
    command: Sequence[str]
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """How a job ended. code: exit code, or TIMED_OUT. output: its last lines."""

    name: str
    code: int | str
    seconds: float
    output: list[str]

    @property
    def row(self) -> dict[str, Any]:
        return asdict(self)


def torchrun(ranks: int, module: str, *arguments: str) -> list[str]:
    """The command that starts `ranks` ranks of a module of this package."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, "-m", f"benchmarks.distributed.{module}", *arguments]


def run(job: Job) -> Outcome:
    """Run one job to its end or its limit."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as stream:
        process = start(job.command, stream)
        try:
            code: int | str = process.wait(job.seconds)
        except subprocess.TimeoutExpired:
            end(process)
            code = TIMED_OUT
        seconds = time.monotonic() - began
        stream.seek(0)
        return Outcome(job.name, code, round(seconds, 1), stream.read().splitlines()[-_LINES:])


def run_all(jobs: Sequence[Job], workers: int) -> list[Outcome]:
    """Run jobs, `workers` of them at a time; outcomes in their order."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(run, jobs))


def start(command: Sequence[str], stream: Any) -> subprocess.Popen[bytes]:
    """A process in a session of its own, that writes both its outputs to a stream."""
    return subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started: launchers give ranks sessions of their own, so children are looked up."""
    family = [process.pid, *descendants(process.pid)]
    for pid in family:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that these have started."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
        except OSError:
            continue
    found = list(parents.get(pid, ()))
    return found + [below for child in found for below in descendants(child)]
