"""Weights leave a run as safetensors: every rank writes its rows, and the files are those that one rank would write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from moec.compiler.errors import CheckpointError
from moec.compiler.pieces import Piece
from moec.compiler.plan import MeshPlan
from moec.runtime import StepState, export, export_weights
from moec.runtime.export import INDEX, export_pieces
from moec.runtime.simulate import simulate
from tests.runtime.sharded_toy import Model, model, state

MESHES = [MeshPlan(), MeshPlan(fsdp=2), MeshPlan(fsdp=3, ep=3), MeshPlan(fsdp=4, ep=2), MeshPlan(fsdp=4, ep=4)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_write_the_file_of_one(tmp_path: Path, mesh: MeshPlan, dtype: torch.dtype) -> None:
    whole = model(dtype=dtype)
    expected = {**whole.state_dict(), "counts": whole.counts}
    alone = export_weights(StepState.from_module(whole), tmp_path / "one" / "w.safetensors", derived=True)
    _on(mesh, whole, lambda part: export_weights(part, tmp_path / "w.safetensors", derived=True))
    assert (tmp_path / "w.safetensors").read_bytes() == alone.read_bytes()
    found = load_file(alone)
    assert found.keys() == expected.keys() - {"head.weight"}
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert all(value.data_ptr() % value.element_size() == 0 for value in found.values())
    with safe_open(alone, "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    assert not list(tmp_path.glob(".partial*"))


def test_buffers_that_the_model_leaves_out_stay_out(tmp_path: Path) -> None:
    assert "counts" not in load_file(export_weights(StepState.from_module(model()), tmp_path / "w.safetensors"))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_published_names_in_files_of_bounded_size(tmp_path: Path, mesh: MeshPlan) -> None:
    """One matrix per expert, a vector as a matrix, a padded vector; each in the file that the index names."""
    whole = model()
    pieces = published(whole)
    _on(mesh, whole, lambda part: export_pieces(part, tmp_path, pieces, largest=40_000))
    index = json.loads((tmp_path / INDEX).read_text())
    files = {name: load_file(tmp_path / name) for name in set(index["weight_map"].values())}
    assert len(files) > 2
    assert all(len(file) == 1 or sum(v.nbytes for v in file.values()) <= 40_000 for file in files.values())
    found = {name: files[file][name] for name, file in index["weight_map"].items()}
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    assert found.keys() == {piece.name for piece in pieces}
    for expert in range(6):
        assert torch.equal(found[f"layers.1.e{expert}"], whole.layers[1].experts[expert])
    bias: Any = whole.layers[0].proj.bias
    assert torch.equal(found["layers.0.proj.bias"], bias.view(1, -1))
    padded = found["layers.0.frozen"]
    assert torch.equal(padded, torch.cat([whole.layers[0].frozen, torch.zeros(5)]))
    assert torch.equal(found["embed.weight"], whole.embed.weight)


def test_a_weight_without_a_name_is_an_error(tmp_path: Path) -> None:
    whole = model()
    pieces = [piece for piece in published(whole) if piece.path != "unused"]
    with pytest.raises(CheckpointError, match="unused has no published name"):
        export_pieces(StepState.from_module(whole), tmp_path, pieces)


def test_what_one_rank_cannot_write_leaves_the_file_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.safetensors"
    export_weights(StepState.from_module(model(seed=1)), path)
    before, write, calls = path.read_bytes(), export.write, [0]

    def refuse(*args: Any) -> None:
        calls[0] += 1
        if calls[0] == 7:
            raise OSError(28, "No space left on device")
        write(*args)

    monkeypatch.setattr(export, "write", refuse)
    with pytest.raises(CheckpointError, match=r"could not be written to .*\n  why: .*No space left on device"):
        _on(MeshPlan(fsdp=2), model(), lambda part: export_weights(part, path))
    assert path.read_bytes() == before


def published(whole: Model) -> list[Piece]:
    """Names and cuts such as published checkpoints have."""
    pieces = []
    for path, value in whole.state_dict().items():
        shape = tuple(value.shape)
        if path.endswith("experts"):
            size = value[0].numel()
            pieces += [Piece(f"{path[:-7]}e{e}", shape[1:], path, e * size) for e in range(shape[0])]
        elif path.endswith("frozen"):
            pieces.append(Piece(path, (8,), path))
        elif path.endswith("proj.bias"):
            pieces.append(Piece(path, (1, *shape), path))
        elif path != "head.weight":
            pieces.append(Piece(path, shape, path))
    return pieces


def _on(mesh: MeshPlan, whole: Model, action: Any) -> None:
    if mesh.world == 1:
        action(StepState.from_module(whole))
    else:
        simulate(mesh, lambda rank: action(state(whole, mesh, rank)))
