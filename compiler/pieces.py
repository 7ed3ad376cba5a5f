"""How the weights of a model lie in files that name and cut them otherwise, as published checkpoints do.

Every tensor of such a file is a run of consecutive elements of one weight, in row-major order: a matrix of one expert
out of stacked ones, or the same elements in another shape. So any rows of a weight can be read from files, and written
to them, without the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """One tensor of a file.

    name, shape: in the file. path: of the weight. start: the weight's element with which it begins. A tensor that is
    longer than the rest of the weight ends in zeros.
    """

    name: str
    shape: tuple[int, ...]
    path: str
    start: int = 0

    @property
    def numel(self) -> int:
        """Elements in the file."""
        return math.prod(self.shape)


def by_weight(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    """The pieces of each weight, by path, in the order of their elements."""
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.path, []).append(piece)
    return {path: sorted(members, key=lambda piece: piece.start) for path, members in found.items()}
