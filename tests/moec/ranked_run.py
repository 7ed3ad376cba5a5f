"""A small run on several real ranks, on one of which something is wrong or goes wrong."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from moec.compiler.plan import MeshPlan, OptimizerPlan, Plan
from moec.models.build import build
from moec.models.k3.config import K3Config
from moec.running import RunOptions, TextOptions
from moec.runtime.groups import connect
from moec.training import train_model
from tests.moec.small_models import SMALL_K3

MESH = MeshPlan(fsdp=2, ep=2)
PLAN = Plan(batch=1, length=16, packing=True, mesh=MESH, optimizer=OptimizerPlan(lr=1e-2, schedule="constant"))


@dataclass(frozen=True)
class Run:
    """What every rank is given; `wrong` changes it, and may change the process, of the ranks in `where`.

    keep_stderr: write what rank R prints to stderr to R.stderr.
    """

    plan: Plan = PLAN
    config: K3Config = SMALL_K3
    steps: int = 2
    resume: bool = False
    checkpoint_every: int = 0
    weights: str = ""
    seed: int = 0
    wrong: Callable[[Run], Run] | None = None
    where: tuple[int, ...] = (1,)
    build_seconds: float = 60.0
    rank_seconds: float = 30.0
    keep_stderr: bool = False


def train(rank: int, folder: Path, given: Run) -> list[float]:
    """What one rank does: the work of `moec train` on `folder`/text, with `folder`/out; returns the losses."""
    if given.keep_stderr:
        os.dup2(os.open(folder / f"{rank}.stderr", os.O_WRONLY | os.O_CREAT), 2)
    if given.wrong is not None and rank in given.where:
        given = given.wrong(given)
    ranks = connect(given.plan.mesh, torch.device("cpu"), build_seconds=given.build_seconds)
    torch.manual_seed(given.seed)
    _, summary = train_model(
        build(given.config).train(),
        given.plan,
        TextOptions([folder / "text"]),
        RunOptions(
            given.steps,
            folder / "out",
            given.resume,
            given.checkpoint_every,
            rank_seconds=given.rank_seconds,
        ),
        Console(quiet=True),
        ranks=ranks,
        weights=folder / given.weights if given.weights else None,
    )
    return list(summary.losses)


def write_text(folder: Path) -> None:
    """Words of random letters, the same every time."""
    drawn = random.Random(0)
    (folder / "text").mkdir(parents=True)
    words = ["".join(drawn.choices("abcdefgh", k=drawn.randint(2, 7))) for _ in range(400)]
    (folder / "text" / "a.txt").write_text(" ".join(words))


def contents(folder: Path) -> dict[str, bytes]:
    """Path -> bytes of everything in a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
