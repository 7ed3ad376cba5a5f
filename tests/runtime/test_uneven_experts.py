"""Experts that do not divide, sharded further, on real ranks: stored as DTensor says, and loaded on any other mesh."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from moec.compiler.plan import MeshPlan
from moec.runtime import ShardedState, StepState, export_weights, latest_checkpoint, load_checkpoint, save_checkpoint
from moec.runtime.groups import connect
from tests.runtime.processes import run_ranks
from tests.runtime.sharded_toy import Model, model, state

pytestmark = pytest.mark.slow
EXPERTS = 5


def _state(rank: int, mesh: MeshPlan, whole: Model) -> StepState:
    if mesh.world == 1:
        return StepState.from_module(whole)
    connect(mesh, torch.device("cpu"))
    return state(whole, mesh, rank)


def _save(rank: int, folder: Path, mesh: MeshPlan) -> torch.Tensor:
    whole = model(3, experts=EXPERTS)
    part = _state(rank, mesh, whole)
    save_checkpoint(folder, part, fingerprint={})
    export_weights(part, folder / "w.safetensors")
    assert isinstance(part, ShardedState)
    part.place_in(whole)
    return whole.layers[0].experts.full_tensor().detach()  # type: ignore[union-attr, operator]


def _load(rank: int, path: Path, mesh: MeshPlan) -> dict[str, tuple[range, torch.Tensor]]:
    part = _state(rank, mesh, model(9, experts=EXPERTS))
    load_checkpoint(path, part, fingerprint={})
    whole = range(EXPERTS)
    held = {name: part.shards[name].rows if isinstance(part, ShardedState) else whole for name in _experts(part)}
    return {name: (rows, part.weights[name].detach().clone()) for name, rows in held.items()}


def _experts(part: StepState) -> list[str]:
    return [name for name in part.weights if name.endswith("experts")]


def test_a_checkpoint_goes_to_other_meshes(tmp_path: Path) -> None:
    whole: nn.Module = model(3, experts=EXPERTS)
    for full in run_ranks(4, _save, tmp_path, MeshPlan(fsdp=4, ep=2)):
        assert torch.equal(full, whole.get_parameter("layers.0.experts"))
    exported = load_file(tmp_path / "w.safetensors")
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in exported.items())
    path = latest_checkpoint(tmp_path)
    for fsdp, ep in ((1, 1), (2, 2), (3, 3), (4, 2)):
        mesh = MeshPlan(fsdp=fsdp, ep=ep)
        parts = [_load(0, path, mesh)] if fsdp == 1 else run_ranks(fsdp, _load, path, mesh)  # type: ignore[arg-type]
        seen = []
        for part in parts:
            for name, (rows, value) in part.items():
                assert torch.equal(value, whole.get_parameter(name).detach()[rows.start : rows.stop])
                seen += [(name, row) for row in rows]
        assert len(seen) == len(set(seen)) == 2 * EXPERTS
