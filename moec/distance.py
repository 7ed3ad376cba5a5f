"""How far two tensors are apart, as everything in moec measures it (design: "equal")."""

from __future__ import annotations

import math

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
