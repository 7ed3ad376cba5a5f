"""Weights out of a run's checkpoint, a few rows at a time, for any number of ranks: no process group is needed.

A checkpoint lists which rows of a tensor lie where in its files. A rank reads the stored parts that overlap its rows,
one after the other; a part is what one rank held when the checkpoint was saved.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from moec.compiler.errors import CheckpointError
from moec.runtime.checkpoint import check_files, quietly, read_manifest, stored_tensors
from moec.runtime.weight_source import Part


class CheckpointWeights:
    """Weights and buffers of a checkpoint; see `WeightSource`.

    path: of the checkpoint, `step-...`. weights, buffers: path of the model -> whole shape; a tensor that is tied in
    the checkpoint may have any of its names. rank, world: each of several ranks that read together looks at its share
    of the files. Raises CheckpointError for damage, for a name that is missing and for another shape.
    """

    def __init__(
        self,
        path: Path,
        weights: Mapping[str, Sequence[int]],
        buffers: Mapping[str, Sequence[int]],
        *,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        manifest = read_manifest(path)
        check_files(path, dict(sorted(manifest["files"].items())[rank::world]))
        self._path, self._aliases = path, manifest["aliases"]
        self._stored = stored_tensors(path)
        self._buffers = dict(buffers)
        for group, shapes in (("weights", weights), ("buffers", buffers)):
            for name, shape in shapes.items():
                self._check(self._name(group, name), list(shape) or ([1] if group == "weights" else []))

    def fill(self, parts: Sequence[Part]) -> None:
        """See `WeightSource`."""
        given = {self._name("weights", part.path): part for part in parts}
        with quietly():
            dcp.load({}, storage_reader=dcp.FileSystemReader(self._path), planner=_Rows(given), no_dist=True)

    def buffer(self, path: str) -> Tensor | None:
        """See `WeightSource`; None for one that the checkpoint was not asked for."""
        if path not in self._buffers:
            return None
        name = self._name("buffers", path)
        shape, dtype = self._stored[name]
        value = torch.empty(shape, dtype=dtype)
        with quietly():
            dcp.load({name: value}, storage_reader=dcp.FileSystemReader(self._path), no_dist=True)
        return value

    def _name(self, group: str, path: str) -> str:
        return f"{group}.{self._aliases.get(path, path)}"

    def _check(self, name: str, shape: list[int]) -> None:
        found = self._stored[name][0] if name in self._stored else None
        if found != shape:
            raise CheckpointError(
                f"the checkpoint lacks {name}" if found is None else f"{name} in the checkpoint has shape {found}",
                where=str(self._path),
                why="" if found is None else f"the model's has {shape}",
                hint="it belongs to another model",
            )


class _Rows(LoadPlanner):
    """Reads rows into memory that belongs to no state dict."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self._parts = parts

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, part in self._parts.items():
            stored = self._metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            if part.memory.numel():
                first = torch.Size([part.rows.start] + [0] * (part.memory.dim() - 1))
                items += create_read_items_for_chunk_list(
                    name, stored, [ChunkStorageMetadata(first, part.memory.size())]
                )
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("tensors alone are asked for")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        memory = self._parts[read_item.dest_index.fqn].memory.detach()
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            memory = memory.narrow(dim, start, length)
        return memory

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """The rows were copied to where they belong."""
