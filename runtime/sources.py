"""Which text files a run reads: paths and folders to a list of checked files in a fixed order.

1. Paths keep the order in which they are given; a path given twice is read twice.
2. A folder stands for all regular files below it whose name fits one of the patterns, sorted by relative path.
3. Every file is read through once: text is UTF-8 without NUL bytes. A file that was named itself must be text and not
   empty (DataError). Inside a folder such files are skipped, and listed with the reason in `Sources.skipped`.
"""

from __future__ import annotations

import codecs
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from moec.compiler.errors import DataError

BLOCK = 1 << 20


@dataclass(frozen=True)
class TextFile:
    """One document. name: relative to the path that was given. size: bytes when it was checked."""

    path: Path
    name: str
    size: int


@dataclass(frozen=True)
class Skipped:
    """A file in a folder that is not read. kind: "empty", "binary" or "unreadable"; detail: offset or system error."""

    path: Path
    kind: str
    detail: str = ""


@dataclass(frozen=True)
class Sources:
    """All documents of a run, in order, and what was left out."""

    files: tuple[TextFile, ...]
    skipped: tuple[Skipped, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    def describe(self) -> str:
        """For example "1,204 files, 31,208,112 bytes; skipped 3: 2 binary, 1 empty"."""
        text = f"{len(self.files):,} {'file' if len(self.files) == 1 else 'files'}, {self.bytes:,} bytes"
        if self.skipped:
            kinds = Counter(skipped.kind for skipped in self.skipped)
            text += f"; skipped {len(self.skipped):,}: " + ", ".join(
                f"{kinds[kind]:,} {kind}" for kind in sorted(kinds)
            )
        return text

    def fingerprint(self) -> str:
        """Hash of the names and sizes in order: changes when a file is added, removed, renamed or resized."""
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files:
            digest.update(os.fsencode(file.name) + b"\0" + str(file.size).encode() + b"\0")
        return digest.hexdigest()


def find_text(paths: Iterable[str | Path], patterns: Sequence[str] = ()) -> Sources:
    """Find and check all text below `paths`. patterns: file names inside folders, such as "*.py"; none takes all.

    Raises DataError for a missing path, for a named file that is empty or no text, and when no text is left.
    """
    files: list[TextFile] = []
    skipped: list[Skipped] = []
    given = [Path(path) for path in paths]
    refuse_missing(given)
    for path in given:
        if path.is_dir():
            for inside in _walk(path, patterns):
                found = _check(inside, inside.relative_to(path).as_posix())
                (files if isinstance(found, TextFile) else skipped).append(found)  # type: ignore[arg-type]
        else:
            found = _check(path, path.name)
            if isinstance(found, Skipped):
                raise _refusal(found)
            files.append(found)
    sources = Sources(tuple(files), tuple(skipped))
    if not files:
        raise DataError(
            "no text to train on",
            where=", ".join(str(path) for path in given) or "no path was given",
            why=sources.describe() + (f"; only names like {', '.join(patterns)} count" if patterns else ""),
            hint="give a text file, or a folder that holds some",
        )
    return sources


def refuse_missing(paths: Iterable[Path]) -> None:
    """Raise DataError for a path at which there is nothing."""
    for path in paths:
        if not path.exists():
            raise DataError(f"no file or folder {path}", hint="check the path given as data")


def _walk(folder: Path, patterns: Sequence[str]) -> Iterator[Path]:
    found = [
        Path(parent, name)
        for parent, _, names in os.walk(folder)
        for name in names
        if not patterns or any(fnmatch(name, pattern) for pattern in patterns)
    ]
    yield from sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _check(path: Path, name: str) -> TextFile | Skipped:
    try:
        if path.exists() and not path.is_file():
            return Skipped(path, "unreadable", "not a regular file")
        with path.open("rb") as stream:
            size, flaw = _scan(iter(lambda: stream.read(BLOCK), b""))
    except OSError as error:
        return Skipped(path, "unreadable", error.strerror or str(error))
    if flaw:
        return Skipped(path, "binary", flaw)
    return TextFile(path, name, size) if size else Skipped(path, "empty")


def _scan(blocks: Iterator[bytes]) -> tuple[int, str]:
    """Number of bytes, and the first thing that is not text with its offset ('' when all is text)."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    for block in blocks:
        pending = len(decoder.getstate()[0])
        nul = block.find(b"\0")
        try:
            decoder.decode(block if nul < 0 else block[:nul])
        except UnicodeDecodeError as error:
            return offset, f"no UTF-8 at byte {offset - pending + error.start:,}"
        if nul >= 0:
            return offset, f"a NUL byte at byte {offset + nul:,}"
        offset += len(block)
    pending = len(decoder.getstate()[0])
    return offset, f"no UTF-8 at byte {offset - pending:,}" if pending else ""


def _refusal(skipped: Skipped) -> DataError:
    path = skipped.path
    if skipped.kind == "empty":
        return DataError(f"{path} is empty", hint="give a file with text")
    if skipped.kind == "binary":
        return DataError(f"{path} is not text", why=skipped.detail, hint="give UTF-8 text, or convert this file first")
    return DataError(f"{path} cannot be read", why=skipped.detail)
