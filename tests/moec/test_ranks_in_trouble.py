"""Real ranks that are killed, stopped or run out of disk at bad moments: the others say so soon, and nothing is lost.

The run goes on from its last checkpoint with the very numbers of a run that nothing happened to.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import moec
from moec.compiler.plan import MeshPlan, OptimizerPlan, Plan
from moec.eager import EagerStep
from moec.runtime import export, latest_checkpoint, metrics, optimizer
from moec.runtime.checkpoint import read_manifest
from moec.runtime.groups import connect
from moec.runtime.loop import CHECKPOINTS
from moec.runtime.metrics import read_metrics
from moec.runtime.sharded_state import ShardedState
from moec.runtime.watch import EXIT_CODE
from moec.runtime.whole import whole_weights
from moec.simulated import split_rows
from tests.cases.test_c18_hot_expert import EXPERTS, model
from tests.moec.ranked_run import Run, train, write_text
from tests.runtime.outcomes import run_ranks, values
from tests.spine import VOCABULARY, assert_equal_gradients, distance

pytestmark = pytest.mark.slow

exchange = importlib.import_module("moec.compiler.dialect.exchange")  # the package has a function of that name
STEPS = 4
RUN = Run(steps=STEPS, checkpoint_every=1)
SECONDS = 25.0
"""How long the others may take from the start of the run until all have ended; a compilation is a part of it."""
SILENCE, GRACE = 2.0, 10.0


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    folder = tmp_path_factory.mktemp("unbroken")
    write_text(folder)
    values(run_ranks(2, train, folder, RUN))
    return numbers(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_text(tmp_path)
    return tmp_path


def numbers(folder: Path) -> list[tuple[float, float]]:
    return [(record["loss"], record["gradient_norm"]) for record in read_metrics(folder / "out")]


def goes_on(folder: Path, unbroken: list[tuple[float, float]], step: int) -> None:
    """The last checkpoint is that of `step` and whole, and the rest of the run is that of the unbroken one."""
    path = latest_checkpoint(folder / "out" / CHECKPOINTS)
    assert path is not None
    assert path.name == f"step-{step:08d}"
    assert set(read_manifest(path)["files"]) <= {file.name for file in path.iterdir()}
    values(run_ranks(2, train, folder, replace(RUN, resume=True)))
    assert numbers(folder) == unbroken
    assert (folder / "out" / "weights.safetensors").is_file()


def at(owner: Any, name: str, call: int, action: Callable[[], object]) -> None:
    """Do something right before the given call of a function, the first one being 1."""
    original, calls = getattr(owner, name), 0

    def watched(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            action()
        return original(*arguments, **options)

    setattr(owner, name, watched)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def inside_an_exchange(run: Run) -> Run:
    """Between two all-to-alls of the third step; a step has four of rows and two of counts."""
    at(exchange, "_all_to_all", 27, die)
    return run


def inside_an_update(run: Run) -> Run:
    at(optimizer, "torch_adamw", 5, die)
    return run


def inside_a_checkpoint(run: Run) -> Run:
    at(dcp.FileSystemWriter, "write_data", 3, die)
    return run


def inside_the_last_weights(run: Run) -> Run:
    at(export, "_write_own", 2, die)
    return run


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("moment", "step"),
    [(inside_an_exchange, 2), (inside_an_update, 2), (inside_a_checkpoint, 2), (inside_the_last_weights, STEPS)],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_rank_that_is_killed(
    folder: Path, unbroken: list[tuple[float, float]], moment: Callable[[Run], Run], step: int, victim: int
) -> None:
    outcomes = run_ranks(2, train, folder, replace(RUN, wrong=moment, where=(victim,)))
    assert outcomes[victim].code == -signal.SIGKILL
    other = outcomes[1 - victim]
    assert other.error.startswith(f"RankError: rank {victim} died: process"), other
    assert f"step-{step:08d}" in other.error, "it says what to go on from"
    assert other.seconds < SECONDS
    goes_on(folder, unbroken, step)


def stops_inside_an_exchange(run: Run) -> Run:
    at(exchange, "_all_to_all", 27, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    return run


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_stopped(folder: Path, unbroken: list[tuple[float, float]], victim: int) -> None:
    """gloo waits for it until its own timeout, so the other rank is ended with its process, and says why."""
    run = replace(RUN, wrong=stops_inside_an_exchange, where=(victim,), rank_seconds=SILENCE, keep_stderr=True)
    other = run_ranks(2, train, folder, run, hanging=(victim,))[1 - victim]
    said = other.error if other.code != EXIT_CODE else (folder / f"{1 - victim}.stderr").read_text()
    assert f"rank {victim} has not been heard of for {SILENCE:g} s" in said, other
    assert "step-00000002" in said
    assert other.seconds < SECONDS + SILENCE + GRACE
    goes_on(folder, unbroken, 2)


def has_no_room_for_a_checkpoint(run: Run) -> Run:
    """The kernel refuses to let files grow, as on a disk that is full."""
    at(dcp.FileSystemWriter, "write_data", 3, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)))
    return run


@pytest.mark.parametrize("victim", [0, 1])
def test_a_disk_that_is_full_on_one_rank(folder: Path, unbroken: list[tuple[float, float]], victim: int) -> None:
    run = replace(RUN, wrong=has_no_room_for_a_checkpoint, where=(victim,))
    outcomes = run_ranks(2, train, folder, run)
    for outcome in outcomes:
        assert outcome.error.startswith("CheckpointError: the checkpoint of step 3 could not be written"), outcome
        assert "File too large" in outcome.error
        assert outcome.seconds < SECONDS
    assert not list((folder / "out" / CHECKPOINTS).glob(".partial*"))
    goes_on(folder, unbroken, 2)


def has_no_room_for_metrics(run: Run) -> Run:
    at(metrics.JsonLines, "write", 3, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1)))
    return run


def test_a_disk_that_is_full_for_metrics(folder: Path, unbroken: list[tuple[float, float]]) -> None:
    """Only the first rank writes them; the others are told."""
    first, second = run_ranks(2, train, folder, replace(RUN, wrong=has_no_room_for_metrics, where=(0,)))
    assert first.error.startswith("CheckpointError: the metrics of step 3 could not be written"), first
    assert "File too large" in first.error
    assert second.error.startswith("RankError: rank 0 raised CheckpointError: the metrics of step 3"), second
    goes_on(folder, unbroken, 2)


# Three ranks, uneven in everything

PLAN = Plan(
    batch=2,
    length=8,
    accumulation=2,
    mesh=MeshPlan(fsdp=3, ep=3),
    optimizer=OptimizerPlan(lr=1e-2, eps=1e-2, schedule="constant"),
)


def uneven(seed: int) -> dict[str, Tensor]:
    """Tokens that two experts of four never see; a rank and, of another one, a microbatch have no label."""
    generator = torch.Generator().manual_seed(seed)
    shape = PLAN.accumulation, PLAN.batch * PLAN.mesh.world, PLAN.length
    group = torch.randint(VOCABULARY // EXPERTS, shape, generator=generator)
    expert = torch.tensor([[0, 3], [2, 3], [1, 1]][seed % 3])[torch.randint(2, shape, generator=generator)]
    ids = EXPERTS * group + expert
    labels = ids.masked_fill(torch.rand(shape, generator=generator) < 0.4, -100)
    labels[:, 2:4] = -100
    labels[1, 4:6] = -100
    return {"input_ids": ids, "labels": labels}


def train_unevenly(rank: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses of three steps, the whole gradients of the first, and the weights after the last."""
    connect(PLAN.mesh, torch.device("cpu"))
    step = moec.compile(model(), PLAN)
    state: Any = step.state
    rows = [split_rows(uneven(seed), PLAN)[rank] for seed in range(3)]
    gradients = whole_weights(state, step.gradients(rows[0]))
    losses = [float(step(given).loss) for given in rows]
    assert isinstance(state, ShardedState)
    return losses, gradients, whole_weights(state)


def test_three_ranks_that_are_uneven_in_everything() -> None:
    one = EagerStep(model(), replace(PLAN, batch=6, mesh=MeshPlan()))
    _, wanted = one.gradients(uneven(0))
    losses = [float(one(uneven(seed), 1e-2)) for seed in range(3)]
    for found, gradients, weights in values(run_ranks(3, train_unevenly)):
        assert found == pytest.approx(losses, rel=1e-6)
        assert_equal_gradients(gradients, wanted)
        assert not gradients["layers.0.up"][[1, 2]].any(), "experts without rows"
        for name, weight in one.parameters.items():
            assert distance(weights[name], weight) <= 1e-5, name
