"""A training run for `test_kill.py`, run as a script: killed by SIGKILL at a chosen moment of its third save.

Usage: killed_run.py TEXT OUT POINT; POINT is a key of POINTS.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from rich.console import Console

from moec.runtime import durable, train

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.runtime.toy import toy_data, toy_step

# Where the process dies: function, the number of its call that belongs to the third save, before or after its work.
# Each save writes tensors once, writes two small files (manifest, LATEST), and publishes three times (manifest, folder,
# LATEST); with two checkpoints to keep, the third save is the first that removes one. rmtree is called at the end of
# each save, for what a failed one leaves, and twice by a removal: for an older rest, and then for the folder itself.
POINTS: dict[str, tuple[Any, str, int, str]] = {
    "before tensors": (dcp.FileSystemWriter, "write_data", 3, "before"),
    "after tensors": (dcp.FileSystemWriter, "write_data", 3, "after"),
    "before manifest": (durable, "publish", 7, "before"),
    "before folder": (durable, "publish", 8, "before"),
    "after folder": (durable, "publish", 8, "after"),
    "before LATEST": (durable, "publish", 9, "before"),
    "after LATEST": (durable, "publish", 9, "after"),
    "before removal": (durable, "remove_folder", 1, "before"),
    "inside removal": (shutil, "rmtree", 4, "before"),
}


def _die_at(owner: Any, name: str, call: int, moment: str) -> None:
    original, calls = getattr(owner, name), 0

    def dying(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < call:
            return original(*args, **options)
        if moment == "after":
            original(*args, **options)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    setattr(owner, name, dying)


def run(text: Path, out: Path) -> None:
    """The run: nine steps, a checkpoint every two; goes on when `out` exists."""
    step, data = toy_step(), toy_data(text)
    train(step, data, steps=9, out=out, resume=out.exists(), checkpoint_every=2, keep=2, console=Console(quiet=True))


if __name__ == "__main__":
    _die_at(*POINTS[sys.argv[3]])
    run(Path(sys.argv[1]), Path(sys.argv[2]))
