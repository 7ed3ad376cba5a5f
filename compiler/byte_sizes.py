"""Sizes of memory as people write them: 1.25GiB, 512MiB, 64KiB, 100B."""

from __future__ import annotations

import re

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(rf"\s*([0-9]+(?:\.[0-9]+)?)\s*({'|'.join(_UNITS)})\s*")


def parse_bytes(text: str) -> int:
    """Bytes of a size with its unit; ValueError for anything else."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a size in bytes such as 1.25GiB; units are {', '.join(_UNITS)}")
    return int(float(found[1]) * _UNITS[found[2]])
