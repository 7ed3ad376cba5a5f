"""Collectives in programs: the roles of process groups, who belongs to them, and the ops that communicate.

A collective names its group by a role, not by a process group, so that every rank holds the same text:

    role                              ranks of a group
    gather, scatter, control          all
    expert_gather, expert_scatter     the edp ranks that hold parts of the same experts
    exchange                          the ep ranks that hold all experts between them

Rank r has ep_index r % ep and edp_index r // ep. A group's ranks are in ascending order; a collective's "index" of a
rank is its place in its group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moec.compiler._torch_compat import OpOverload
from moec.compiler.plan import MeshPlan

ROLES = ("gather", "scatter", "expert_gather", "expert_scatter", "exchange", "control")

_functional = torch.ops._c10d_functional
COLLECTIVES: dict[OpOverload, str] = {
    getattr(_functional, name).default: name
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single", "broadcast")
}
WAIT = _functional.wait_tensor.default
NAMESPACE = "_c10d_functional"

DTYPES = {
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}
"""What gloo moves; anything else goes as bytes."""

COMPOSITES: dict[OpOverload, Callable[..., Any]] = {}


def register_composite(op: OpOverload, implementation: Callable[..., Any]) -> None:
    """Declare that `op` communicates inside: its Python `implementation`, called with the op's arguments, runs
    collectives of the table above. What observes or simulates collectives calls it in the op's place.

    The implementation has the schema's defaults, since the dispatcher drops trailing arguments that equal them.
    """
    if COMPOSITES.setdefault(op, implementation) is not implementation:
        raise ValueError(f"{op} has an implementation with collectives already")


def groups_of(mesh: MeshPlan, role: str) -> list[tuple[int, ...]]:
    """All groups of a role, each in ascending order of ranks; together they hold every rank once."""
    if role in ("gather", "scatter", "control"):
        return [tuple(range(mesh.world))]
    if role in ("expert_gather", "expert_scatter"):
        return [tuple(range(index, mesh.world, mesh.ep)) for index in range(mesh.ep)]
    if role == "exchange":
        return [tuple(range(index * mesh.ep, (index + 1) * mesh.ep)) for index in range(mesh.edp)]
    raise ValueError(f"{role!r} is no role; roles are {', '.join(ROLES)}")


def group_of(mesh: MeshPlan, role: str, rank: int) -> tuple[int, ...]:
    """The ranks of the group of this role that `rank` belongs to."""
    return next(group for group in groups_of(mesh, role) if rank in group)
