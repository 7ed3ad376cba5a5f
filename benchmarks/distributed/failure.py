"""A rank that dies, raises or hangs in the middle of collectives: how soon, and how, the others end.

    python -m benchmarks.distributed.failure dies --ranks 2 --device cpu
    torchrun --nproc-per-node 2 -m benchmarks.distributed.failure raises

The last rank fails after some rounds of work. It leaves the time in FILE (`--out`) right before.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from moec.compiler.plan import MeshPlan
from moec.runtime.control import summed
from moec.runtime.groups import connect, watch_of
from moec.runtime.launch import join, launch
from moec.runtime.launched import launched
from moec.runtime.watch import watched

ROUNDS = 20
COLLECTIVE_SECONDS = 12.0
"""How long a collective may take: what ends the ranks when one is alive and does not come."""


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raises() -> None:
    raise KeyError("planted")


def hangs() -> None:
    time.sleep(10 * COLLECTIVE_SECONDS)


FAILURES: dict[str, Callable[[], None]] = {"dies": dies, "raises": raises, "hangs": hangs}


def main() -> None:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("how", choices=list(FAILURES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    started = launched()
    if started is None:
        command = [sys.executable, "-m", "benchmarks.distributed.failure", *sys.argv[1:]]
        raise SystemExit(launch(command, options.ranks))
    rank, world = started
    device = join(torch.device(options.device))
    ranks = connect(MeshPlan(fsdp=world), device, collective_seconds=COLLECTIVE_SECONDS)
    with watched(watch_of(ranks, 10.0, lambda: "start all ranks again")):
        for number in range(ROUNDS + 1):
            if rank == world - 1 and number == ROUNDS:
                options.out.write_text(str(time.time()))
                FAILURES[options.how]()
            work = torch.randn(512, 512, device=device)
            float(summed((work @ work).mean()))


if __name__ == "__main__":
    main()
