"""Text for the demo: excerpts from the source of this machine's Python standard library.

1. Every .py file of the library proper (no installed packages, no tests, no tables of encodings) is cut into excerpts
   of whole lines. Their order follows from hashes of their names, so it is the same on every machine with that Python.
2. The excerpts of some files are held out: whole files, so that nothing of them is seen in training.
3. From all the text that is not held out: how well byte frequencies alone, and frequencies of byte pairs alone,
   predict the text that is. A model whose layers do not look back is at best as good as byte pairs.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moec.compiler.errors import DataError

EXCERPT = 1024
"""Largest excerpt in bytes: short, so that every batch holds text from several modules."""

_LEFT_OUT = {
    *("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"),
    *("encodings", "pydoc_data", "lib2to3", "idlelib", "turtledemo", "ensurepip"),
}
_HELD_OUT_SHARE = 16
_UNSEEN = 0.01


@dataclass(frozen=True)
class DemoText:
    """files: training excerpts by file name. held_out: bytes as token ids, int64 [rows, length].

    bytes_alone, pairs_alone: nats per byte of the held-out rows under frequencies of the other text.
    """

    files: Mapping[str, bytes]
    held_out: Tensor
    bytes_alone: float
    pairs_alone: float

    def write(self, folder: Path) -> None:
        """Write the training excerpts into `folder`, one file each."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)


def read_text(*, train_bytes: int, rows: int, length: int, library: Path | None = None) -> DemoText:
    """About `train_bytes` of excerpts to train on, and `rows` of `length` bytes that are set aside.

    library: where the Python files are, by default the standard library of this interpreter. Raises DataError when
    it holds too little text.
    """
    library = library or Path(sysconfig.get_path("stdlib"))
    excerpts = sorted(_excerpts(library), key=lambda excerpt: _hash(f"{excerpt.name}:{excerpt.number}"))
    train = [excerpt for excerpt in excerpts if not excerpt.held_out]
    held_out = [excerpt.content[:length] for excerpt in excerpts if excerpt.held_out and len(excerpt.content) >= length]
    if len(held_out) < rows or sum(len(excerpt.content) for excerpt in train) < train_bytes:
        raise DataError(
            "too little Python source on this machine for the demo",
            where=str(library),
            why=f"{len(train)} excerpts to train on, {len(held_out)} rows held out; {rows} rows are needed",
            hint="run it with a Python that has its standard library as source files",
        )
    tokens = np.stack([np.frombuffer(content, np.uint8) for content in held_out[:rows]]).astype(np.int64)
    seen = np.frombuffer(b"".join(excerpt.content for excerpt in train), np.uint8).astype(np.int64)
    files = dict(_first_bytes(train, train_bytes))
    return DemoText(files, torch.from_numpy(tokens), _bytes_alone(seen, tokens), _pairs_alone(seen, tokens))


@dataclass(frozen=True)
class _Excerpt:
    """name: the module's, as json.decoder."""

    name: str
    number: int
    content: bytes

    @property
    def held_out(self) -> bool:
        return int(_hash(self.name), 16) % _HELD_OUT_SHARE == 0


def _excerpts(library: Path) -> Iterator[_Excerpt]:
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if _LEFT_OUT & set(relative.parts):
            continue
        content = path.read_bytes()
        if b"\0" in content or not _is_utf8(content):
            continue
        name = ".".join(relative.with_suffix("").parts)
        yield from (_Excerpt(name, number, piece) for number, piece in enumerate(_pieces(content)))


def _pieces(content: bytes) -> Iterator[bytes]:
    piece = b""
    for line in content.splitlines(keepends=True):
        if piece and len(piece) + len(line) > EXCERPT:
            yield piece
            piece = b""
        piece += line
    if piece:
        yield piece


def _first_bytes(excerpts: list[_Excerpt], wanted: int) -> Iterator[tuple[str, bytes]]:
    """(file name, content) of the first excerpts that hold as many bytes together."""
    for excerpt in excerpts:
        if wanted <= 0:
            return
        yield f"{excerpt.name}-{excerpt.number}.txt", excerpt.content
        wanted -= len(excerpt.content)


def _bytes_alone(seen: NDArray[np.int64], rows: NDArray[np.int64]) -> float:
    counts = np.bincount(seen, minlength=256) + _UNSEEN
    return float(-np.log(counts / counts.sum())[rows[:, 1:]].mean())


def _pairs_alone(seen: NDArray[np.int64], rows: NDArray[np.int64]) -> float:
    counts = np.bincount(256 * seen[:-1] + seen[1:], minlength=256 * 256).reshape(256, 256) + _UNSEEN
    return float(-np.log(counts / counts.sum(1, keepdims=True))[rows[:, :-1], rows[:, 1:]].mean())


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
