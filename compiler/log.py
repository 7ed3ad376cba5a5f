"""The pass log: what every pass did where, what it left alone and why, and its cost; as tables and as JSON lines."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moec.compiler.cost import Cost
from moec.compiler.errors import ArtifactError
from moec.compiler.hardware import hardware
from moec.compiler.memory import MemoryPlan, StateBytes
from moec.compiler.memory_table import memory_table
from moec.compiler.partition import Placement
from moec.compiler.pass_manager import Change, NearMiss, PassRecord


@dataclass(frozen=True)
class StageTime:
    """Seconds and node count of one stage of the compilation."""

    stage: str
    seconds: float
    nodes: int


@dataclass
class PassLog:
    """Everything a compilation has to say.

    notes: what was swapped before tracing. near_misses: layers that could not be templates. records: the passes.
    placements: unit -> what is kept or computed again. lowering: op -> implementation chosen and why.
    memory: the prediction for one rank, once the program is known. times: unit -> predicted seconds of forward and of
    backward, of one layer and microbatch.
    """

    notes: list[str] = field(default_factory=list)
    near_misses: list[NearMiss] = field(default_factory=list)
    records: list[PassRecord] = field(default_factory=list)
    placements: dict[str, list[Placement]] = field(default_factory=dict)
    lowering: dict[str, str] = field(default_factory=dict)
    stages: list[StageTime] = field(default_factory=list)
    memory: MemoryPlan | None = None
    times: dict[str, tuple[float, float]] = field(default_factory=dict)

    def matches(self, name: str) -> list[tuple[str, Change]]:
        """(unit, match) of one pass."""
        return [(record.unit, match) for record in self.records if record.name == name for match in record.matches]

    def warnings(self) -> list[str]:
        """Passes that matched nothing where something was expected."""
        return [f"{r.name} on {r.unit}: {r.warning}" for r in self.records if r.warning]

    def idle_passes(self) -> list[str]:
        """Passes that matched nothing in any unit."""
        names = dict.fromkeys(record.name for record in self.records)
        busy = {record.name for record in self.records if record.matches}
        return [name for name in names if name not in busy]

    def estimates(self) -> dict[str, tuple[Cost, Cost]]:
        """Per pass, in order: the cost of one forward run of all layers before it and after it."""
        found: dict[str, tuple[Cost, Cost]] = {}
        for record in self.records:
            before, after = found.get(record.name, (Cost(), Cost()))
            layers = len(record.instances)
            found[record.name] = before + record.cost_before * layers, after + record.cost_after * layers
        return found

    def __str__(self) -> str:
        console = Console(width=120, record=True, file=io.StringIO())
        for part in self.renderables():
            console.print(part)
        return console.export_text().rstrip()

    def renderables(self, folded: bool = False) -> Iterator[Any]:
        """Rich tables and lines, for a terminal; with `folded` one row for each pass whose matches are routine."""
        yield from (f"[dim]note[/dim] {escape(note)}" for note in self.notes)
        yield from (f"[dim]not a template[/dim] {escape(f'{m.path}: {m.reason}')}" for m in self.near_misses)
        yield self._pass_table(folded)
        if self.records:
            yield self._cost_table()
        idle = self.idle_passes()
        if idle:
            yield f"[dim]matched nothing in any unit[/dim] {', '.join(idle)}"
        yield from (f"[yellow]matched nothing[/yellow] {escape(warning)}" for warning in self.warnings())
        if self.memory is not None:
            yield memory_table(self.memory)
        yield self._stage_table()

    def write(self, path: Path) -> None:
        """One JSON object per line, each with its "kind"."""
        lines = [
            *({"kind": "note", "text": note} for note in self.notes),
            *({"kind": "near_miss", **asdict(miss)} for miss in self.near_misses),
            *({"kind": "pass", **asdict(record)} for record in self.records),
            *({"kind": "placement", "unit": u, **asdict(p)} for u, rows in self.placements.items() for p in rows),
            *({"kind": "time", "unit": unit, "seconds": seconds} for unit, seconds in self.times.items()),
            *({"kind": "lowering", "op": op, "implementation": text} for op, text in self.lowering.items()),
            *({"kind": "stage", **asdict(stage)} for stage in self.stages),
            *([{"kind": "memory", **asdict(self.memory)}] if self.memory is not None else []),
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    @classmethod
    def read(cls, path: Path) -> PassLog:
        """What `write` wrote."""
        log = cls()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                log._add(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ArtifactError(
                    f"{path} line {number} is not a log entry",
                    why=str(error),
                    hint="another version of moec may have written it: compile it again",
                ) from error
        return log

    def _add(self, entry: dict[str, Any]) -> None:
        match entry.pop("kind"):
            case "note":
                self.notes.append(entry["text"])
            case "near_miss":
                self.near_misses.append(NearMiss(**entry))
            case "pass":
                entry["instances"] = tuple(entry["instances"])
                entry["matches"] = tuple(Change(**match) for match in entry["matches"])
                entry["near_misses"] = tuple(NearMiss(**miss) for miss in entry["near_misses"])
                entry |= {name: Cost(**entry[name]) for name in ("cost_before", "cost_after")}
                self.records.append(PassRecord(**entry))
            case "placement":
                self.placements.setdefault(entry.pop("unit"), []).append(Placement(**entry))
            case "time":
                self.times[entry["unit"]] = tuple(entry["seconds"])
            case "lowering":
                self.lowering[entry["op"]] = entry["implementation"]
            case "stage":
                self.stages.append(StageTime(**entry))
            case "memory":
                self.memory = MemoryPlan(**{**entry, "state": StateBytes(**entry["state"])})
            case kind:
                raise ValueError(f"unknown kind {kind!r}")

    def _pass_table(self, folded: bool) -> Table:
        table = Table(title="passes", title_justify="left", pad_edge=False)
        for name in ("pass", "unit", "layers", "matched", "nearly", "nodes", "ms"):
            table.add_column(name, justify="left" if name in ("pass", "unit", "matched") else "right", overflow="fold")
        for rows in self._rows(folded):
            first, texts = rows[0], [match.what for record in rows for match in record.matches]
            table.add_row(
                first.name,
                first.unit if len(rows) == 1 else f"{len(rows)} units",
                str(sum(len(record.instances) for record in rows)),
                escape(first.routine if folded and first.routine else _summary(texts)),
                str(sum(len(record.near_misses) for record in rows) or ""),
                f"{sum(record.nodes_before for record in rows)}->{sum(record.nodes_after for record in rows)}",
                f"{1e3 * sum(record.seconds for record in rows):.0f}",
            )
        return table

    def _rows(self, folded: bool) -> Iterator[list[PassRecord]]:
        """The records that say something; with `folded` all units of a pass of routine together."""
        said = [record for record in self.records if record.matches or record.near_misses or record.warning]
        together: dict[str, list[PassRecord]] = {}
        for number, record in enumerate(said):
            key = record.name if folded and record.routine else f"{number}"
            together.setdefault(key, []).append(record)
        yield from together.values()

    def _cost_table(self) -> Table:
        estimates = self.estimates()
        shown = cost_columns([cost for pair in estimates.values() for cost in pair])
        title = f"estimates for one {hardware().name}: one forward run of all layers"
        table = Table(title=title, title_justify="left", pad_edge=False)
        table.add_column("after pass")
        for column in shown:
            table.add_column(column.title, justify="right")
        states = [("(none)", before) for before, _ in list(estimates.values())[:1]]
        states += [(name, after) for name, (before, after) in estimates.items() if before != after]
        for name, cost in states:
            table.add_row(name, *(column.text(cost, cost) for column in shown))
        return table

    def _stage_table(self) -> Table:
        table = Table(title="stages", title_justify="left", pad_edge=False)
        for name in ("stage", "nodes", "seconds"):
            table.add_column(name, justify="left" if name == "stage" else "right")
        for stage in self.stages:
            table.add_row(stage.stage, str(stage.nodes or ""), f"{stage.seconds:.2f}")
        table.add_row("total", "", f"{sum(stage.seconds for stage in self.stages):.2f}")
        return table


@dataclass(frozen=True)
class CostColumn:
    """A field of `Cost` as people read it."""

    title: str
    field: str
    text_of: Callable[[float], str]

    def text(self, before: Cost, after: Cost) -> str:
        """'12 ms -> 9 ms', or the one value where nothing changed."""
        one, two = (self.text_of(getattr(cost, self.field)) for cost in (before, after))
        return one if one == two else f"{one} -> {two}"


def cost_columns(costs: Sequence[Cost]) -> list[CostColumn]:
    """What to show of some costs: bytes over a link only where there are any."""
    links = [column for column in _LINKS if any(getattr(cost, column.field) for cost in costs)]
    return [*_COSTS, *links]


def _in(unit: str) -> Callable[[float], str]:
    """Three digits with the prefix that fits: 0.0102 -> '10.2 ms'."""

    def text(value: float) -> str:
        prefix, scale = next((pair for pair in _PREFIXES if abs(value) >= pair[1]), ("", 1.0))
        return f"{value / scale:.3g} {prefix}{unit}"

    return text


_PREFIXES = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0), ("m", 1e-3), ("u", 1e-6))
_COSTS = (
    CostColumn("time", "seconds", _in("s")),
    CostColumn("arithmetic", "flops", _in("FLOP")),
    CostColumn("HBM", "hbm_bytes", _in("B")),
    CostColumn("launches", "launches", lambda count: f"{count:,}"),
)
_LINKS = (
    CostColumn("host link", "host_bytes", _in("B")),
    CostColumn("network", "network_bytes", _in("B")),
)


def _summary(items: Sequence[str]) -> str:
    counts: dict[str, int] = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return ", ".join(f"{n} x {item}" if n > 1 else item for item, n in counts.items())
