"""What the command line shows of artefacts, as rich tables and lines."""

from __future__ import annotations

import difflib
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from moec.artifact import read_stages
from moec.artifact_files import FINGERPRINT, LOG, PLAN, STATE_MAP, no_artifact, read_json
from moec.compiler.errors import ArtifactError
from moec.compiler.hardware import hardware
from moec.compiler.log import PassLog, cost_columns
from moec.compiler.pass_manager import PassRecord
from moec.compiler.plan import Plan
from moec.compiler.printer import StageGraphs
from moec.passes.place_cache import PlaceCache
from moec.preset_table import scaled
from moec.rank_report import rank_report
from moec.runtime.program import PROGRAM
from moec.step import describe

_MIB = 2**20
_NAMED = 8
_TOP = "(top)"


def compile_report(log: PassLog, folder: Path, seconds: float) -> Iterator[Any]:
    """The pass log in short, then how long the command took, its peak memory, and where to read on."""
    yield from log.renderables(folded=True)
    yield from rank_report(folder, Plan.from_yaml(folder / PLAN))
    yield f"compiled in {seconds:.1f} s, peak memory {_peak_bytes() / _MIB:,.0f} MiB"
    yield from _where(folder)
    yield f"every row of the passes, and what is kept for backward: moec inspect {escape(str(folder))}"


def overview(folder: Path) -> Iterator[Any]:
    """What an artefact was compiled for and what happened on the way."""
    fingerprint, log = read_json(folder, FINGERPRINT), _read_log(folder)
    weights = read_json(folder, STATE_MAP)["weights"]
    count = sum(_numel(entry["shape"]) for entry in weights.values())
    yield f"[bold]{escape(str(folder))}[/bold]: {describe(fingerprint)}; {scaled(count)} parameters"
    yield f"stages: {', '.join(read_stages(folder))}"
    yield from log.renderables()
    yield from _near_misses(log.records)
    if log.placements:
        yield _placement_table(log)
    yield from rank_report(folder, Plan.from_yaml(folder / PLAN))
    yield from _where(folder)


def difference(before: StageGraphs, after: StageGraphs) -> Iterator[Text]:
    """The unified diff of two stages, line by line."""
    styles = {"+": "green", "-": "red", "@": "cyan"}
    for line in before.diff(after).splitlines() or ["the graphs are equal"]:
        heading = line.startswith(("--- ", "+++ "))
        yield Text(line, "bold" if heading else styles.get(line[:1], ""))


def pass_report(folder: Path, name: str) -> Iterator[Any]:
    """Everything one pass did, unit by unit; an unknown name raises ArtifactError with the known ones."""
    log = _read_log(folder)
    records = [record for record in log.records if record.name == name]
    if not records:
        names = list(dict.fromkeys(record.name for record in log.records))
        near = difflib.get_close_matches(name, names, n=1)
        raise ArtifactError(
            f"no pass {name!r} ran",
            where=str(folder),
            hint=f"did you mean {near[0]}?" if near else f"passes: {', '.join(names) or 'none'}",
        )
    for record in records:
        yield (
            f"[bold]{record.name}[/bold] on {record.unit}, {len(record.instances)} x: "
            f"nodes {record.nodes_before} -> {record.nodes_after}, {1e3 * record.seconds:.0f} ms"
        )
        columns = cost_columns([record.cost_before, record.cost_after])
        estimates = (f"{column.title} {column.text(record.cost_before, record.cost_after)}" for column in columns)
        yield f"  on one {hardware().name}: {', '.join(estimates)}"
        yield from (f"  [green]matched[/green] {escape(f'{m.what} at {m.path or _TOP}')}" for m in record.matches)
        yield from (
            f"  [yellow]nearly[/yellow] {escape(f'{m.what} at {m.path or _TOP}: {m.reason}')}"
            for m in record.near_misses
        )
        yield from (f"  + {n} x {escape(op)}" for op, n in record.added.items())
        yield from (f"  - {n} x {escape(op)}" for op, n in record.removed.items())
        if record.name == PlaceCache.name:
            yield _value_table(_read_log(folder))
        if record.warning:
            yield f"  [yellow]matched nothing[/yellow] {escape(record.warning)}"


def _value_table(log: PassLog) -> Table:
    """Every value of every template: how large it is, which way it goes, and why."""
    table = Table(title="values that backward needs, of one layer", title_justify="left", pad_edge=False)
    for title in ("unit", "module", "op", "KiB", "decision", "why"):
        table.add_column(title, justify="right" if title == "KiB" else "left", overflow="fold")
    for unit, rows in log.placements.items():
        for row in rows:
            size = f"{row.bytes / 2**10:,.1f}"
            table.add_row(unit, escape(row.path), row.op, size, row.decision, escape(row.reason))
    return table


def _read_log(folder: Path) -> PassLog:
    if not (folder / LOG).is_file():
        raise no_artifact(folder, LOG)
    return PassLog.read(folder / LOG)


def _near_misses(records: list[PassRecord]) -> Iterator[str]:
    rows = [(record.name, miss) for record in records for miss in record.near_misses]
    for name, miss in rows[:_NAMED]:
        yield f"[yellow]nearly[/yellow] {escape(f'{name}: {miss.what} at {miss.path or _TOP}: {miss.reason}')}"
    if len(rows) > _NAMED:
        yield f"... and {len(rows) - _NAMED} more near misses: moec inspect --pass NAME"


def _placement_table(log: PassLog) -> Table:
    title = f"kept for backward, and predicted times on one {hardware().name}, per layer"
    table = Table(title=title, title_justify="left", pad_edge=False)
    titles = ("kept", "MiB", "offloaded", "MiB there", "computed again", "forward ms", "backward ms")
    for title in ("unit", *titles, "reasons to keep"):
        table.add_column(title, justify="left" if title in ("unit", "reasons to keep") else "right", overflow="fold")
    for unit, rows in log.placements.items():
        kept, there, again = ([row for row in rows if row.decision == d] for d in ("keep", "offload", "recompute"))
        reasons = Counter(row.reason for row in kept)
        table.add_row(
            unit,
            str(len(kept)),
            f"{sum(row.bytes for row in kept) / _MIB:.3g}",
            str(len(there)),
            f"{sum(row.bytes for row in there) / _MIB:.3g}",
            str(len(again)),
            *(f"{1e3 * seconds:.3g}" for seconds in log.times.get(unit, (0.0, 0.0))),
            ", ".join(f"{n} x {reason}" for reason, n in reasons.most_common()),
        )
    return table


def _where(folder: Path) -> Iterator[str]:
    yield f"program: {escape(str(folder / PROGRAM))}"
    yield f"graphs:  moec inspect {escape(str(folder))} --stage fused"


def _numel(shape: list[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _peak_bytes() -> int:
    """Largest resident size of this process so far; the system counts in KiB, on macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
