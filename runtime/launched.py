"""What the launcher of a process says about it. Imports no torch."""

from __future__ import annotations

import os


def launched() -> tuple[int, int] | None:
    """(rank, number of ranks) of a process that a launcher started, otherwise None."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
