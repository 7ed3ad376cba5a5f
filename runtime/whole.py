"""Whole tensors out of the rows that each rank holds, by the collectives of a program: on real and simulated ranks.

Every rank calls the functions together, and every rank gets the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moec.compiler.layout import rows_per_rank
from moec.runtime.groups import use

if TYPE_CHECKING:
    from moec.runtime.sharded_state import ShardedState

_functional = torch.ops._c10d_functional


def whole(state: ShardedState, path: str, local: Tensor) -> Tensor:
    """The whole of a tensor over this rank's rows of the weight at `path`: the weight itself, a moment, a gradient."""
    shard, mesh = state.shards[path], state.mesh
    use(mesh)
    shape = shard.shape or (1,)
    if shard.role == "dense":
        return _joined(local, shape[0], mesh.world, "gather").reshape(shard.shape)
    share = rows_per_rank(shape[0], mesh.ep)
    held = min(share, max(0, shape[0] - share * (state.rank % mesh.ep)))
    mine = _joined_part(local, held, rows_per_rank(share, mesh.edp), mesh.edp) if mesh.edp > 1 else local
    return _joined(mine, shape[0], mesh.ep, "exchange").reshape(shard.shape)


def each_whole(state: ShardedState, of: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
    """(path, whole tensor) one after the other, of every weight, or of `of`, which holds this rank's rows by path.

    All ranks take all of them; one that keeps none never holds more than one.
    """
    chosen = of if of is not None else {p: w for p, w in state.weights.items() if p not in state.aliases}
    for path, local in chosen.items():
        yield path, whole(state, path, local.detach()) if path in state.shards else local.detach().clone()


def whole_gradients(state: ShardedState) -> dict[str, Tensor]:
    """The summed gradient of every parameter that has one, by path."""
    return {path: whole(state, path, gradient) for path, gradient in state.gradients.items()}


def whole_weights(state: ShardedState, of: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Every weight by owning path, or each tensor of `of`, which holds this rank's rows by path."""
    return dict(each_whole(state, of))


def _joined_part(local: Tensor, held: int, room: int, ranks: int) -> Tensor:
    """The `held` experts of one rank of the exchange, which lie on `ranks` ranks; each sends `room` rows, all the same.

    Ranks of a part without experts take part too: all parts meet in one collective of a program.
    """
    each = rows_per_rank(held, ranks)
    joined = _joined(_with_room(local, room), ranks * room, ranks, "expert_gather")
    return joined.unflatten(0, (ranks, room))[:, :each].flatten(0, 1)[:held]


def _with_room(local: Tensor, rows: int) -> Tensor:
    padded = local.new_zeros(rows, *local.shape[1:])
    padded[: local.shape[0]] = local
    return padded


def _joined(local: Tensor, size: int, ranks: int, role: str) -> Tensor:
    """Rows of all ranks of a role, one after the other, cut to `size`; each gives its rows padded to as many."""
    rows, rest = rows_per_rank(size, ranks), tuple(local.shape[1:])
    given = _with_room(local, rows)
    flat = given.reshape(-1)
    if not math.prod(given.shape):
        return local.new_zeros(size, *rest)
    joined = _functional.wait_tensor(_functional.all_gather_into_tensor(flat, ranks, role))
    return joined.view(ranks * rows, *rest)[:size]
