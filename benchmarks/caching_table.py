"""Each cell of `caching.py`: how much faster the solver is than the best other variant that fits, and than others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

GIB = 2**30
FULL = ("recompute", "torch checkpoint")
Row = dict[str, Any]


def cells(rows: Sequence[Row]) -> list[Row]:
    """One object per model and limit: the solver's row, the others that fit by name, and gains as fractions."""
    good = [row for row in rows if row.get("error") is None and "step_ms" in row]
    found = []
    for solver in (row for row in good if row["variant"] == "solver"):
        graph, limit = solver["graph"], solver["limit"]
        beside = [
            r for r in good if r["graph"] == graph and r["variant"] != "solver" and r.get("limit") in (None, limit)
        ]
        fitting = {row["variant"]: row["step_ms"] for row in beside if row["peak"] <= limit}
        full = [ms for variant, ms in fitting.items() if variant in FULL]
        if not fitting or not full:
            continue
        best = min(fitting, key=lambda variant: fitting[variant])
        found.append(
            {
                "graph": graph,
                "limit": limit,
                "solver": solver,
                "others": fitting,
                "best": best,
                "over_best": fitting[best] / solver["step_ms"] - 1,
                "over_full": min(full) / solver["step_ms"] - 1,
            }
        )
    return sorted(found, key=lambda cell: (cell["graph"], cell["limit"]))


def mean_gain(gains: Sequence[float]) -> float:
    """Geometric mean of ratios, less one."""
    return math.exp(sum(math.log1p(gain) for gain in gains) / len(gains)) - 1


def print_table(rows: Sequence[Row]) -> None:
    """The cells, and the means over them."""
    found = cells(rows)
    table = Table(title="step time in ms; - where the peak is beyond the limit", title_justify="left", pad_edge=False)
    names = list(dict.fromkeys(name for cell in found for name in cell["others"]))
    for title in ("model", "limit GiB", "peak GiB", "solver", *names, "over best", "over full"):
        table.add_column(title, justify="left" if title == "model" else "right")
    for cell in found:
        solver = cell["solver"]
        times = (f"{cell['others'][name]:.1f}" if name in cell["others"] else "-" for name in names)
        table.add_row(
            cell["graph"],
            f"{cell['limit'] / GIB:.2f}",
            f"{solver['peak'] / GIB:.2f}",
            f"{solver['step_ms']:.1f}",
            *times,
            f"{100 * cell['over_best']:+.1f} %",
            f"{100 * cell['over_full']:+.1f} %",
        )
    console = Console(width=200)
    console.print(table)
    if found:
        for name in ("over_best", "over_full"):
            gains = [cell[name] for cell in found]
            console.print(f"{name}: {100 * mean_gain(gains):+.1f} % on average, {100 * min(gains):+.1f} % at worst")
