"""Experts with a capacity: rows that were too many stop a step before its update, or are counted.

`state.overflow` has them by the path of the experts, for the microbatches of this rank. Every rank raises or returns
the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moec.compiler.errors import CapacityError
from moec.runtime.control import summed
from moec.runtime.state import StepState


def refuse_overflow(state: StepState) -> None:
    """Raise CapacityError on every rank when an expert of any layer got more rows than it takes, on any rank."""
    if not state.overflow:
        return
    rows = summed(torch.cat([over.flatten() for over in state.overflow.values()]))
    if not rows.any():
        return
    parts = dict(zip(state.overflow, rows.split([over.numel() for over in state.overflow.values()]), strict=True))
    path = max(parts, key=lambda path: int(parts[path].max()))
    expert, most = int(parts[path].argmax()), int(parts[path].max())
    others = int((rows > 0).sum()) - 1
    raise CapacityError(
        f"expert {expert} of {path} got {most} rows more than it takes"
        + (f", and {others} other experts got too many as well" if others else ""),
        where=f"step {state.step + 1}, all ranks and microbatches together",
        why=f"each expert takes at most {state.capacities[path]} rows from a rank in a microbatch (mesh.capacity)",
        hint="raise mesh.capacity or set it to 0, balance the router, or accept the loss with mesh.overflow: drop",
    )


def dropped_rows(state: StepState) -> Tensor:
    """How many rows of this rank were left out so far, over all layers: int64 scalar."""
    return torch.stack([over.sum() for over in state.overflow.values()]).sum()
