"""Buffers that a forward writes, on several ranks, each of which has seen rows of its own.

1. A floating-point buffer becomes the mean over ranks of what they wrote. Running means of statistics stay what they
   are: means, of all rows.
2. Any other buffer (a count of calls, a flag) must have been written alike: nothing says how to join other values.
So every rank holds the same buffers after a step, as one rank would.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moec.compiler.errors import UnsupportedModelError
from moec.runtime.checksum import checksum
from moec.runtime.control import gathered, summed
from moec.runtime.state import StepState


@torch.no_grad()
def join_buffers(state: StepState, paths: Sequence[str]) -> None:
    """Give the buffers at `paths` the same values on all ranks, with one collective for each of the two kinds.

    All ranks call it together, before the optimizer; UnsupportedModelError on each for values that cannot be joined.
    """
    averaged = [path for path in paths if state.buffers[path].is_floating_point()]
    _refuse_other_values(state, [path for path in paths if path not in averaged])
    if averaged:
        _average([state.buffers[path] for path in averaged], state.world)


def _average(buffers: list[Tensor], world: int) -> None:
    mean = summed(torch.cat([buffer.double().flatten() for buffer in buffers])) / world
    for buffer, part in zip(buffers, mean.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(part.view_as(buffer))


def _refuse_other_values(state: StepState, paths: list[str]) -> None:
    if not paths:
        return
    own = torch.tensor([checksum(state.buffers[path]) for path in paths], device=state.device)
    same = gathered(own, state.world)
    for path, column in zip(paths, same.unbind(1), strict=True):
        others = (column != column[0]).nonzero().flatten().tolist()
        if others:
            raise UnsupportedModelError(
                f"ranks 0 and {others[0]} wrote different values to the buffer {path}",
                where=path.rpartition(".")[0],
                why=f"each rank sees rows of its own, and {state.buffers[path].dtype} has no mean",
                hint="keep it in floating point (its mean over the ranks is kept), or count what all ranks see alike",
            )
