"""What ranks really send in lock step, beside what `compiler/wire.py` says that they send.

    for line in traffic(step.simulate_ranks(), batch): print(line.kind, line.formula, line.counted)

1. Every simulated rank runs forward and backward; its collectives are recorded as they run, and so are the choices of
   its routers.
2. The formula is that of the artefact's list of collectives. Where a list can only say "if every expert gets the same
   number of rows", the routers' choices say how many rows belong to an expert of another rank.
3. Both are summed over all ranks. They are equal to the byte, or one of them is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moec.compiler._torch_compat import OpOverload, TorchDispatchMode
from moec.compiler.collectives import group_of
from moec.compiler.layout import rows_per_rank
from moec.compiler.plan import MeshPlan
from moec.compiler.wire import Collective
from moec.rank_files import read_collectives
from moec.runtime.collective import Call, record_collectives
from moec.simulated import SimulatedRanks, split_rows

CONTROL = "control"


@dataclass(frozen=True)
class Traffic:
    """One kind of collective in a step. calls: on each rank. formula, counted: bytes that all ranks together send."""

    kind: str
    role: str
    calls: int
    formula: int
    counted: int


def traffic(simulated: SimulatedRanks, batch: Mapping[str, Tensor]) -> list[Traffic]:
    """Bytes on the wire in forward and backward of a batch of all ranks; weights stay as they are.

    The small collectives of the runtime on the role "control" (valid tokens, norm, losses) are left out.
    """
    plan = simulated.plan
    rows = split_rows(batch, plan)

    def run(rank: int) -> _Record:
        simulated.steps[rank].loss(rows[rank])  # the ranks have met: what they compare before is no part of a step
        record = _Record()
        with _Routes(record), record_collectives() as record.calls:
            simulated.steps[rank].gradients(rows[rank])
        record.calls = [call for call in record.calls if call.role != CONTROL]
        return record

    records = simulated.run(run)
    listed = read_collectives(simulated.origin.folder) * plan.accumulation
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for place, (one, formula) in enumerate(_formulas(listed, records, plan.mesh)):
        counted = sum(_sent(record.calls[place], plan.mesh, rank) for rank, record in enumerate(records))
        found.setdefault((one.kind, one.role), []).append((formula, counted))
    return [
        Traffic(kind, role, len(pairs), sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs))
        for (kind, role), pairs in found.items()
    ]


@dataclass
class _Record:
    """What one rank did. calls: its collectives. routed: of each call of a router, its place among the collectives
    (how many were before it), its choices int64 [N, k], and its number of experts."""

    calls: list[Call] = field(default_factory=list)
    routed: list[tuple[int, Tensor, int]] = field(default_factory=list)


class _Routes(TorchDispatchMode):
    def __init__(self, record: _Record) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.moec.route.default:
            place = sum(call.role != CONTROL for call in self._record.calls)
            self._record.routed.append((place, result[1].clone(), args[0].shape[-1]))
        return result


def _formulas(
    listed: Sequence[Collective], records: Sequence[_Record], mesh: MeshPlan
) -> Iterator[tuple[Collective, int]]:
    """Bytes that all ranks send in each collective of the list: whole numbers, up to the rounding of a division."""
    moved: dict[str, float] = {}
    for place, one in enumerate(listed):
        if one.kind == "all_to_all" and one.dtype == "int64":
            # Its counts are the first that a layer exchanges, right behind its router.
            moved[one.bucket] = _moved_share(records, place, mesh)
        if one.kind == "all_to_all" and one.dtype != "int64" and not mesh.capacity:
            yield one, round(mesh.world * one.numel * one.itemsize * moved[one.bucket])
        else:
            yield one, round(mesh.world * one.wire_bytes(mesh))


def _moved_share(records: Sequence[_Record], place: int, mesh: MeshPlan) -> float:
    """The share of all rows of the last router before a collective whose expert lies on another rank."""
    moved = total = 0
    for rank, record in enumerate(records):
        _, chosen, experts = next(one for one in reversed(record.routed) if one[0] <= place)
        moved += int((chosen // rows_per_rank(experts, mesh.ep) != rank % mesh.ep).sum())
        total += chosen.numel()
    return moved / total


def _sent(call: Call, mesh: MeshPlan, rank: int) -> int:
    group = group_of(mesh, call.role, rank)
    return call.sent_bytes(len(group), group.index(rank))
