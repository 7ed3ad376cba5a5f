"""Weights out of a run as safetensors: one file under the model's own names, or a folder under published ones.

No rank ever holds the model, and nothing is sent:
1. the first rank makes files with room for everything; 2. every rank writes its own rows where they belong;
3. the first rank gives the files their names when all have written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from moec.compiler.errors import CheckpointError
from moec.compiler.pieces import Piece
from moec.runtime import durable
from moec.runtime.sharded_state import ShardedState
from moec.runtime.state import StepState
from moec.runtime.team import PeerError, Team
from moec.runtime.tensor_file import Entry, laid_out, preallocate, write

INDEX = "model.safetensors.index.json"
_LARGEST_FILE = 5 * 10**9

Description = tuple[torch.dtype, tuple[int, ...]]


def export_weights(state: StepState, path: Path, *, derived: bool = False) -> Path:
    """Write weights and saved buffers to a safetensors file, atomically; returns its path. All ranks call it together.

    Names are module paths, as in the model's own state_dict. Tied weights are stored once, under the first path; the
    file's metadata maps each other path to it. derived: store the buffers too that the model leaves out of its
    state_dict. Raises CheckpointError on every rank when one cannot write.
    """
    pieces = [Piece(name, _shape(state, name), name) for name in _tensors(state, derived)]
    _write_files(state, {path: pieces}, {"format": "pt", **state.aliases})
    return path


def export_pieces(state: StepState, folder: Path, pieces: Iterable[Piece], *, largest: int = _LARGEST_FILE) -> Path:
    """Write weights and saved buffers under published names: files of at most `largest` bytes, and their index.

    pieces: how the state's tensors are cut and named (compiler/pieces.py); every weight has to be among them. All ranks
    call it together. Raises CheckpointError on every rank when one cannot write, or a weight has no name.
    """
    chosen = list(pieces)
    tensors = _tensors(state, derived=False)
    _check_covered(tensors.keys(), chosen)
    sizes = [(piece, piece.numel * tensors[piece.path].dtype.itemsize) for piece in chosen]
    groups = list(_grouped(sizes, largest))
    names = [f"model-{index + 1:05d}-of-{len(groups):05d}.safetensors" for index in range(len(groups))]
    _write_files(state, {folder / name: group for name, group in zip(names, groups, strict=True)}, {"format": "pt"})
    content = {
        "metadata": {"total_size": sum(size for _, size in sizes)},
        "weight_map": {piece.name: name for name, group in zip(names, groups, strict=True) for piece in group},
    }
    Team.of(state).once(lambda: durable.write_file(folder / INDEX, json.dumps(content, indent=1).encode()))
    return folder


def _write_files(state: StepState, files: Mapping[Path, list[Piece]], metadata: Mapping[str, str]) -> None:
    team, tensors = Team.of(state), _tensors(state, derived=True)
    partials = {path: path.with_name(durable.PARTIAL + path.name) for path in files}
    described = {
        path: {piece.name: (tensors[piece.path].dtype, piece.shape) for piece in pieces}
        for path, pieces in files.items()
    }

    def make_room() -> None:
        for path, partial in partials.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            preallocate(partial, described[path], metadata)

    def fill() -> None:
        for path, partial in partials.items():
            entries = laid_out(partial, described[path], metadata)
            descriptor = os.open(partial, os.O_WRONLY)
            try:
                for piece in files[path]:
                    _write_own(state, descriptor, piece, entries[piece.name], tensors[piece.path], team)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def publish() -> None:
        for path, partial in partials.items():
            durable.publish(partial, path)

    try:
        team.once(make_room)
        team.together(fill)
        team.once(publish)
    except (OSError, PeerError) as error:
        first = next(iter(files))
        raise CheckpointError(
            f"the weights could not be written to {first}",
            why=str(error),
            hint="free space, or choose another folder, one that all ranks share",
        ) from error


def _write_own(state: StepState, descriptor: int, piece: Piece, entry: Entry, tensor: Tensor, team: Team) -> None:
    """Write what this rank holds of a piece; what every rank holds is written by the first."""
    begin = 0
    if isinstance(state, ShardedState) and piece.path in state.shards:
        shard = state.shards[piece.path]
        begin = shard.rows.start * shard.weight.row_numel
    elif not team.first:
        return
    first, last = max(begin, piece.start), min(begin + tensor.numel(), piece.start + piece.numel)
    if first < last:
        write(descriptor, entry, first - piece.start, tensor.detach().reshape(-1)[first - begin : last - begin])


def _tensors(state: StepState, derived: bool) -> dict[str, Tensor]:
    """What this rank holds of everything to be stored, by owning path."""
    buffers = {n: b for n, b in state.buffers.items() if derived or n not in state.derived_buffers}
    return {name: tensor for name, tensor in {**state.weights, **buffers}.items() if name not in state.aliases}


def _shape(state: StepState, name: str) -> tuple[int, ...]:
    return state.whole_shape(name) if name in state.weights else tuple(state.buffers[name].shape)


def _grouped(sizes: Iterable[tuple[Piece, int]], largest: int) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    total = 0
    for piece, size in sizes:
        if group and total + size > largest:
            yield group
            group, total = [], 0
        group.append(piece)
        total += size
    if group:
        yield group


def _check_covered(paths: Iterable[str], pieces: Iterable[Piece]) -> None:
    named = {piece.path for piece in pieces}
    missing = [path for path in paths if path not in named]
    if missing:
        raise CheckpointError(f"{missing[0]} has no published name", hint="export it under the model's own names")
