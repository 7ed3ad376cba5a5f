"""`moec train` on several real ranks: killed at any moment it stops soon, says whom and what is left, and goes on."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moec.runtime.metrics import read_metrics
from tests.moec.killed_rank import children, kill_rank, runs, wait_for
from tests.moec.small_models import VOCABULARY

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
STEPS = 24
MODEL = "tests.moec.small_models:make"
OPTIONS = [
    "--set",
    "length=24",
    "--set",
    "optimizer.lr=1e-2",
    "--set",
    "optimizer.schedule=constant",
    "--checkpoint-every",
    "3",
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    drawn = random.Random(0)
    for index in range(4):
        words = ["".join(drawn.choices("abcdefgh", k=drawn.randint(2, 7))) for _ in range(300)]
        (folder / f"{index}.txt").write_text(" ".join(words) + "\n")
    assert VOCABULARY > 258
    return folder


def command(text: Path, out: Path, *more: str, launcher: tuple[str, ...] = ("-m", "moec")) -> list[str]:
    return [sys.executable, *launcher, "train", MODEL, "--data", str(text), "--out", str(out), *OPTIONS, *more]


def train(text: Path, out: Path, *more: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(text, out, "--steps", str(STEPS), *more, **options),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def numbers(out: Path) -> list[tuple[int, float, float]]:
    return [(record["step"], record["loss"], record["gradient_norm"]) for record in read_metrics(out)]


@pytest.fixture(scope="module")
def unbroken(text: Path) -> Path:
    out = text.parent / "unbroken"
    run = train(text, out, "--ranks", "2")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("step 24/24") == 1
    assert [step for step, *_ in numbers(out)] == list(range(1, STEPS + 1))
    return out


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_and_the_run_goes_on(text: Path, unbroken: Path, tmp_path: Path, victim: int) -> None:
    out = tmp_path / "out"
    drawn = random.Random(victim)
    launcher = subprocess.Popen(
        command(text, out, "--steps", str(STEPS), "--ranks", "2"),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    # Past the first checkpoint, then at a random moment of a step or of a save.
    after = drawn.randint(4, 12)
    wait_for(lambda: len(read_metrics(out)) >= after)
    time.sleep(drawn.uniform(0.0, 0.1))
    killed, err = kill_rank(launcher, victim)
    assert f"error: rank {victim} died: process {killed} is gone" in err
    assert f"the last good checkpoint is {out}/checkpoints/step-000000" in err

    resumed = train(text, out, "--ranks", "2", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming from" in resumed.stdout
    assert numbers(out) == numbers(unbroken)


def test_a_run_goes_on_on_one_rank_but_not_on_three(text: Path, unbroken: Path, tmp_path: Path) -> None:
    """A step reads two rows on two ranks and, as one batch of two, on one; six rows are no longer the same run."""
    out = tmp_path / "out"
    first = subprocess.run(
        command(text, out, "--steps", "6", "--ranks", "2"),
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert first.returncode == 0, first.stderr
    resumed = train(text, out, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    for (step, loss, norm), (step_, loss_, norm_) in zip(numbers(out)[6:], numbers(unbroken)[6:], strict=True):
        assert step == step_
        assert loss == pytest.approx(loss_, rel=1e-5)
        assert norm == pytest.approx(norm_, rel=1e-4)
    refused = train(text, out, "--resume", "--ranks", "3")
    assert refused.returncode == 2
    assert "error: " in refused.stderr


def test_a_killed_launcher_leaves_no_rank_behind(text: Path, tmp_path: Path) -> None:
    """It holds the store of the ranks, which miss it."""
    out, err = tmp_path / "out", tmp_path / "stderr"
    with err.open("wb") as stream:
        launcher = subprocess.Popen(
            command(text, out, "--steps", "100000", "--ranks", "2"), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=stream
        )
    wait_for(lambda: len(read_metrics(out)) >= 4)
    ranks = children(launcher.pid)
    assert len(ranks) == 2
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not any(runs(rank) for rank in ranks), 45.0)
    said = err.read_text()
    assert "error: rank 0 or the launcher, whichever holds the store, does not answer" in said
    assert f"the last good checkpoint is {out}/checkpoints/step-" in said


def test_torchrun_starts_the_same_run(text: Path, unbroken: Path, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "moec")
    run = train(text, tmp_path / "out", launcher=launcher)
    assert run.returncode == 0, run.stderr
    assert numbers(tmp_path / "out") == numbers(unbroken)


def test_ranks_that_do_not_fit_the_mesh(text: Path, tmp_path: Path) -> None:
    run = train(text, tmp_path / "out", "--ranks", "2", "--set", "mesh.fsdp=4")
    assert run.returncode == 2
    assert "rank 0: error: the plan's mesh has 4 ranks, 2 were started" in run.stderr
    assert not (tmp_path / "out").exists()


def test_an_existing_run_is_refused_by_all(text: Path, unbroken: Path) -> None:
    run = train(text, unbroken, "--ranks", "2")
    assert run.returncode == 2
    assert f"{unbroken} already holds a run" in run.stderr
