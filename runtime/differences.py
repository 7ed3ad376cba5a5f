"""What ranks have to have in common, as lines of text in named sections, and where it first differs."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

import torch

Sections = Mapping[str, Sequence[str]]
_LONGEST = 200
_PACKAGES = ("moec.compiler", "moec.runtime", "moec.codegen")


def first_difference(everyone: Sequence[Sections]) -> str:
    """The first section and line in which a rank differs from rank 0, with both ranks' lines; '' when none does."""
    first = everyone[0]
    for name in first:
        others = [rank for rank, sections in enumerate(everyone) if list(sections[name]) != list(first[name])]
        if not others:
            continue
        rank = others[0]
        pairs = enumerate(zip_longest(first[name], everyone[rank][name]))
        number, (here, there) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
        more = f" (ranks {', '.join(map(str, others))} differ from rank 0)" if others[1:] else ""
        return (
            f"{name} differs between ranks 0 and {rank} in line {number + 1}: "
            f"{_shown(here)} on rank 0, {_shown(there)} on rank {rank}{more}"
        )
    return ""


def digest(lines: Sequence[str]) -> bytes:
    """32 bytes that differ for other lines."""
    return hashlib.blake2b("\0".join(lines).encode(), digest_size=32).digest()


@functools.cache
def versions() -> tuple[str, ...]:
    """Lines that name moec and torch. An installation for development keeps its version while its source changes, so
    the source of what runs a step is named by its digest."""
    specs = [importlib.util.find_spec(name) for name in _PACKAGES]
    folders = [Path(folder) for spec in specs if spec for folder in spec.submodule_search_locations or ()]
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    source = hashlib.blake2b(b"\0".join(file.read_bytes() for file in files), digest_size=8).hexdigest()
    return f"moec {importlib.metadata.version('moec')}, source {source}", f"torch {torch.__version__}"


def _shown(line: str | None) -> str:
    if line is None:
        return "nothing"
    return repr(line if len(line) <= _LONGEST else f"{line[:_LONGEST]}...")
