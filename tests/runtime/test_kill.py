"""kill -9 at every stage of a save leaves the last good checkpoint, and the run resumes to the same bits."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moec.runtime import latest_checkpoint, load_checkpoint
from moec.runtime.metrics import read_metrics
from tests.runtime.killed_run import POINTS, run
from tests.runtime.toy import toy_data, toy_step, write_corpus

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("killed_run.py")


def _end(text: Path, out: Path) -> tuple[dict[str, Tensor], dict[str, int], object, list[float]]:
    step, data = toy_step(seed=5), toy_data(text)
    latest = latest_checkpoint(out / "checkpoints")
    assert latest is not None
    load_checkpoint(latest, step.state, fingerprint=step.fingerprint, restore_data=data.load_state_dict)
    losses = [record["loss"] for record in read_metrics(out)]
    return step.state.tensors(), step.state.updates, data.state_dict(), losses


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("run") / "text")


@pytest.fixture(scope="module")
def undisturbed(text: Path) -> Path:
    out = text.parent / "undisturbed"
    run(text, out)
    return out


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_save_resumes_bit_equal(text: Path, undisturbed: Path, tmp_path: Path, point: str) -> None:
    out = tmp_path / "out"
    killed = subprocess.run([sys.executable, SCRIPT, text, out, point], timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    published = point in ("after LATEST", "before removal", "inside removal")
    latest = latest_checkpoint(out / "checkpoints")
    assert latest is not None
    assert latest.name == ("step-00000006" if published else "step-00000004")
    assert [record["step"] for record in read_metrics(out)] == list(range(1, 7))

    run(text, out)
    tensors, *rest = _end(text, out)
    expected, *expected_rest = _end(text, undisturbed)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert rest == expected_rest
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["LATEST", "step-00000008", "step-00000009"]
