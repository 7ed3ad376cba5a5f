"""One number of a compiled step beside the reference: its kind, its error, and what the error may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from moec.distance import relative_error

Kind = Literal[
    "loss",
    "part of loss",
    "gradient",
    "routing counts",
    "gradient norm",
    "parameter",
    "rounding",
    "buffer",
]

FULL: dict[Kind, float] = {
    "loss": 1e-6,
    # A divergence or a balance term, reported apart: near its minimum it is the small difference of large terms.
    "part of loss": 1e-5,
    "gradient": 1e-5,
    # Scores are counted in bins; one that rounds into the next bin is two of some hundred counts.
    "routing counts": 2e-2,
    "gradient norm": 1e-5,
    "parameter": 1e-5,
    "rounding": 0.0,
    "buffer": 1e-5,
}
BOUNDS: dict[torch.dtype, dict[Kind, float]] = {
    torch.float32: FULL,
    torch.float64: {kind: 1e-5 * bound for kind, bound in FULL.items()},
}
NOISE_RATIO = {torch.float32: 3.0, torch.bfloat16: 1.5, torch.float16: 1.5}
"""How much further than eager a compiled number may be from a more precise reference."""
HALF_FLOOR = {torch.bfloat16: 2.0**-11, torch.float16: 2.0**-14}
"""Two errors far below one rounding of the type are chance, and so is their ratio."""
SCALAR_FLOOR = 4.0
"""Times that floor for losses: one scalar a step tells little about how far rounding goes."""


Progress = Callable[[str], None]
"""Is told what is being done, as "step 2 of 3"."""


def silent(doing: str) -> None:
    """Progress that nobody sees."""


@dataclass(frozen=True)
class Comparison:
    """One tensor of the compiled step against the reference.

    step: 1 .. steps. error: relative, infinity where only one of the two is zero or absent. bound: what it may be.
    nearby: it was beyond its bound, but is within it on the same batch with the weights slightly moved.
    """

    kind: Kind
    name: str
    step: int
    error: float
    bound: float
    nearby: bool = False

    @property
    def equal(self) -> bool:
        return self.error <= self.bound


def error_of(kind: Kind, value: Tensor | None, reference: Tensor | None) -> float:
    """The share of counts that differ, and for all other kinds the relative error in norm."""
    if kind != "routing counts" or value is None or reference is None:
        return relative_error(value, reference)
    total = float(reference.sum())
    different = float((value.double() - reference.double()).abs().sum())
    return different / total if total else different


def comparison_table(comparisons: Iterable[Comparison], title: str) -> Table:
    """One row per step and kind, with the comparison that comes nearest to its bound or is furthest beyond it."""
    table = Table(title=title, title_justify="left", pad_edge=False)
    for title in ("step", "what", "count", "error", "bound", "at", ""):
        table.add_column(title, justify="left" if title in ("what", "at", "") else "right", overflow="fold")
    groups: dict[tuple[int, Kind], list[Comparison]] = {}
    for item in comparisons:
        groups.setdefault((item.step, item.kind), []).append(item)
    for (step, kind), members in groups.items():
        worst = max(members, key=lambda item: (not item.equal, item.error / item.bound if item.bound else item.error))
        verdict = "[green]equal[/green]" if all(item.equal for item in members) else "[red]differs[/red]"
        table.add_row(
            str(step), kind, str(len(members)), f"{worst.error:.1e}", f"{worst.bound:.1e}", escape(worst.name), verdict
        )
    return table
