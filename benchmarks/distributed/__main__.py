"""The sharded step on real ranks of one host: correctness, failures, bandwidth, step time.

    python -m benchmarks.distributed --ranks 2 --device cuda --out OUT
    python -m benchmarks.distributed --ranks 2 --device cpu --out OUT --parts equality --models mixtral

Starts ranks by torchrun and by moec's own launcher, on 1 to 8 GPUs of this host through NCCL, or on CPUs through gloo.
Every part writes OUT/PART.json with machine, versions and date, and has a time limit of its own, so that one that fails
or hangs takes nothing with it. Exit code 1 when something is not equal or did not end as it should.

    equality    ranks against one rank (equality.py), several groups of ranks at a time
    restart     checkpoints into other layouts, and after the death of a rank (restart.py)
    failure     a rank that dies, raises or hangs (failure.py)
    bandwidth   collectives against size, alone on the machine (bandwidth.py); with --links HARDWARE the fitted lines
                become the file that the cost model reads
    step        step time and hidden communication beside FSDP2 (step.py)
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.distributed.equality import MODELS, cases, check, rows
from benchmarks.distributed.failure import FAILURES
from benchmarks.distributed.jobs import Job, run, run_all, torchrun
from benchmarks.distributed.links import write_links
from benchmarks.distributed.restart import Runs
from benchmarks.record import write_result

Rows = list[dict[str, Any]]
FAILURE_SECONDS = 90.0


def main() -> None:
    """Run parts, those that need no quiet machine at the same time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--jobs", type=int, default=4, help="groups of ranks that check equality at a time")
    parser.add_argument("--largest", type=int, default=30, help="log2 of bytes of the largest message")
    parser.add_argument("--step", nargs="*", default=[], help="arguments for step.py, without their dashes: length=512")
    parser.add_argument("--links", default="", help="name of a file in compiler/hardware to write the fit for")
    parser.add_argument("--seconds", type=float, default=120.0, help="for a case, and for the parts on their own")
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    together = [name for name in options.parts if name not in ALONE]
    with ThreadPoolExecutor(len(PARTS)) as pool:
        good = list(pool.map(lambda name: _part(name, options), together))
    good += [_part(name, options) for name in options.parts if name in ALONE]
    raise SystemExit(not all(good))


def _part(name: str, options: argparse.Namespace) -> bool:
    began = time.monotonic()
    try:
        found = PARTS[name](options)
    except Exception as error:
        found = [{"error": f"{type(error).__name__}: {error}", "good": False}]
    write_result(name, " ".join(["python -m benchmarks.distributed", *sys.argv[1:]]), found, options.out)
    good = [row.get("good", row.get("equal", True)) for row in found]
    print(f"{name}: {sum(good)} of {len(good)} good, {time.monotonic() - began:.0f} s", flush=True)
    return all(good)


def _equality(options: argparse.Namespace) -> Rows:
    names = cases(options.ranks, options.models, options.dtypes)
    shares = [names[index :: options.jobs] for index in range(options.jobs)]
    files = [options.out / f"equality.{index}.jsonl" for index in range(options.jobs)]

    def work(index: int) -> Rows:
        failed = check(files[index], shares[index], options.ranks, options.device, options.seconds)
        outputs = {outcome.name: outcome.output for outcome in failed}
        (options.out / f"equality.{index}.log").write_text(json.dumps(outputs, indent=1))
        return rows(files[index])

    with ThreadPoolExecutor(options.jobs) as pool:
        return [row for found in pool.map(work, range(options.jobs)) for row in found]


def _restart(options: argparse.Namespace) -> Rows:
    return Runs(options.out / "runs", options.device, options.ranks).rows()


def _failure(options: argparse.Namespace) -> Rows:
    """Every failure under moec's launcher and under torchrun; all ranks have to end, and not well."""
    common = ["--device", options.device]
    commands: dict[str, list[str]] = {}
    for how in FAILURES:
        own = [how, *common, "--out"]
        module = [sys.executable, "-m", "benchmarks.distributed.failure", "--ranks", str(options.ranks)]
        commands[f"{how}, moec"] = [*module, *own, str(options.out / f"{how}.moec")]
        commands[f"{how}, torchrun"] = [
            *torchrun(options.ranks, "failure"),
            *own,
            str(options.out / f"{how}.torchrun"),
        ]
    jobs = [Job(name, command, FAILURE_SECONDS) for name, command in commands.items()]

    def timed(job: Job) -> dict[str, Any]:
        outcome = run(job)
        marker, ended = Path(job.command[-1]), time.time()
        after = round(ended - float(marker.read_text()), 1) if marker.is_file() else None
        good = isinstance(outcome.code, int) and outcome.code != 0 and after is not None
        return {"failure": job.name, "good": good, "ended_after_s": after, **outcome.row}

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(timed, jobs))


def _bandwidth(options: argparse.Namespace) -> Rows:
    out = options.out / "bandwidth.raw.json"
    more = ["--device", options.device, "--out", str(out), "--largest", str(options.largest)]
    found = _measured(Job("bandwidth", torchrun(options.ranks, "bandwidth", *more), options.seconds), out)
    fits = [{"collective": name, "fit": line} for name, line in found["fits"].items()]
    if options.links:
        write_links(options.links, found["fits"], options.ranks)
    return [*found["rows"], *fits]


def _step(options: argparse.Namespace) -> Rows:
    out = options.out / "step.raw.json"
    more = [part for field in options.step for part in (f"--{field.split('=')[0]}", *field.split("=")[1].split(","))]
    command = torchrun(options.ranks, "step", "--device", options.device, "--out", str(out), *more)
    found: Rows = _measured(Job("step", command, 2 * options.seconds), out)
    return [row | {"good": "error" not in row} for row in found]


def _measured(job: Job, out: Path) -> Any:
    (outcome,) = run_all([job], 1)
    if outcome.code != 0:
        raise RuntimeError(f"{job.name}: {outcome.code} after {outcome.seconds} s: " + "\n".join(outcome.output))
    return json.loads(out.read_text())


PARTS: dict[str, Callable[[argparse.Namespace], Rows]] = {
    "equality": _equality,
    "restart": _restart,
    "failure": _failure,
    "bandwidth": _bandwidth,
    "step": _step,
}
ALONE: Sequence[str] = ("bandwidth", "step")
"""Parts that measure, one after the other with nothing beside them."""

if __name__ == "__main__":
    main()
