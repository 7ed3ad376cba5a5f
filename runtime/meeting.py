"""What happens when ranks of one process meet in a collective: their calls are compared, and data is moved.

Semantics are those of `torch.ops._c10d_functional`. Reductions run in rank order in the dtype of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moec.compiler.collectives import DTYPES, ROLES, group_of, groups_of
from moec.compiler.plan import MeshPlan
from moec.runtime.collective import Call

REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}


@dataclass(frozen=True)
class Mismatch:
    """Two ranks whose calls do not fit together, and why."""

    ranks: tuple[int, int]
    why: str


def flaw(mesh: MeshPlan, rank: int, call: Call, value: Tensor) -> str:
    """Why a call is wrong whatever the other ranks do; '' when it is not."""
    if call.role not in ROLES:
        return f"{call.role!r} is no role; roles are {', '.join(ROLES)}"
    size = len(group_of(mesh, call.role, rank))
    if call.group_size and call.group_size != size:
        return f"the call says {call.group_size} ranks, a group of {call.role} has {size}"
    if not value.is_contiguous():
        return "the input is strided; a process group takes contiguous tensors only"
    if call.dtype not in DTYPES:
        return f"gloo moves no {call.dtype}; move it as bytes"
    if call.reduction and call.reduction not in REDUCTIONS:
        return f"there is no reduction {call.reduction!r}; there are {', '.join(REDUCTIONS)}"
    if call.op == "broadcast" and not 0 <= call.source < size:
        return f"source {call.source} is outside the group of {size}"
    if call.op in ("all_reduce", "broadcast"):
        return ""
    if not call.shape:
        return "the input has no dimension to split or to join"
    rows = call.shape[0]
    if call.op == "reduce_scatter_tensor" and rows % size:
        return f"{rows} rows cannot be scattered over {size} ranks"
    if call.op == "all_to_all_single":
        if len(call.send) != size or len(call.receive) != size:
            return f"there are {len(call.send)} and {len(call.receive)} split sizes for {size} ranks"
        if sum(call.send) != rows or min(call.send + call.receive) < 0:
            return f"the splits {list(call.send)} do not add up to the {rows} rows of the input"
    return ""


def mismatch(mesh: MeshPlan, calls: Sequence[Call]) -> Mismatch | None:
    """The first two ranks whose calls do not fit together; calls: one per rank of the mesh."""
    for rank, call in enumerate(calls):
        for name in ("op", "role"):
            if getattr(call, name) != getattr(calls[0], name):
                return Mismatch((0, rank), f"the {name}s differ")
    for group in groups_of(mesh, calls[0].role):
        first = calls[group[0]]
        rows_may_differ = first.op == "all_to_all_single"
        for rank in group[1:]:
            call = calls[rank]
            for name in ("dtype", "reduction", "source"):
                if getattr(call, name) != getattr(first, name):
                    return Mismatch((group[0], rank), f"the {name}s differ")
            if call.shape[rows_may_differ:] != first.shape[rows_may_differ:]:
                return Mismatch((group[0], rank), "the shapes differ")
        if rows_may_differ:
            found = _split_mismatch(group, calls)
            if found is not None:
                return found
    return None


def move(values: Sequence[Tensor], calls: Sequence[Call]) -> list[Tensor]:
    """Results of one group's collective in the order of its ranks, each in memory of its own."""
    call, count = calls[0], len(values)
    match call.op:
        case "all_gather_into_tensor":
            return [torch.cat(list(values)) for _ in values]
        case "broadcast":
            return [values[call.source].clone() for _ in values]
        case "all_reduce":
            return [_reduced(values, call.reduction) for _ in values]
        case "reduce_scatter_tensor":
            pieces = [value.chunk(count) if len(value) else (value,) * count for value in values]
            return [_reduced([piece[index] for piece in pieces], call.reduction) for index in range(count)]
    parts = [value.split(list(sent.send)) for value, sent in zip(values, calls, strict=True)]
    return [torch.cat([part[index] for part in parts]) for index in range(count)]


def _reduced(values: Sequence[Tensor], reduction: str) -> Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total = REDUCTIONS[reduction](total, value)
    if reduction != "avg":
        return total
    return total / len(values) if total.is_floating_point() else total // len(values)


def _split_mismatch(group: Sequence[int], calls: Sequence[Call]) -> Mismatch | None:
    for i, sender in enumerate(group):
        for j, receiver in enumerate(group):
            sent, expected = calls[sender].send[j], calls[receiver].receive[i]
            if sent != expected:
                why = f"rank {sender} sends {sent} rows to rank {receiver}, which expects {expected}"
                return Mismatch((sender, receiver), why)
    return None
