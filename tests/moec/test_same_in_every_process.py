"""The same model and plan give the same artefact, byte for byte, in processes whose hashes and addresses differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What two processes wrote, side by side."""
    out = [tmp_path_factory.mktemp(f"seed{seed}") for seed in (1, 2)]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.moec.emit_models", str(folder)],
            env={**os.environ, "PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            stderr=subprocess.PIPE,
        )
        for seed, folder in enumerate(out, 1)
    ]
    for process in running:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors.decode()
    return out


def files(folder: Path) -> dict[str, Any]:
    """Contents by path; of the log, which tells how long things took, everything else."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): _log(p) if p.name == "log.jsonl" else p.read_bytes() for p in paths}


def _log(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in path.read_text().splitlines()]


@pytest.mark.parametrize("model", ["k3-tiny", "k3-dsa-tiny", "deepseek_v3"])
def test_artefacts_are_equal(folders: list[Path], model: str) -> None:
    one, two = (files(folder / model) for folder in folders)
    assert {"step.py", "plan.yaml", "log.jsonl", "state_map.json", "fingerprint.json"} <= one.keys()
    assert len([name for name in one if name.startswith("graphs")]) >= 10
    assert one.keys() == two.keys()
    assert [name for name in one if one[name] != two[name]] == []
