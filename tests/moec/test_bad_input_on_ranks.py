"""What a user can get wrong on several real ranks: a clear error on every rank, soon, and nothing is lost.

Each case starts real processes, of which one or all are given something wrong. Whatever it is, every rank ends within
SECONDS with an error that says what, none of them hangs, and what the run's folder held before is still there, whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from moec.compiler.plan import MeshPlan
from moec.models.build import build
from moec.runtime import StepState, differences, export_weights, groups
from moec.runtime.loop import CHECKPOINTS
from moec.runtime.tensor_file import Entry
from moec.settings import earlier_plan
from tests.moec.ranked_run import MESH, PLAN, Run, contents, train, write_text
from tests.moec.small_models import SMALL_K3
from tests.runtime.outcomes import Outcome, run_ranks, values

pytestmark = pytest.mark.slow

SECONDS = 60.0
"""How long a run may take from the start of all ranks to the end of the last one; most of it is one compilation."""
SECONDS_TO_REFUSE = 20.0
"""How long an error may take that ranks find before anything runs; less than the silence after which one is dead."""
HEAD = "lm_head.weight"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, weights in a file, and a run of two steps."""
    folder = tmp_path_factory.mktemp("trained")
    write_text(folder)
    torch.manual_seed(3)
    export_weights(StepState.from_module(build(SMALL_K3)), folder / "w.safetensors")
    values(run_ranks(MESH.world, train, folder, Run(), seconds=SECONDS))
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of it without the run."""
    shutil.copytree(trained / "text", tmp_path / "text")
    shutil.copy(trained / "w.safetensors", tmp_path)
    return tmp_path


def fails(folder: Path, given: Run, expected: str) -> list[Outcome]:
    """Every rank ends in time with an error that says `expected`, and what the folder held is as it was."""
    before = contents(folder)
    outcomes = run_ranks(given.plan.mesh.world, train, folder, given, seconds=SECONDS)
    for rank, outcome in enumerate(outcomes):
        assert expected in outcome.error, f"rank {rank}: {outcome}"
    after = contents(folder)
    assert {name: after.get(name) for name in before} == before
    assert not any(name.startswith(f"out/{CHECKPOINTS}") for name in after.keys() - before.keys())
    return outcomes


def test_nothing_wrong_is_no_error(folder: Path) -> None:
    outcomes = run_ranks(MESH.world, train, folder, Run(weights="w.safetensors"), seconds=SECONDS)
    assert len(values(outcomes)[1]) == 2


# What all ranks are given


def test_a_world_that_is_not_the_meshs(folder: Path) -> None:
    before = contents(folder)
    wrong = Run(replace(PLAN, mesh=MeshPlan(fsdp=4, ep=2)))
    for outcome in run_ranks(2, train, folder, wrong, seconds=SECONDS):
        assert outcome.error.startswith("AgreedError: the plan's mesh has 4 ranks, 2 were started")
    assert contents(folder) == before


def test_more_ranks_than_experts(folder: Path) -> None:
    config = replace(SMALL_K3, experts=2, top_k=1)
    plan = replace(PLAN, mesh=MeshPlan(fsdp=3, ep=3))
    fails(folder, Run(plan, config), "plan field mesh.ep is 3, and there are 2 experts")


def test_a_capacity_below_what_is_needed(trained: Path, tmp_path: Path) -> None:
    """The run goes on with another capacity as if nothing had been."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    more = Run(steps=4, resume=True)
    tight = replace(more, plan=replace(PLAN, mesh=replace(MESH, capacity=0.2)))
    before = contents(tmp_path / "out" / CHECKPOINTS)
    for outcome in run_ranks(2, train, tmp_path, tight, seconds=SECONDS):
        assert outcome.error.startswith("CapacityError: "), outcome
        assert "feed_forward" in outcome.error
    assert contents(tmp_path / "out" / CHECKPOINTS) == before
    after = values(run_ranks(2, train, tmp_path, more, seconds=SECONDS))
    shutil.copytree(trained / "text", tmp_path / "unbroken" / "text")
    unbroken = values(run_ranks(2, train, tmp_path / "unbroken", Run(steps=4), seconds=SECONDS))
    assert after[0] == after[1] == unbroken[0][2:]


def test_a_checkpoint_of_another_model(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    other = Run(config=replace(SMALL_K3, experts=6), steps=4, resume=True)
    fails(tmp_path, other, "layers.0.feed_forward")
    shutil.rmtree(tmp_path / "out" / "artifact")
    before = contents(tmp_path / "out" / CHECKPOINTS)
    for outcome in run_ranks(2, train, tmp_path, other, seconds=SECONDS):
        assert "checkpoint" in outcome.error, outcome
        assert "layers.0.feed_forward" in outcome.error
    assert contents(tmp_path / "out" / CHECKPOINTS) == before


# What one rank is given


def _prefetches(run: Run) -> Run:
    return replace(run, plan=replace(run.plan, mesh=replace(run.plan.mesh, prefetch=3)))


def _decays(run: Run) -> Run:
    return replace(run, plan=replace(run.plan, optimizer=replace(run.plan.optimizer, weight_decay=0.2)))


def _learns_faster(run: Run) -> Run:
    return replace(run, plan=replace(run.plan, optimizer=replace(run.plan.optimizer, lr=2e-2)))


def _reads_longer_rows(run: Run) -> Run:
    return replace(run, plan=replace(run.plan, length=24))


def _trains_longer(run: Run) -> Run:
    return replace(run, steps=3)


def _resumes(run: Run) -> Run:
    return replace(run, resume=True)


def _starts_from_another_seed(run: Run) -> Run:
    return replace(run, seed=1)


def _has_another_model(run: Run) -> Run:
    return replace(run, config=replace(run.config, shared_size=24))


def _has_a_newer_torch(run: Run) -> Run:
    newer = differences.versions()[0], "torch 9.9"
    groups.versions = lambda: newer
    return run


def _cannot_build_groups(run: Run) -> Run:
    original = dist.new_group

    def broken(*args: Any, **kwargs: Any) -> Any:
        if "exchange" in kwargs["group_desc"]:
            raise RuntimeError("no route to host")
        return original(*args, **kwargs)

    dist.new_group = broken
    return run


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (_prefetches, "'prefetch: "),
        (_decays, "optimizer.weight_decay: 0.2"),
        (_learns_faster, "optimizer.lr: 0.02"),
        (_reads_longer_rows, "length: 24"),
        (_trains_longer, "steps: 3"),
        (_resumes, "resume: True"),
        (_starts_from_another_seed, "initial weights differs"),
        (_has_another_model, "layers.0.feed_forward"),
        (_has_a_newer_torch, "'torch 9.9'"),
        (_cannot_build_groups, "exchange: no route to host"),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_one_rank_that_is_another(folder: Path, wrong: Callable[[Run], Run], expected: str, where: int) -> None:
    outcomes = fails(folder, Run(wrong=wrong, where=(where,), build_seconds=5.0), expected)
    assert all(outcome.seconds < SECONDS_TO_REFUSE for outcome in outcomes)


# Weights to start from


def _reads_elsewhere(run: Run) -> Run:
    return replace(run, weights="absent.safetensors")


def _may_not_read(run: Run) -> Run:
    def refused(entry: Entry, first: int, last: int) -> torch.Tensor:
        raise PermissionError(13, "Permission denied", str(entry.file))

    Entry.read = refused  # type: ignore[method-assign]
    return run


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize(
    ("wrong", "expected"),
    [(_reads_elsewhere, "no weights at"), (_may_not_read, "Permission denied")],
    ids=["missing", "unreadable"],
)
def test_weights_that_one_rank_cannot_read(
    folder: Path, wrong: Callable[[Run], Run], expected: str, where: int
) -> None:
    outcomes = fails(folder, Run(weights="w.safetensors", wrong=wrong, where=(where,)), expected)
    assert f"rank {where}" in outcomes[1 - where].error


def _has_its_own_disk(run: Run) -> Run:
    return replace(run, weights=f"disk/{run.weights}")


def _reads_another_training(folder: Path) -> None:
    """What some ranks find at `disk`: the same names and sizes, trained a little further."""
    (folder / "disk").mkdir()
    weights = load_file(folder / "w.safetensors")
    weights[HEAD] = weights[HEAD] + 1e-3
    save_file(weights, folder / "disk" / "w.safetensors", {"format": "pt"})


@pytest.mark.parametrize("where", [(1,), (0, 2)])
def test_a_file_of_the_same_name_that_differs_on_other_hosts(folder: Path, where: tuple[int, ...]) -> None:
    _reads_another_training(folder)
    plan = replace(PLAN, mesh=MeshPlan(fsdp=3, ep=1))
    given = Run(plan, weights="w.safetensors", wrong=_has_its_own_disk, where=where)
    outcomes = fails(folder, given, "the ranks would start from different weights: the file differs")
    for outcome in outcomes:
        assert ("on rank 1" in outcome.error, "on ranks 0, 2" in outcome.error) == (True, True)
        assert outcome.error.startswith("CheckpointError: ")
        assert outcome.seconds < SECONDS_TO_REFUSE
    assert not (folder / "out" / "artifact").exists()


def test_copies_of_a_file_on_other_hosts_are_the_same(folder: Path) -> None:
    (folder / "disk").mkdir()
    shutil.copy(folder / "w.safetensors", folder / "disk")
    given = Run(weights="w.safetensors", wrong=_has_its_own_disk)
    assert len(values(run_ranks(MESH.world, train, folder, given, seconds=SECONDS))[0]) == 2


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda weights: weights.update({HEAD: weights[HEAD].to(torch.int32)}), "is torch.int32"),
        (lambda weights: weights.update({HEAD: weights[HEAD][1:]}), "has shape [259, 32]"),
        (lambda weights: weights.pop(HEAD), f"the files lack {HEAD}"),
        (lambda weights: weights.update(extra=torch.zeros(1)), "unexpected tensor extra"),
    ],
    ids=["kind", "shape", "missing", "left over"],
)
def test_weights_of_another_model(folder: Path, change: Callable[[dict[str, Any]], Any], expected: str) -> None:
    weights = load_file(folder / "w.safetensors")
    change(weights)
    save_file(weights, folder / "w.safetensors")
    fails(folder, Run(weights="w.safetensors"), expected)


def test_a_file_that_was_cut(folder: Path) -> None:
    file = folder / "w.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    fails(folder, Run(weights="w.safetensors"), "is no safetensors file")


# On another number of ranks


def test_a_run_goes_on_on_other_meshes(folder: Path) -> None:
    """Twelve rows a step on 4, 2, 1 and 3 ranks, which share four experts by 4, 2, 1 and 3: the unbroken losses."""
    losses: list[float] = []
    for index, (fsdp, ep) in enumerate([(4, 4), (2, 2), (1, 1), (3, 3)]):
        plan = replace(PLAN, batch=12 // fsdp, mesh=MeshPlan(fsdp=fsdp, ep=ep))
        found = values(run_ranks(fsdp, train, folder, Run(plan, steps=2 * (index + 1), resume=index > 0)))
        assert all(other == found[0] for other in found)
        assert len(found[0]) == 2
        losses += found[0]
    shutil.rmtree(folder / "out")
    unbroken = values(run_ranks(2, train, folder, Run(replace(PLAN, batch=6), steps=8)))[0]
    assert losses == pytest.approx(unbroken, rel=1e-5)
    assert unbroken[-1] < unbroken[0] - 0.01


def test_a_resumed_run_keeps_its_rows_on_every_number_of_ranks(folder: Path) -> None:
    values(run_ranks(2, train, folder, Run(replace(PLAN, batch=3))))
    batches = {ranks: earlier_plan(folder / "out", ranks)["batch"] for ranks in (1, 2, 3, 6)}
    assert batches == {1: 6, 2: 3, 3: 2, 6: 1}
