"""How far two tensors are apart, as everything in moec measures it (design: "equal")."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor


def relative_error(value: Tensor | None, reference: Tensor | None) -> float:
    """||value - reference|| / ||reference||, in float64.

    Where the reference is zero, absent or not finite there is no ratio: 0 if the value is the same, else infinity.
    """
    if value is None or reference is None:
        return 0.0 if value is reference else math.inf
    a, b = value.detach().double(), reference.detach().double()
    difference, size = float((a - b).norm()), float(b.norm())
    if difference == 0.0:
        return 0.0
    error = difference / size if size else math.inf
    return error if math.isfinite(error) else math.inf


def role(path: str) -> str:
    """A path without its layer numbers. Tensors of one role are rounded alike: the largest error among them says how
    far rounding goes, while within one tensor of few elements the ratio of two errors is chance."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def largest_by_role(errors: Mapping[str, float]) -> dict[str, float]:
    """Role -> largest error among the paths of that role."""
    largest: dict[str, float] = {}
    for path, error in errors.items():
        largest[role(path)] = max(error, largest.get(role(path), 0.0))
    return largest
