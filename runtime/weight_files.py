"""Weights out of safetensors files, a few rows at a time: a rank reads what it holds, and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from moec.compiler.errors import CheckpointError
from moec.compiler.pieces import Piece, by_weight
from moec.runtime.export import INDEX
from moec.runtime.tensor_file import Entry, read_entries
from moec.runtime.weight_source import Part

_NAMED = 3


def file_entries(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file, or of all those in a folder (where there is an index, of those it names).

    Raises CheckpointError when there is none, or when two files hold the same name.
    """
    if path.is_dir():
        index = path / INDEX
        if index.is_file():
            files = sorted({path / name for name in json.loads(index.read_text())["weight_map"].values()})
        else:
            files = sorted(path.glob("*.safetensors"))
    else:
        files = [path] if path.is_file() else []
    if not files:
        raise CheckpointError(
            f"no weights at {path}", hint="give a safetensors file, or a folder that holds safetensors files"
        )
    found: dict[str, Entry] = {}
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing", why=f"{INDEX} names it")
        for name, entry in read_entries(file).items():
            if name in found:
                raise CheckpointError(f"{name} comes twice", where=f"{found[name].file} and {file}")
            found[name] = entry
    return found


class FileWeights:
    """Weights and buffers in files; see `WeightSource`.

    entries: what the files hold. pieces: which of it belongs where, for every tensor of `shapes`, path -> whole shape.
    Raises CheckpointError for a name that is missing and for another shape.
    """

    def __init__(
        self, entries: Mapping[str, Entry], pieces: Iterable[Piece], shapes: Mapping[str, Sequence[int]]
    ) -> None:
        self._entries = entries
        self._shapes = {path: tuple(shape) for path, shape in shapes.items()}
        self._pieces = by_weight(pieces)
        needed = [piece for path in shapes for piece in self._pieces.get(path, ())]
        lacking = [path for path in shapes if path not in self._pieces]
        lacking += [piece.name for piece in needed if piece.name not in entries]
        if lacking:
            more = f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
            raise CheckpointError(
                f"the files lack {', '.join(lacking[:_NAMED])}{more}", hint="they belong to another model"
            )
        for piece in needed:
            entry = entries[piece.name]
            if entry.shape != piece.shape:
                raise CheckpointError(
                    f"{piece.name} in {entry.file} has shape {list(entry.shape)}",
                    why=f"{piece.path} needs {list(piece.shape)}",
                )

    def fill(self, parts: Sequence[Part]) -> None:
        """See `WeightSource`; of each part, the rows alone are read."""
        for part in parts:
            part.take(self.rows(part.path, part.rows))

    def rows(self, path: str, rows: range) -> Tensor:
        """Rows of a weight, [len(rows), ...] in the dtype of the file."""
        inner = self._shapes[path][1:]
        width = math.prod(inner)
        return self._elements(path, rows.start * width, rows.stop * width).view(len(rows), *inner)

    def buffer(self, path: str) -> Tensor | None:
        """See `WeightSource`; None for one that the files need not have."""
        shape = self._shapes.get(path)
        return None if shape is None else self._elements(path, 0, math.prod(shape)).view(shape)

    def _elements(self, path: str, begin: int, end: int) -> Tensor:
        parts = []
        for piece in self._pieces[path]:
            first, last = max(begin, piece.start), min(end, piece.start + piece.numel)
            if first < last:
                parts.append(self._entries[piece.name].read(first - piece.start, last - piece.start))
        return torch.cat(parts) if len(parts) > 1 else parts[0] if parts else torch.empty(0)
