"""The predicted memory of a step as a table for people."""

from __future__ import annotations

from rich.table import Table

from moec.compiler.memory import MemoryPlan

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def memory_table(plan: MemoryPlan) -> Table:
    """What one rank holds, and where the peak is."""
    table = Table(title="predicted memory of one rank", title_justify="left", pad_edge=False)
    table.add_column("what")
    table.add_column("bytes", justify="right")
    rows = [*vars(plan.state).items(), ("gradients", plan.gradients), ("saved for backward", plan.saved)]
    rows += [("copies of buffers that a step writes", plan.copies)]
    rows += [("in host memory", plan.host), (f"peak, at {plan.where}", plan.peak)]
    for name, value in rows:
        if value:
            table.add_row(name, size_text(value))
    return table


def size_text(size: int) -> str:
    """Bytes with three digits and the unit that fits: '1.25 GiB'."""
    unit, scale = next((pair for pair in _UNITS if size >= pair[1]), _UNITS[-1])
    return f"{size / scale:.3g} {unit}" if size < 1000 * scale else f"{size / scale:,.0f} {unit}"
