"""Do the hosts of several ranks hold the same files under the path that a run starts from?

1. Every rank marks each file by its size and a digest. A checkpoint's manifest has them; of a safetensors file the
   digest is of its header (names, dtypes, shapes, places) and of a sample of its data, a block from the middle of every
   tensor.
2. One digest of all marks is compared over the ranks, and where that differs, the marks are: then every rank raises the
   same error, which names the first file that differs, and which ranks have which.

Files that differ outside of the sample alone are taken for equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from moec.compiler.errors import CheckpointError
from moec.runtime.checkpoint import read_manifest
from moec.runtime.team import Team
from moec.runtime.tensor_file import Entry
from moec.runtime.weight_files import file_entries

_BLOCK_BYTES = 4096

Marks = Mapping[str, str]
"""Name of a file -> its size and digest, as people may read them."""


def check_same_files(path: Path, marks: Callable[[], Marks], team: Team) -> None:
    """Raise CheckpointError, on every rank, where the marks of what lies at `path` differ between ranks.

    All ranks call it together; an error of `marks` is one on every rank.
    """
    own = team.together(marks)
    if len(set(team.gather(_digest(f"{name} {mark}".encode() for name, mark in own.items())))) > 1:
        raise different_files(path, team.gather(own))


def file_marks(path: Path) -> Marks:
    """Of one safetensors file, or of those in a folder by their names in it."""
    by_file: dict[Path, list[tuple[str, Entry]]] = {}
    for name, entry in file_entries(path).items():
        by_file.setdefault(entry.file, []).append((name, entry))
    return {
        str(file.relative_to(path)) if path.is_dir() else "the file": _mark(file.stat().st_size, _file_digest(entries))
        for file, entries in sorted(by_file.items())
    }


def checkpoint_marks(path: Path) -> Marks:
    """Of the files of a checkpoint `step-...`, as its manifest has them."""
    files: Mapping[str, tuple[int, int]] = read_manifest(path)["files"]
    return {f"{path.name}/{name}": _mark(size, f"{checksum:08x}") for name, (size, checksum) in sorted(files.items())}


def different_files(path: Path, everyone: Sequence[Marks]) -> CheckpointError:
    """The error for ranks whose marks, in rank order, differ."""
    names = sorted({name for marks in everyone for name in marks})
    differing = [name for name in names if len({marks.get(name) for marks in everyone}) > 1]
    holders: dict[str, list[int]] = {}
    for rank, marks in enumerate(everyone):
        holders.setdefault(marks.get(differing[0], "no such file"), []).append(rank)
    more = f" and {len(differing) - 1} more differ" if differing[1:] else " differs"
    return CheckpointError(
        f"the ranks would start from different weights: {differing[0]}{more}",
        where=str(path),
        why="; ".join(f"{mark} on rank{'s' * bool(ranks[1:])} {_ranges(ranks)}" for mark, ranks in holders.items()),
        hint="give every host the same files, or a path that all of them share",
    )


def _file_digest(entries: Sequence[tuple[str, Entry]]) -> str:
    """Of what the header says of the tensors of one file, and of a sample of their values."""
    entries = sorted(entries, key=lambda pair: (pair[1].begin, pair[0]))
    header = "\n".join(f"{name} {entry.dtype} {entry.shape} {entry.begin}" for name, entry in entries)
    return _digest([header.encode(), *(_sample(entry) for _, entry in entries)])


def _sample(entry: Entry) -> bytes:
    count = min(entry.numel, _BLOCK_BYTES // entry.dtype.itemsize)
    first = (entry.numel - count) // 2
    return entry.read(first, first + count).view(torch.uint8).numpy().tobytes()


def _digest(parts: Iterable[bytes]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()


def _mark(size: int, digest: str) -> str:
    return f"{size:,} bytes with digest {digest}"


def _ranges(ranks: Sequence[int]) -> str:
    """'0-3, 8' for increasing numbers."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in runs)
