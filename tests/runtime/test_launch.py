"""Ranks on this machine: what they are given, what is shown of them, and that none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from moec.compiler.errors import RankError
from moec.runtime.launch import join, launch
from moec.runtime.launched import launched

RANK = Path(__file__).with_name("launched_rank.py")
RANKS = 3


def run(folder: Path, case: str, seconds: float = 1.0) -> int:
    return launch([sys.executable, str(RANK), str(folder), case], RANKS, seconds=seconds)


def nobody_left(folder: Path) -> bool:
    pids = [int(file.read_text()) for file in folder.glob("*.pid")]
    assert len(pids) == RANKS
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_all_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "ends") == 0
    assert capfd.readouterr() == ("out of rank 0 of 3\n", "err of rank 0\n")
    assert nobody_left(tmp_path)


@pytest.mark.parametrize(
    ("case", "code", "how"),
    [
        ("fails", 3, "rank 1 of 3 ended with exit code 3"),
        ("killed", 137, "rank 1 of 3 was killed by SIGKILL"),
        ("stubborn", 137, "rank 1 of 3 was killed by SIGKILL"),
    ],
)
def test_one_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str], case: str, code: int, how: str) -> None:
    began = time.monotonic()
    assert run(tmp_path, case) == code
    assert time.monotonic() - began < 10
    out, err = capfd.readouterr()
    assert out == "out of rank 0 of 3\n"
    assert err == f"err of rank 0\n{how}\n  rank 1: err of rank 1\n"
    assert nobody_left(tmp_path)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reaches_every_rank_once(tmp_path: Path, number: signal.Signals, code: int) -> None:
    command = f"import sys\nfrom moec.runtime.launch import launch\nsys.exit(launch(sys.argv[1:], {RANKS}, seconds=5))"
    launcher = subprocess.Popen(
        [sys.executable, "-c", command, sys.executable, RANK, tmp_path, "waits"], cwd=tmp_path, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("*.pid"))) < RANKS:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.2)
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=30)
    assert launcher.returncode == code
    assert err == b"err of rank 0\n"
    assert nobody_left(tmp_path)
    assert len(list(tmp_path.glob("*.interrupted"))) == (RANKS if number == signal.SIGINT else 0)


def test_no_rank_is_no_run() -> None:
    with pytest.raises(RankError, match="0 ranks cannot be started"):
        launch(["true"], 0)


def test_variables_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert launched() is None
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert launched() == (2, 4)
    with pytest.raises(RankError, match="this rank could not join the others") as caught:
        join(torch.device("cpu"), seconds=1.0)
    assert "where: RANK=2, WORLD_SIZE=4, MASTER_ADDR=None" in str(caught.value)
    assert "MASTER_ADDR" in caught.value.why
    assert not torch.distributed.is_initialized()


def test_threads_are_shared_among_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    script = f"import os; open(r'{tmp_path}/' + os.environ['LOCAL_RANK'], 'w').write(os.environ['OMP_NUM_THREADS'])"
    assert launch([sys.executable, "-c", script], 2) == 0
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text() == str(max(1, (os.cpu_count() or 1) // 2))
