"""What one rank holds and sends, from an artefact alone: no rank has to run for it.

Weights, gradients, masters and moments lie sharded, padding of buckets included. Gathered: the largest sum of buckets
that are whole at a time, with the plan's prefetch. Exchanged rows count as if every expert got the same number.
The time is that of collectives that run alone, one after the other: how much of it hides is not said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from moec.compiler.hardware import hardware
from moec.compiler.layout import BucketInstance, BucketLayout
from moec.compiler.memory_table import size_text
from moec.compiler.plan import Plan
from moec.compiler.wire import Collective
from moec.rank_files import read_buckets, read_collectives


@dataclass(frozen=True)
class RankBytes:
    """Bytes on one rank. exchanged: rows of one layer that have come from other ranks, and go back."""

    weights: int
    gradients: int
    masters: int
    moments: int
    gathered: int
    exchanged: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def rank_bytes(buckets: Mapping[str, BucketInstance], collectives: Sequence[Collective], plan: Plan) -> RankBytes:
    """What one rank of the plan's mesh holds for a step, beside activations."""
    layouts = [bucket.layout for bucket in buckets.values()]
    trained = sum(_trained(layout) for layout in layouts)
    return RankBytes(
        weights=sum(layout.nbytes for layout in layouts),
        gradients=4 * trained,
        masters=4 * sum(_trained(layout, half=True) for layout in layouts),
        moments=8 * trained,
        gathered=_gathered(buckets, collectives, plan),
        exchanged=max((2 * c.numel * c.itemsize for c in collectives if c.kind == "all_to_all"), default=0),
    )


def rank_report(folder: Path, plan: Plan) -> Iterator[Any]:
    """Tables of an artefact for several ranks; nothing for one."""
    buckets = read_buckets(folder)
    if not buckets:
        return
    collectives = read_collectives(folder)
    mesh = plan.mesh
    title = f"each of {mesh.world} ranks (ep {mesh.ep})"
    table = Table(title=title, title_justify="left", pad_edge=False, min_width=len(title))
    table.add_column("what")
    table.add_column("bytes", justify="right")
    found = rank_bytes(buckets, collectives, plan)
    for name, value in [*vars(found).items(), ("total", found.total)]:
        table.add_row(name, size_text(value))
    yield table
    yield _collective_table(collectives, plan)


def _collective_table(collectives: Sequence[Collective], plan: Plan) -> Table:
    table = Table(title="collectives of one step", title_justify="left", pad_edge=False)
    device = hardware()
    for name in ("collective", "group", "calls", "one rank's parts", "received", f"alone on {device.name}"):
        table.add_column(name, justify="left" if name in ("collective", "group") else "right")
    groups: dict[tuple[str, str], list[Collective]] = {}
    for one in collectives:
        groups.setdefault((one.kind, one.role), []).append(one)
    times = plan.accumulation
    for (kind, role), members in groups.items():
        given = times * sum(one.numel * one.itemsize for one in members)
        wire = times * sum(one.wire_bytes(plan.mesh) for one in members)
        alone = 1e3 * times * sum(one.seconds(plan.mesh, device) for one in members)
        sizes = size_text(given), size_text(round(wire)), f"{alone:,.1f} ms"
        table.add_row(kind, role, f"{times * len(members):,}", *sizes)
    return table


def _trained(layout: BucketLayout, *, half: bool = False) -> int:
    """Elements with a gradient on one rank; with `half` only those of a type below float32, which have masters."""
    return sum(weight.local_numel for weight in layout.with_gradient if not half or weight.torch_dtype.itemsize < 4)


def _gathered(buckets: Mapping[str, BucketInstance], collectives: Sequence[Collective], plan: Plan) -> int:
    sizes = [buckets[c.bucket].layout.gathered_nbytes for c in collectives if c.kind == "all_gather"]
    if plan.mesh.gather == "keep":
        return sum(sizes)
    alive = plan.mesh.prefetch + 1
    return max((sum(sizes[i : i + alive]) for i in range(len(sizes))), default=0)
