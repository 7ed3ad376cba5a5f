"""An endless, resumable stream of packed batches over text files.

1. One file is one document: its begin token, its tokens, its end token.
2. Each epoch reads every document once, in an order drawn from (seed, epoch) alone.
3. The tokens of all documents in that order are cut into rows of `length` without a gap; epochs follow one another
   without a gap too. Row b of rank r in microbatch a of batch n is row ((n * A + a) * ranks + r) * B + b of that
   stream: a step of the optimizer reads the same rows, however they are dealt to microbatches and ranks. Every rank
   reads and tokenizes the whole stream, and keeps its rows.
4. A file is read and tokenized in parts of at most 1 MiB, cut behind a line end where there is one, so that memory
   does not grow with the size of the text.

The position is (epoch, document, byte of the part, token in the part), and the same on every rank; going on from it
gives the same batches, and the same rows on another number of ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moec.compiler.errors import DataError
from moec.runtime.packing import Row, pack_row
from moec.runtime.sources import BLOCK, TextFile, find_text
from moec.runtime.tokenizer import ByteTokenizer, Tokenizer, Tokens


@dataclass
class _Position:
    epoch: int = 0
    document: int = 0
    part: int = 0
    token: int = 0


class PackedText:
    """Iterator over batches of packed rows.

    A batch holds "input_ids", "labels" and "document_ids", int64 [A, B, T], or [B, T] when accumulation is 1.
    Labels are unshifted; the first token of each document, and of each row, is IGNORED (-100).

    batch: rows per microbatch and rank. ranks, rank: how many ranks the rows are dealt to, and which one this is.
    packing=False leaves "document_ids" out, for models that cannot keep documents apart: the rows are the same, but a
    model then sees each row as one document.
    vocabulary: the model's, checked against the tokenizer's. shuffle=False keeps the order of `find_text`.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        batch: int,
        length: int,
        accumulation: int = 1,
        tokenizer: Tokenizer | None = None,
        vocabulary: int | None = None,
        patterns: Sequence[str] = (),
        packing: bool = True,
        shuffle: bool = True,
        seed: int = 0,
        ranks: int = 1,
        rank: int = 0,
    ) -> None:
        self.tokenizer: Tokenizer = tokenizer or ByteTokenizer()
        _check_sizes(batch, length, accumulation)
        _check_vocabulary(self.tokenizer, vocabulary)
        self.sources = find_text(paths, patterns)
        self.packing = packing
        self._shape = (accumulation, batch) if accumulation > 1 else (batch,)
        self._length = length
        self._ranks, self._rank = ranks, rank
        self._shuffle, self._seed = shuffle, seed
        self._position = _Position()
        self._order = self._draw_order(0)
        self._part: tuple[Tokens, int] | None = None

    @property
    def epoch(self) -> int:
        """How often all documents have been read."""
        return self._position.epoch

    def describe(self) -> str:
        """One line on what is read and what was left out."""
        return f"{self.sources.describe()}; tokenizer {self.tokenizer.name}, vocabulary {self.tokenizer.vocabulary:,}"

    def __iter__(self) -> PackedText:
        return self

    def __next__(self) -> dict[str, Tensor]:
        rows = self._own_rows()
        batch = {
            "input_ids": self._stack([row.tokens for row in rows]),
            "labels": self._stack([row.labels for row in rows]),
        }
        if self.packing:
            batch["document_ids"] = self._stack([row.document_ids for row in rows])
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last batch and what it depends on, JSON values only."""
        return {"position": asdict(self._position), **self._identity()}

    def load_state_dict(self, position: Mapping[str, Any]) -> None:
        """Go on from a saved position. Raises DataError when files, tokenizer, seed or order are other ones."""
        for name, here in self._identity().items():
            if position.get(name) != here:
                raise DataError(
                    f"the data differs from the checkpoint's: {name} was {position.get(name)}, now it is {here}",
                    hint="give the same data in the same order, or start a new run",
                )
        self._position = _Position(**position["position"])
        self._order = self._draw_order(self._position.epoch)
        self._part = None

    def _identity(self) -> dict[str, Any]:
        return {
            "files": len(self.sources.files),
            "bytes": self.sources.bytes,
            "names_and_sizes": self.sources.fingerprint(),
            "tokenizer": self.tokenizer.name,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def _own_rows(self) -> list[Row]:
        size, rows = self._shape[-1], []
        for number in range(self._ranks * math.prod(self._shape)):
            row = self._row()
            if number // size % self._ranks == self._rank:
                rows.append(row)
        return rows

    def _row(self) -> Row:
        pieces: list[Tokens] = []
        room, empty = self._length, 0
        while room:
            piece = self._piece(room)
            room -= len(piece)
            empty = 0 if len(piece) else empty + 1
            if len(piece):
                pieces.append(piece)
            elif empty > len(self.sources.files):
                raise DataError(
                    "no text to train on: the tokenizer gives no token for any file",
                    where=self.describe(),
                    hint="check the tokenizer file, or give other text",
                )
        return pack_row(pieces)

    def _piece(self, room: int) -> Tokens:
        """Up to `room` tokens of the current document; fewer only at its end. Moves the position behind them."""
        parts: list[Tokens] = []
        here = self._position
        document = here.document, here.epoch
        while room and document == (here.document, here.epoch):
            tokens, following = self._load_part()
            taken = tokens[here.token : here.token + room]
            parts.append(taken)
            room -= len(taken)
            here.token += len(taken)
            if here.token == len(tokens):
                self._next_part(following)
        return np.concatenate(parts)

    def _load_part(self) -> tuple[Tokens, int]:
        """Tokens of the part at the position, and the byte where the next one starts (the file's size at its end)."""
        if self._part is None:
            file = self._file()
            raw = _read_part(file, self._position.part)
            following = self._position.part + len(raw)
            tokens = self.tokenizer.encode(_decode(file, self._position.part, raw))
            begin = self.tokenizer.begin if self._position.part == 0 else None
            end = self.tokenizer.end if following == file.size else None
            self._part = _surround(begin, tokens, end), following
        return self._part

    def _next_part(self, following: int) -> None:
        here = self._position
        here.part, here.token, self._part = following, 0, None
        if following < self._file().size:
            return
        here.part, here.document = 0, here.document + 1
        if here.document == len(self._order):
            here.document, here.epoch = 0, here.epoch + 1
            self._order = self._draw_order(here.epoch)

    def _file(self) -> TextFile:
        return self.sources.files[self._order[self._position.document]]

    def _draw_order(self, epoch: int) -> list[int]:
        """Sorting by a hash gives the same order on every machine and library version."""
        indices = range(len(self.sources.files))
        if not self._shuffle:
            return list(indices)
        return sorted(indices, key=lambda index: hashlib.blake2b(f"{self._seed}:{epoch}:{index}".encode()).digest())

    def _stack(self, rows: Sequence[Tokens]) -> Tensor:
        return torch.from_numpy(np.stack(rows)).view(*self._shape, self._length)


def _read_part(file: TextFile, start: int) -> bytes:
    try:
        with file.path.open("rb") as stream:
            stream.seek(0, 2)
            if stream.tell() != file.size:
                raise _changed(file, f"it had {file.size:,} bytes, now it has {stream.tell():,}")
            stream.seek(start)
            raw = stream.read(BLOCK)
    except OSError as error:
        raise _changed(file, error.strerror or str(error)) from error
    if start + len(raw) == file.size:
        return raw
    line_end = raw.rfind(b"\n") + 1
    if line_end:
        return raw[:line_end]
    # No line end in the whole part: cut before the last character, which may be incomplete.
    last = len(raw) - 1
    while last > 0 and raw[last] & 0xC0 == 0x80:
        last -= 1
    return raw[:last]


def _decode(file: TextFile, start: int, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise _changed(file, f"no UTF-8 at byte {start + error.start:,}") from error


def _surround(begin: int | None, tokens: Tokens, end: int | None) -> Tokens:
    first = [] if begin is None else [begin]
    last = [] if end is None else [end]
    return np.concatenate([np.array(first, np.int64), tokens, np.array(last, np.int64)])


def _changed(file: TextFile, why: str) -> DataError:
    return DataError(f"{file.path} changed while it is being trained on", why=why, hint="train on a copy of the data")


def _check_sizes(batch: int, length: int, accumulation: int) -> None:
    for name, value, least in (("batch", batch, 1), ("length", length, 2), ("accumulation", accumulation, 1)):
        if value < least:
            raise DataError(f"{name} is {value}, the least is {least}", hint="change the plan")


def _check_vocabulary(tokenizer: Tokenizer, vocabulary: int | None) -> None:
    if vocabulary is not None and tokenizer.vocabulary > vocabulary:
        raise DataError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocabulary:,} tokens, the model has {vocabulary:,}",
            hint="use the tokenizer that belongs to the model, or a model with a larger vocabulary",
        )
