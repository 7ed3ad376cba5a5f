"""Many ranks on paper: one process compiles for 128, whichever rank it takes itself for, and says what each holds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from moec.compiler.memory_table import size_text
from moec.compiler.plan import MeshPlan, Plan
from moec.emit import emit
from moec.models.build import build
from moec.rank_files import read_buckets, read_collectives
from moec.rank_report import rank_bytes
from moec.targets import fake_target
from tests.moec.small_models import SMALL_K3

ROOT = Path(__file__).parents[2]
MESH = MeshPlan(fsdp=128, ep=64)
SHAPE = ["--set", "mesh.fsdp=128", "--set", "mesh.ep=64", "--set", "length=16"]


def make_wide() -> nn.Module:
    return build(replace(SMALL_K3, experts=128, layers=4, full_attention_layers=(2, 4)))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, str]]:
    """Folder and output of `moec compile` in two processes that take themselves for the first and the last rank."""
    found = []
    for rank in (0, 127):
        out = tmp_path_factory.mktemp(f"rank{rank}")
        command = [sys.executable, "-m", "moec", "compile", "tests.moec.test_on_paper:make_wide", "--out", str(out)]
        here = {"RANK": str(rank), "WORLD_SIZE": "128", "PYTHONHASHSEED": str(rank), "OMP_NUM_THREADS": "1"}
        here["COLUMNS"] = "120"  # pytest's workers set it to less than the tables take
        done = subprocess.run(
            [*command, *SHAPE], cwd=ROOT, env={**os.environ, **here}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        found.append((out, done.stdout))
    return found


@pytest.mark.slow
def test_every_rank_has_the_same_text(compiled: list[tuple[Path, str]]) -> None:
    (one, _), (two, _) = compiled
    for name in ("step.py", "plan.yaml", "state_map.json", "buckets.json", "collectives.json", "fingerprint.json"):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


@pytest.mark.slow
def test_the_tables_say_what_a_rank_holds_and_sends(compiled: list[tuple[Path, str]]) -> None:
    folder, output = compiled[1]
    plan = Plan.from_yaml(folder / "plan.yaml")
    buckets, collectives = read_buckets(folder), read_collectives(folder)
    table = rank_bytes(buckets, collectives, plan)
    for name, value in vars(table).items():
        assert re.search(rf"{name} *│ *{size_text(value)}│", output), name
    held = MESH.world * table.weights
    whole = sum(weight.nbytes for weight in make_wide().parameters())
    assert whole <= held <= 1.5 * whole, "weights of 32 rows on 128 ranks are padded"
    for kind, role in {(c.kind, c.role) for c in collectives}:
        ours = [c for c in collectives if (c.kind, c.role) == (kind, role)]
        sent = size_text(sum(c.wire_bytes(MESH) for c in ours))
        assert re.search(rf"{kind} *│ {role} *│ *{len(ours)} │ *[^│]*│ *{sent} │", output), (kind, role)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_full_model_on_128_ranks(tmp_path: Path) -> None:
    """Its 2.78 T parameters lie on 128 ranks, with float32 gradients and moments; nothing is allocated for it."""
    plan = Plan(batch=1, length=512, mesh=MESH)
    model = fake_target("k3")
    emit(model, plan, tmp_path)
    buckets, collectives = read_buckets(tmp_path), read_collectives(tmp_path)
    table, parameters = rank_bytes(buckets, collectives, plan), sum(p.numel() for p in model.parameters())
    assert 2.7e12 < parameters < 2.8e12
    assert table.weights == pytest.approx(4 * parameters / 128, rel=1e-3)
    assert table.gradients == pytest.approx(table.weights, rel=1e-3)
    assert table.moments == 2 * table.gradients
    # Forward and backward of 92 layers with experts, and the counts of each once.
    assert sum(c.kind == "all_to_all" for c in collectives) == 92 * 5
    assert sum(c.role == "expert_scatter" for c in collectives) == 92
