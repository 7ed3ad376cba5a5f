"""The demo: its text, what it demands, what it leaves behind; and that a model with dead mixers does not pass."""

from __future__ import annotations

import io
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

import moec
from moec import demo
from moec.compiler.errors import DataError
from moec.demo import next_steps, report
from moec.demo_run import PLAN, TARGET, Outcome, held_out_loss, run_demo
from moec.demo_text import EXCERPT, DemoText, prepare_text
from moec.targets import build_target

from .small_models import SmallModel


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


def _seeded_model() -> SmallModel:
    torch.manual_seed(0)
    return SmallModel()


def _outcome(**changes: object) -> Outcome:
    text = DemoText(Path("text"), torch.zeros(1, 4, dtype=torch.int64), 3.15, 2.47)
    good = Outcome([5.0, 4.0, 3.0], [5.0, 4.001], 2.0, text)
    return replace(good, **changes)  # type: ignore[arg-type]


def test_the_text_is_the_same_every_time_and_leaves_out_what_is_no_library(library: Path, tmp_path: Path) -> None:
    one, two = (
        prepare_text(tmp_path / name, train_bytes=20_000, rows=8, length=128, library=library) for name in ("a", "b")
    )
    names = [sorted(path.name for path in folder.iterdir()) for folder in (one.folder, two.folder)]
    assert names[0] == names[1]
    contents = [path.read_bytes() for path in sorted(one.folder.iterdir())]
    assert contents == [path.read_bytes() for path in sorted(two.folder.iterdir())]
    assert 20_000 <= sum(map(len, contents)) < 20_000 + EXCERPT
    assert all(len(content) <= EXCERPT and content.endswith(b"\n") for content in contents)
    assert b"secret" not in b"".join(contents)
    assert torch.equal(one.held_out, two.held_out)
    assert one.held_out.shape == (8, 128)


def test_held_out_modules_are_not_trained_on(library: Path, tmp_path: Path) -> None:
    text = prepare_text(tmp_path / "a", train_bytes=60_000, rows=8, length=128, library=library)
    trained = b"".join(path.read_bytes() for path in text.folder.iterdir())
    for row in text.held_out:
        assert bytes(row.tolist())[:60] not in trained


def test_frequencies_predict_what_they_must(library: Path, tmp_path: Path) -> None:
    text = prepare_text(tmp_path / "a", train_bytes=20_000, rows=8, length=128, library=library)
    assert 0.5 < text.pairs_alone < text.bytes_alone < 3.5


def test_too_little_text_is_an_error(library: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="too little Python source"):
        prepare_text(tmp_path / "a", train_bytes=10**9, rows=8, length=128, library=library)


def test_a_good_outcome_has_no_failures() -> None:
    assert _outcome().failures() == []
    assert _outcome().largest_difference == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"held_out": 2.9}, "the target is 2.8"),
        ({"held_out": 2.46}, "is 2.460, not below 2.370: byte pairs alone give 2.470"),
        ({"held_out": float("nan")}, "the loss on held-out text is nan"),
        ({"eager": [5.001, 4.0]}, "the first compiled and eager losses differ"),
        ({"eager": [5.0, 4.2]}, "losses differ by 2.00e-01"),
    ],
)
def test_every_bound_can_be_missed(change: dict[str, object], text: str) -> None:
    assert any(text in failure for failure in _outcome(**change).failures())


def test_the_report_shows_both_curves_and_what_the_loss_means() -> None:
    console = Console(file=io.StringIO(), width=150, record=True)
    for part in report(_outcome()):
        console.print(part)
    text = console.export_text()
    assert "4.000000 │ 4.001000" in text
    assert "nats per byte on held-out text: 2.000 (targets: 2.8, and 2.370, which takes mixers" in text


def test_a_missed_bound_is_said_and_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "_run", lambda *_: _outcome(held_out=2.46))
    app = typer.Typer()
    app.command()(demo.main)
    done = CliRunner().invoke(app, ["--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "missed: the loss on held-out text is 2.460" in done.stdout
    monkeypatch.setattr(demo, "_run", lambda *_: _outcome())
    assert CliRunner().invoke(app, ["--out", str(tmp_path)]).exit_code == 0


def test_a_small_demo_runs_through(tmp_path: Path) -> None:
    model, twin, untrained = (_seeded_model() for _ in range(3))
    outcome = run_demo(model, twin, tmp_path, Console(file=io.StringIO()), steps=3, eager_steps=2)
    assert (len(outcome.compiled), len(outcome.eager)) == (3, 2)
    assert outcome.largest_difference < 1e-4
    # On the same text: losses of different batches need not fall in three steps of a warm-up.
    before = held_out_loss(moec.compile(untrained, PLAN), outcome.text.held_out)
    assert outcome.held_out < before - 0.01
    assert {"artifact", "checkpoints", "metrics.jsonl", "text", "weights.safetensors"} == {
        path.name for path in tmp_path.iterdir()
    }


def test_a_folder_with_other_files_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("keep")
    command = [sys.executable, "-m", "moec.demo", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "holds other files" in done.stderr
    assert (tmp_path / "precious.txt").read_text() == "keep"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("preset", ["k3-tiny", "k3-dsa-tiny"])
def test_the_demo_learns_and_everything_it_points_to_is_there(preset: str, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "moec.demo", "--preset", preset, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for where in next_steps(preset, out).values():
        assert where in done.stdout
        if Path(where.split()[0]).is_relative_to(out):
            assert Path(where).exists()
        else:
            again = [sys.executable, "-m", "moec", *shlex.split(where)[1:]]
            assert subprocess.run(again, capture_output=True, check=False).returncode == 0, where


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("preset", ["k3-tiny", "k3-dsa-tiny"])
def test_dead_mixers_miss_what_the_demo_demands(preset: str, tmp_path: Path) -> None:
    """Without mixers the next byte can only be told from the current one, and byte pairs alone are the floor."""
    dead, twin = build_target(preset), build_target(preset)
    for model in (dead, twin):
        for layer in model.layers:  # type: ignore[union-attr]
            torch.nn.init.zeros_(layer.attention.mixer.o_proj.weight).requires_grad_(False)
    outcome = run_demo(dead, twin, tmp_path, Console(file=io.StringIO()))
    print(f"{preset} with dead mixers: {outcome.held_out:.3f}, byte pairs alone: {outcome.text.pairs_alone:.3f}")
    # It trains as well as it can and equals eager: what it misses is what takes mixers, by a clear distance.
    assert outcome.held_out < TARGET
    assert outcome.held_out > outcome.mixer_target + 0.05
    assert [failure.partition(":")[0] for failure in outcome.failures()] == [
        f"the loss on held-out text is {outcome.held_out:.3f}, not below {outcome.mixer_target:.3f}"
    ]
