"""Runs of `moec train` that go on in another layout, or after the death of a rank, against a run without a stop.

1. Runs of one configuration to the same step: without a stop on N ranks, and in two parts. Steps read the same rows,
   with fewer ranks a rank takes more of them, so losses have to agree to rounding in the steps after the stop. In later
   ones a near tie between two experts may be decided another way: they may be further apart.
2. A rank is killed in the middle of a run. Noted are the seconds until the launcher has ended, what it said, and
   whether processes are left; then the run goes on.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.distributed.jobs import Job, Outcome, descendants, end, run, start

STEPS, HALF, EVERY = 24, 12, 4
LIMIT = 150.0
STOP_SECONDS = 60.0
NEAR, FAR = 1e-5, 1e-2
"""How far losses may be apart, relative, in the steps up to `EVERY` behind the stop, and in all of them."""


class Runs:
    """All runs of one world on one device, in one folder.

    preset: of the model. world: most ranks.
    """

    def __init__(self, folder: Path, device: str, world: int, preset: str = "k3-tiny") -> None:
        self._folder, self._device, self._world, self._preset = folder, device, world, preset
        self._text = _write_text(folder / "text")

    def rows(self) -> list[dict[str, Any]]:
        """One object for each way in which a run is stopped and goes on."""
        world, pool = self._world, ThreadPoolExecutor(4)
        unbroken = pool.submit(self.train, "unbroken", world, STEPS, ep=world)
        many = pool.submit(self.train, "many", world, HALF, ep=world)
        one = pool.submit(self.train, "one", 1, HALF)
        killed = pool.submit(self.killed)
        whole = unbroken.result()
        going_on: dict[str, tuple[Any, Callable[[], dict[str, Any]]]] = {
            f"{world} ranks ep {world} -> 1 rank": (many, lambda: self.resumed("many", "to one", 1)),
            f"{world} ranks ep {world} -> ep 1": (many, lambda: self.resumed("many", "other ep", world, ep=1)),
            f"{world} ranks ep {world} -> the same": (many, lambda: self.resumed("many", "the same", world, ep=world)),
            f"1 rank -> {world} ranks ep {world}": (one, lambda: self.resumed("one", "to many", world, ep=world)),
        }
        rows = [{"run": f"{world} ranks ep {world}, no stop", **self._row("unbroken", whole)}]
        for future, _ in going_on.values():
            future.result()
        results = {name: pool.submit(resume) for name, (_, resume) in going_on.items()}
        rows += [{"run": name, **result.result()} for name, result in results.items()]
        rows.append({"run": f"{world} ranks ep {world}, a rank is killed", **killed.result()})
        reference = losses(self._folder / "unbroken")
        for row in rows:
            row |= _against(row.pop("losses"), reference)
        return rows

    def resumed(self, before: str, after: str, ranks: int, **mesh: int) -> dict[str, Any]:
        """A copy of a run goes on."""
        shutil.copytree(self._folder / before, self._folder / after)
        return self._row(after, self.train(after, ranks, STEPS, "--resume", **mesh))

    def train(self, name: str, ranks: int, steps: int, *more: str, **mesh: int) -> Outcome:
        """One run of `moec train` to its end."""
        return run(Job(name, self._command(name, ranks, steps, *more, **mesh), LIMIT))

    def killed(self) -> dict[str, Any]:
        """Kill the last rank past the first checkpoint, then go on."""
        out, world = self._folder / "killed", self._world
        with tempfile.TemporaryFile("w+") as stream:
            launcher = start(self._command("killed", world, STEPS, ep=world), stream)
            try:
                _wait_for(out, 1, launcher)  # steps are short: to look for the rank takes as long as some of them
                family = descendants(launcher.pid)
                victims = [pid for pid in family if f"\0RANK={world - 1}\0" in _environment(pid)]
                _wait_for(out, HALF, launcher)
                if not victims or launcher.poll() is not None:
                    return {"error": "no rank to kill: the run ended before", "losses": losses(out)}
                os.kill(victims[0], signal.SIGKILL)
                began = time.monotonic()
                code = launcher.wait(STOP_SECONDS)
                seconds = time.monotonic() - began
            finally:
                end(launcher)
            stream.seek(0)
            said = stream.read().splitlines()
        left = [pid for pid in family if Path(f"/proc/{pid}").exists()]
        at = len(losses(out))
        row = self._row("killed", self.train("killed", world, STEPS, "--resume", ep=world))
        return row | {
            "killed_at_step": at,
            "stopped_after_s": round(seconds, 2),
            "exit_code": code,
            "processes_left": len(left),
            "said": [line for line in said if "rank" in line or "checkpoint" in line][-8:],
        }

    def _row(self, name: str, outcome: Outcome) -> dict[str, Any]:
        row = {"code": outcome.code, "seconds": outcome.seconds, "losses": losses(self._folder / name)}
        return row if outcome.code == 0 else row | {"output": outcome.output}

    def _command(self, name: str, ranks: int, steps: int, *more: str, **mesh: int) -> list[str]:
        fields = {"length": 64, "batch": self._world // ranks, "optimizer.schedule": "constant"}
        fields |= {f"mesh.{field}": value for field, value in mesh.items()}
        settings = [part for field, value in fields.items() for part in ("--set", f"{field}={value}")]
        launcher = ["--ranks", str(ranks)] if ranks > 1 else []
        return [
            *(sys.executable, "-m", "moec", "train", self._preset, "--data", str(self._text), "--steps", str(steps)),
            *("--out", str(self._folder / name), "--device", self._device, "--checkpoint-every", str(EVERY)),
            *(*settings, *launcher, *more),
        ]


def losses(out: Path) -> list[float]:
    """Of each step so far, in whole lines of the run's metrics; a step that was run again counts once."""
    file = out / "metrics.jsonl"
    text = file.read_text() if file.is_file() else ""
    records = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return list({record["step"]: record["loss"] for record in records}.values())


def _against(found: list[float], reference: list[float]) -> dict[str, Any]:
    apart = [abs(a - b) / abs(b) for a, b in zip(found, reference, strict=False)]
    complete = len(found) == len(reference) == STEPS
    return {
        "steps": len(found),
        "largest_loss_difference": max(apart, default=None),
        "last_losses": [found[-1:], reference[-1:]],
        "largest_near_the_stop": max(apart[: HALF + EVERY], default=None),
        "equal": complete and max(apart[: HALF + EVERY]) <= NEAR and max(apart) <= FAR,
    }


def _write_text(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    drawn = random.Random(0)
    for index in range(8):
        words = ["".join(drawn.choices("abcdefgh", k=drawn.randint(2, 7))) for _ in range(600)]
        (folder / f"{index}.txt").write_text(" ".join(words) + "\n")
    return folder


def _wait_for(out: Path, steps: int, launcher: subprocess.Popen[bytes]) -> None:
    """Until a run has done some steps, has ended or has had its time."""
    deadline = time.monotonic() + LIMIT
    while len(losses(out)) < steps and launcher.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)


def _environment(pid: int) -> str:
    try:
        return "\0" + Path(f"/proc/{pid}/environ").read_text()
    except OSError:
        return ""
