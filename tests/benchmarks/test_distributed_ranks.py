"""The parts of `benchmarks/distributed` on two gloo ranks, each once, and that a wrong rank is seen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.distributed.equality import check, rows
from benchmarks.distributed.jobs import ROOT, TIMED_OUT, torchrun
from benchmarks.distributed.restart import STEPS, Runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def benchmark(out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """One part on the CPU: exit code and content of its file."""
    command = [sys.executable, "-m", "benchmarks.distributed", "--ranks", "2", "--device", "cpu", "--out", str(out)]
    code = subprocess.run([*command, *arguments], cwd=ROOT, check=False, capture_output=True).returncode
    (part,) = [name for name, before in zip(arguments[1:], arguments, strict=False) if before == "--parts"]
    return code, json.loads((out / f"{part}.json").read_text())


def test_ranks_equal_one_rank(tmp_path: Path) -> None:
    names = ["mixtral:float32:ep=2", "mixtral:bfloat16:ep=1"]
    assert not list(check(tmp_path / "rows", names, 2, "cpu", 300))
    found = rows(tmp_path / "rows")
    assert [row["case"] for row in found] == names
    assert all(row["equal"] and row["compared"] > 100 for row in found), found
    assert all(len(row["losses"]) == 3 and row["losses"][0] != row["losses"][-1] for row in found)


def test_cases_that_fail_or_hang_do_not_take_others_with_them(tmp_path: Path) -> None:
    names = ["mixtral:float32:ep=3", "mixtral:float32:ep=1"]
    outcomes = list(check(tmp_path / "rows", names, 2, "cpu", 300))
    assert [outcome.name for outcome in outcomes] == names[:1]
    first, *_, last = rows(tmp_path / "rows")
    assert "mesh.ep" in first["error"]
    assert last["case"] == names[1]
    assert last["equal"]
    hung = next(iter(check(tmp_path / "hung", names[1:], 2, "cpu", -55)))
    assert hung.code == TIMED_OUT


def test_a_dead_rank_ends_the_others_under_torchrun(tmp_path: Path) -> None:
    command = torchrun(2, "failure", "dies", "--device", "cpu", "--out", str(tmp_path / "time"))
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert (tmp_path / "time").is_file()
    assert "rank 1 died" in done.stderr or "SIGTERM" in done.stderr


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    found = Runs(tmp_path, "cpu", 2).killed()
    assert found["code"] == 0, found
    assert len(found["losses"]) == STEPS
    assert found["processes_left"] == 0
    assert any("rank 1 died" in line for line in found["said"])


def test_collectives_are_measured_and_fitted(tmp_path: Path) -> None:
    code, content = benchmark(tmp_path, "--parts", "bandwidth", "--largest", "16")
    assert code == 0, content
    measured = [row for row in content["rows"] if "bytes" in row]
    assert len(measured) == 5 * len({row["collective"] for row in measured})
    assert all(row["seconds"] > 0 for row in measured)
    fits = {row["collective"]: row["fit"] for row in content["rows"] if "fit" in row}
    assert all(line["bytes_per_second"] > 0 for line in fits.values())


def test_all_variants_of_a_step_do_the_same_work(tmp_path: Path) -> None:
    options = ["preset=k3-tiny", "length=48", "dtype=float32", "steps=4", "variants=moec,moec no experts,fsdp2"]
    code, content = benchmark(tmp_path, "--parts", "step", "--seconds", "250", "--step", *options)
    assert code == 0, content
    first, *others = content["rows"]
    for row in others:
        assert row["losses"] == pytest.approx(first["losses"], rel=1e-5), row["variant"]
    assert first["losses"][0] != first["losses"][-1]
