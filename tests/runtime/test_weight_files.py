"""Weights come from files by rows, whatever the names and cuts; what does not fit is refused by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from moec.compiler.errors import ArtifactError, CheckpointError, UnsupportedModelError
from moec.compiler.pieces import Piece
from moec.compiler.plan import MeshPlan
from moec.runtime import ShardedState, StepState, export_weights, tensor_file
from moec.runtime.export import INDEX, export_pieces
from moec.runtime.weight_files import FileWeights, file_entries
from moec.runtime.weight_source import Part
from tests.runtime.sharded_toy import Model, buckets, joined, model
from tests.runtime.test_export import published

MESHES = [MeshPlan(fsdp=2), MeshPlan(fsdp=3, ep=3), MeshPlan(fsdp=4, ep=2), MeshPlan(fsdp=4, ep=4)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("cut", ["own names in one file", "published names in several"])
def test_a_model_without_data_starts_from_files(tmp_path: Path, mesh: MeshPlan, cut: str) -> None:
    whole = model(seed=4)
    if cut.startswith("own"):
        path = export_weights(StepState.from_module(whole), tmp_path / "w.safetensors")
        pieces = [Piece(name, tuple(v.shape), name) for name, v in whole.state_dict().items()]
    else:
        path, pieces = tmp_path, published(whole)
        export_pieces(StepState.from_module(whole), tmp_path, pieces, largest=40_000)
    empty = without_data()
    parts = []
    for rank in range(mesh.world):
        shapes = {n: tuple(v.shape) for n, v in whole.state_dict().items() if n != "head.weight"}
        source = FileWeights(file_entries(path), pieces, shapes)
        parts.append(
            ShardedState.from_module(
                empty, buckets=buckets(empty, mesh), mesh=mesh, rank=rank, source=source, device="cpu"
            )
        )
    found = joined(parts, "weights")
    for name, weight in whole.named_parameters():
        if name != "unused":
            assert torch.equal(found[name], weight), name
    for part in parts:
        assert torch.equal(part.weights["unused"], whole.unused)
        assert torch.equal(part.buffers["layers.1.bias"], whole.layers[1].bias)  # type: ignore[arg-type]
        assert torch.equal(part.buffers["counts"], empty.counts)


def test_only_the_rows_of_a_rank_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, mesh = model(), MeshPlan(fsdp=4, ep=2)
    path = export_weights(StepState.from_module(whole), tmp_path / "w.safetensors")
    read, largest, total = tensor_file.Entry.read, [0], [0]

    def counted(self: tensor_file.Entry, first: int, last: int) -> torch.Tensor:
        largest[0] = max(largest[0], last - first)
        total[0] += last - first
        return read(self, first, last)

    monkeypatch.setattr(tensor_file.Entry, "read", counted)
    shapes = {n: tuple(v.shape) for n, v in whole.state_dict().items() if n != "head.weight"}
    source = FileWeights(file_entries(path), [Piece(n, s, n) for n, s in shapes.items()], shapes)
    part = ShardedState.from_module(whole, buckets=buckets(whole, mesh), mesh=mesh, rank=1, source=source)
    assert largest[0] == 129 * 60
    held = sum(part.weights[name].numel() for name in part.shards)
    assert total[0] == held + 4 + 2 * 6, "rows, the weight that is in no bucket, and buffers"


def test_values_are_cast_to_the_models_dtype(tmp_path: Path) -> None:
    whole, mesh = model(dtype=torch.bfloat16), MeshPlan(fsdp=2)
    exact = {name: torch.randn(v.shape) for name, v in whole.state_dict().items() if name != "head.weight"}
    save_file(exact, tmp_path / "w.safetensors")
    shapes = {name: tuple(v.shape) for name, v in exact.items()}
    source = FileWeights(file_entries(tmp_path), [Piece(n, s, n) for n, s in shapes.items()], shapes)
    parts = [
        ShardedState.from_module(whole, buckets=buckets(whole, mesh), mesh=mesh, rank=rank, source=source)
        for rank in range(2)
    ]
    assert torch.equal(joined(parts, "weights")["embed.weight"], exact["embed.weight"].bfloat16())


@settings(max_examples=50)
@given(st.integers(0, 12), st.integers(0, 12), st.integers(1, 4))
def test_any_rows_of_a_cut_weight(tmp_path_factory: Any, first: int, last: int, cuts: int) -> None:
    folder = tmp_path_factory.mktemp("cut")
    weight = torch.arange(12 * 5.0).view(12, 5)
    edges = [0, *sorted(torch.randperm(59)[: cuts - 1].add(1).tolist()), 60]
    pieces = [Piece(f"p{i}", (b - a,), "w", a) for i, (a, b) in enumerate(pairwise(edges))]
    save_file({p.name: weight.view(-1)[p.start : p.start + p.numel].clone() for p in pieces}, folder / "w.safetensors")
    source = FileWeights(file_entries(folder), pieces, {"w": (12, 5)})
    rows = range(min(first, last), last)
    assert torch.equal(source.rows("w", rows), weight[rows.start : rows.stop])


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4)}, tmp_path / "one.safetensors")
    entries = file_entries(tmp_path)
    with pytest.raises(CheckpointError, match=r"the files lack c, d, e and 1 more"):
        FileWeights(entries, [Piece(n, (1,), n) for n in "cdef"], {n: (1,) for n in "cdef"})
    with pytest.raises(CheckpointError, match="the files lack w"):
        FileWeights(entries, [], {"w": (1,)})
    with pytest.raises(CheckpointError, match=r"a in .* has shape \[2, 3\]\n  why:   w needs \[3, 2\]"):
        FileWeights(entries, [Piece("a", (3, 2), "w")], {"w": (3, 2)})
    save_file({"b": torch.zeros(4)}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match="b comes twice"):
        file_entries(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    assert file_entries(tmp_path).keys() == {"a", "b"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "three.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"three.safetensors is missing"):
        file_entries(tmp_path)
    with pytest.raises(CheckpointError, match="no weights at"):
        file_entries(tmp_path / "nothing")


@pytest.mark.parametrize("content", [b"", b"abc", b"\x08" + b"\0" * 7 + b"{]{]{]{]", b"\xff" * 8])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "w.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        file_entries(tmp_path)


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"is no safetensors file\n  why:   it ends at byte"):
        file_entries(tmp_path)


def test_without_a_source_weights_must_have_data() -> None:
    empty, mesh = without_data(), MeshPlan(fsdp=2)
    with pytest.raises(UnsupportedModelError, match=r"parameter unused has no data\n  why:   it is on the meta"):
        ShardedState.from_module(empty, buckets=buckets(empty, mesh), mesh=mesh, rank=0)


def test_buffers_must_have_data(tmp_path: Path) -> None:
    whole, mesh = model(), MeshPlan(fsdp=2)
    path = export_weights(StepState.from_module(whole), tmp_path / "w.safetensors")
    shapes = {n: tuple(v.shape) for n, v in whole.state_dict().items() if n != "head.weight"}
    source = FileWeights(file_entries(path), [Piece(n, s, n) for n, s in shapes.items()], shapes)
    with torch.device("meta"):
        empty = Model()
    with pytest.raises(UnsupportedModelError, match=r"buffer counts has no data"):
        ShardedState.from_module(empty, buckets=buckets(empty, mesh), mesh=mesh, rank=0, source=source)


def test_a_source_that_gives_other_rows_is_an_error() -> None:
    class Wrong:
        def fill(self, parts: Sequence[Part]) -> None:
            next(part for part in parts if part.path == "unused").take(torch.zeros(1))

        def buffer(self, path: str) -> None:
            return None

    whole, mesh = model(), MeshPlan(fsdp=2)
    with pytest.raises(ArtifactError, match=r"rows 0 to 2 of unused have shape \[1\]"):
        ShardedState.from_module(whole, buckets=buckets(whole, mesh), mesh=mesh, rank=0, source=Wrong())


def without_data() -> Model:
    """Parameters on the meta device, buffers with values."""
    whole = model(seed=9)
    for module in whole.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                module._parameters[name] = torch.nn.Parameter(parameter.to("meta"), parameter.requires_grad)
    whole.head.weight = whole.embed.weight
    return whole
