"""The demo: its text, what it demands, what it leaves behind; and that a model with dead mixers does not pass."""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

import moec
from moec import demo
from moec.compiler.errors import DataError, RankError
from moec.demo import next_steps, report
from moec.demo_run import PLAN, TARGET, Outcome, held_out_loss, run_demo
from moec.demo_text import EXCERPT, DemoText, read_text
from moec.models.build import build
from moec.models.k3.model import K3Model
from moec.rank_checks import joined_plan
from moec.runtime.groups import connect
from moec.runtime.metrics import METRICS
from moec.runtime.ranks import Ranks

from ..runtime.processes import run_ranks
from .killed_rank import kill_rank, wait_for
from .small_models import SMALL_K3

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a standard library."""
    root = tmp_path_factory.mktemp("library")
    for index in range(120):
        lines = [f"def function_{index}_{line}(value):\n    return value + {line}\n" for line in range(60)]
        path = root / ("package" if index % 2 else ".") / f"module_{index}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(lines))
    for left_out in ("site-packages/x.py", "test/test_x.py", "package/tests/y.py"):
        (root / left_out).parent.mkdir(parents=True, exist_ok=True)
        (root / left_out).write_text("secret = 1\n" * 500)
    (root / "latin.py").write_bytes("# \xe4\n".encode("latin-1") * 400)
    return root


def _seeded_model() -> K3Model:
    torch.manual_seed(0)
    return build(SMALL_K3)


def _outcome(**changes: object) -> Outcome:
    text = DemoText({}, torch.zeros(1, 4, dtype=torch.int64), 3.15, 2.47)
    good = Outcome([5.0, 4.0, 3.0], [5.0, 4.001], 2.0, text)
    return replace(good, **changes)  # type: ignore[arg-type]


def test_the_text_is_the_same_every_time_and_leaves_out_what_is_no_library(library: Path, tmp_path: Path) -> None:
    one, two = (read_text(train_bytes=20_000, rows=8, length=128, library=library) for _ in range(2))
    assert list(one.files.items()) == list(two.files.items())
    contents = list(one.files.values())
    assert 20_000 <= sum(map(len, contents)) < 20_000 + EXCERPT
    assert all(len(content) <= EXCERPT and content.endswith(b"\n") for content in contents)
    assert b"secret" not in b"".join(contents)
    assert torch.equal(one.held_out, two.held_out)
    assert one.held_out.shape == (8, 128)
    one.write(tmp_path / "text")
    assert {path.name: path.read_bytes() for path in (tmp_path / "text").iterdir()} == one.files


def test_held_out_modules_are_not_trained_on(library: Path) -> None:
    text = read_text(train_bytes=60_000, rows=8, length=128, library=library)
    trained = b"".join(text.files.values())
    for row in text.held_out:
        assert bytes(row.tolist())[:60] not in trained


def test_frequencies_predict_what_they_must(library: Path) -> None:
    text = read_text(train_bytes=20_000, rows=8, length=128, library=library)
    assert 0.5 < text.pairs_alone < text.bytes_alone < 3.5


def test_too_little_text_is_an_error(library: Path) -> None:
    with pytest.raises(DataError, match="too little Python source"):
        read_text(train_bytes=10**9, rows=8, length=128, library=library)


def test_a_good_outcome_has_no_failures() -> None:
    assert [check.passed for check in _outcome().checks()] == [True] * 4
    assert _outcome().largest_difference == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"held_out": 2.9}, "takes 2.900 nats per byte, target 2.8"),
        ({"held_out": 2.46}, "takes 2.460 nats per byte, bound of mixers that work 2.370; byte pairs alone give 2.470"),
        ({"held_out": float("nan")}, "takes nan nats per byte, target"),
        ({"eager": [5.001, 4.0]}, "the first losses, compiled and eager, differ by 1.0e-03 nats"),
        ({"eager": [5.0, 4.2]}, "the two curves differ by at most 2.0e-01 nats"),
    ],
)
def test_every_bound_can_be_missed(change: dict[str, object], text: str) -> None:
    assert any(text in check.text for check in _outcome(**change).checks() if not check.passed)


def test_the_report_shows_both_curves_and_what_the_loss_means() -> None:
    console = Console(file=io.StringIO(), width=150, record=True)
    for part in report(_outcome()):
        console.print(part)
    text = console.export_text()
    assert "4.000000 │ 4.001000" in text
    assert text.count("passed: ") == 4
    assert "passed: held-out text takes 2.000 nats per byte, target 2.8; byte frequencies alone give 3.150" in text


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process takes itself for the first rank of a demo."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("moec.runtime.launch.join", lambda device: device)
    monkeypatch.setattr("moec.runtime.groups.connect", lambda mesh, _: Ranks(mesh, 0))
    return monkeypatch


def _main(out: Path) -> Result:
    app = typer.Typer()
    app.command()(demo.main)
    return CliRunner().invoke(app, ["--out", str(out)])


def test_a_missed_bound_is_said_and_is_the_exit_code(as_rank: pytest.MonkeyPatch, tmp_path: Path) -> None:
    as_rank.setattr(demo, "_run", lambda *_: _outcome(held_out=2.46))
    done = _main(tmp_path)
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-1].startswith("missed: held-out text takes 2.460 nats per byte, bound of mixers")
    as_rank.setattr(demo, "_run", lambda *_: _outcome())
    assert _main(tmp_path).exit_code == 0


def test_an_error_of_a_rank_is_said_with_its_number(as_rank: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object) -> Outcome:
        raise RankError("rank 1 died", hint="start the demo again")

    as_rank.setattr(demo, "_run", fail)
    done = _main(tmp_path)
    assert done.exit_code == 2
    assert done.stderr.startswith("rank 0: error: rank 1 died\n")
    assert "start the demo again" in done.stderr


def _small_demo(rank: int, out: Path) -> tuple[Outcome, float, list[str]]:
    ranks = connect(PLAN.mesh, torch.device("cpu"))
    printed = io.StringIO()
    console = Console(file=printed, quiet=not ranks.is_first)
    twin = _seeded_model() if ranks.is_first else None
    outcome = run_demo(_seeded_model(), twin, out, console, ranks, steps=3, eager_steps=2)
    # On the same text: losses of different batches need not fall in three steps of a warm-up.
    untrained = moec.compile(_seeded_model(), joined_plan(PLAN)) if ranks.is_first else None
    before = held_out_loss(untrained, outcome.text.held_out) if untrained is not None else 0.0
    return outcome, before, printed.getvalue().splitlines()


@pytest.mark.slow
def test_a_small_demo_runs_through(tmp_path: Path) -> None:
    (first, before, printed), (second, _, nothing) = run_ranks(2, _small_demo, tmp_path)
    assert (len(first.compiled), len(first.eager)) == (3, 2)
    assert (second.compiled, second.held_out) == (first.compiled, first.held_out)
    assert first.largest_difference < 1e-4
    assert first.held_out < before - 0.01
    assert printed
    assert nothing == []
    assert {"artifact", "checkpoints", "metrics.jsonl", "text", "weights.safetensors"} == {
        path.name for path in tmp_path.iterdir()
    }


def test_a_folder_with_other_files_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("keep")
    done = _demo("k3-tiny", tmp_path)
    assert done.returncode == 2
    assert f"error: {tmp_path} holds other files" in done.stderr
    assert (tmp_path / "precious.txt").read_text() == "keep"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("preset", ["k3-tiny", "k3-dsa-tiny"])
def test_the_demo_learns_and_everything_it_points_to_is_there(preset: str, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    done = _demo(preset, out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{preset} on 2 ranks, ")
    for where in next_steps(preset, out).values():
        assert where in done.stdout
        if Path(where.split()[0]).is_relative_to(out):
            assert Path(where).exists()
        else:
            again = [sys.executable, "-m", "moec", *shlex.split(where)[1:]]
            assert subprocess.run(again, capture_output=True, check=False).returncode == 0, where


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_ends_the_demo_with_an_error(victim: int, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "moec.demo", "--preset", "tests.moec.test_demo:_seeded_model", "--out", str(out)]
    launcher = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: (out / METRICS).is_file() and (out / METRICS).read_text().count("\n") >= 3)
    killed, err = kill_rank(launcher, victim)
    assert f"rank {1 - victim}: error: rank {victim} died: process {killed} is gone" in err


def make_dead_kda_and_mla() -> torch.nn.Module:
    return _dead("k3-tiny")


def make_dead_kda_and_dsa() -> torch.nn.Module:
    return _dead("k3-dsa-tiny")


def _dead(preset: str) -> torch.nn.Module:
    """A model whose token mixers give zeros, for good."""
    model = build(preset)
    for layer in model.layers:
        torch.nn.init.zeros_(layer.attention.mixer.o_proj.weight).requires_grad_(False)
    return model


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("make", [make_dead_kda_and_mla, make_dead_kda_and_dsa])
def test_dead_mixers_miss_what_the_demo_demands(make: Callable[[], torch.nn.Module], tmp_path: Path) -> None:
    """Without mixers the next byte can only be told from the current one, and byte pairs alone are the floor."""
    done = _demo(f"tests.moec.test_demo:{make.__name__}", tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    missed = set(re.findall("missed: .*", done.stdout))
    # It trains as well as it can and equals eager: what it misses is what takes mixers, by a clear distance.
    assert len(missed) == 1, done.stdout
    found = re.search(r"takes ([\d.]+) nats per byte, bound of mixers that work ([\d.]+)", missed.pop())
    assert found, done.stdout
    loss, bound = map(float, found.groups())
    assert bound + 0.05 < loss < TARGET


def _demo(target: str, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moec.demo", "--preset", target, "--out", str(out)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
