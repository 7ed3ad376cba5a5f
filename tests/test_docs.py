"""The documentation is true: its excerpts and tables are what the program yields, and its code and commands run.

MOEC_UPDATE_GOLDEN=1 pytest tests/test_docs.py    rewrites excerpts and tables; their other cells stay.
"""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import types
import typing
from collections.abc import Callable
from contextlib import chdir
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import typer.main
from typer.testing import CliRunner

from moec.cli import app
from moec.compiler.dialect import DEFINITIONS
from moec.compiler.dialect.attention import _PAIRS
from moec.compiler.log import PassLog
from moec.compiler.plan import CachePlan, CacheRule, LossPlan, MeshPlan, OptimizerPlan, Plan
from moec.passes import SEMANTIC_PASSES
from tests import markdown
from tests.markdown import Block

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ARTIFACT = Path("build/k3-tiny")
COMPILE = f"moec compile k3-tiny --out {ARTIFACT} --set batch=2 --set length=64"

TESTED_TORCH = runpy.run_path(str(ROOT / "tools" / "make_venv.py"))["TESTED_TORCH"]

Rows = list[list[str | None]]

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
same_torch = pytest.mark.skipif(
    not torch.__version__.startswith(TESTED_TORCH), reason=f"graphs are shown as torch {TESTED_TORCH} traces them"
)


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the documented compilation has run."""
    folder = tmp_path_factory.mktemp("docs")
    _run(COMPILE, folder)
    return folder


@pytest.fixture(scope="session")
def ran(work: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, dict[str, Any]]:
    """What the Python blocks of each page printed, and the error that ended them."""
    folders = {}
    for page in sorted(PAGES, key=lambda page: page.stem == "extending"):  # it registers things: last
        folders[page] = tmp_path_factory.mktemp("page") / page.stem
        shutil.copytree(work, folders[page])
    code = {str(folder): ["\n".join(b.lines) for b in _blocks(page) if _runs(b)] for page, folder in folders.items()}
    command = [sys.executable, "-P", str(ROOT / "tests" / "run_blocks.py")]
    without_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, input=json.dumps(code), capture_output=True, text=True, env=without_gpu)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    return {page: results[str(folder)] for page, folder in folders.items()}


@pages
def test_python_runs(page: Path, ran: dict[Path, dict[str, Any]]) -> None:
    assert not ran[page]["error"], ran[page]["error"]


@same_torch
@pages
def test_excerpts_are_real(page: Path, work: Path, ran: dict[Path, dict[str, Any]]) -> None:
    assert not ran[page]["error"], "a block failed: what it and later ones print is not known"
    text, printed = page.read_text(), iter(ran[page]["printed"])
    last, wanted = "", {}
    for block in markdown.blocks(text):
        last = next(printed) if _runs(block) else last
        if block.shows:
            wanted[block] = markdown.selected(_source(block, work, last), block.shows[1:])
    if os.environ.get("MOEC_UPDATE_GOLDEN"):
        for block, lines in reversed(wanted.items()):
            if _untimed(block.lines) != _untimed(lines):
                text = markdown.spliced(text, block.first, block.last, lines)
        page.write_text(text)
        return
    for block, lines in wanted.items():
        shown = f"{page.name}, line {block.first} is not what {block.shows[0]!r} gives; MOEC_UPDATE_GOLDEN=1 accepts it"
        assert _untimed(block.lines) == _untimed(lines), shown


@same_torch
@pages
def test_tables_are_complete(page: Path, work: Path) -> None:
    text = page.read_text()
    for table in reversed(markdown.tables(text)):
        kept = {row[0]: row for row in table.rows}
        rows = [_filled(row, kept.get(str(row[0]), ())) for row in TABLES[table.name](work)]
        if os.environ.get("MOEC_UPDATE_GOLDEN"):
            text = markdown.spliced(text, table.first, table.last, markdown.table_lines(rows))
        else:
            assert [list(row) for row in table.rows] == rows, f"{page.name}: table {table.name}"
            assert all(all(row) for row in rows[1:]), f"{page.name}: table {table.name} has an empty cell"
    if os.environ.get("MOEC_UPDATE_GOLDEN"):
        page.write_text(text)


@pages
def test_commands_exist(page: Path) -> None:
    for block in _blocks(page):
        for line in block.lines:
            if block.language == "console" and line.startswith("$ "):
                assert not (wrong := _wrong_command(line.removeprefix("$ "))), f"{page.name}: {line}: {wrong}"


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for link in markdown.links(page.read_text()):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in markdown.anchors(target.read_text()), f"{page.name}: {link}"


@pages
def test_files_exist(page: Path, work: Path) -> None:
    for name in re.findall(
        r"`([\w.-]+(?:/[\w.-]+)+\.(?:py|md|yaml|toml|jsonl?|txt))`", markdown.prose(page.read_text())
    ):
        assert any((root / name).exists() for root in (ROOT, work, work / ARTIFACT)), f"{page.name}: {name}"


@pages
def test_nothing_is_shown_unchecked(page: Path) -> None:
    """A misspelt directive, or output without one, would hold nothing to anything."""
    known = ("shows: ", "table: ", "recorded: ", "file: ")
    unknown = [c for c in re.findall(r"<!-- (.*) -->", page.read_text()) if not c.startswith(known)]
    assert not unknown, f"{page.name}: {unknown}"
    for block in _blocks(page):
        if block.language == "yaml" and not block.shows:
            Plan.from_yaml("\n".join(block.lines))
        elif block.language == "console" and not block.shows and not _directive(page, block).startswith("recorded: "):
            assert all(line.startswith("$ ") for line in block.lines), f"{page.name}, line {block.first}"
        else:
            assert block.shows or block.language in ("python", "console", "mermaid"), f"{page.name}, line {block.first}"


SMALL = "tests.moec.small_models:make"
LIKE = {
    "train": f"train {SMALL} --data docs --steps 10 --set batch=2 --set length=32 --out OUT",
    "verify": f"verify {SMALL} --steps 1 --set batch=2 --set length=32",
}
"""Commands on a small model that print what the recorded outputs of the documentation show of a larger one."""


@pytest.mark.parametrize("name", LIKE)
def test_recorded_outputs_are_in_the_form_of_fresh_ones(name: str, tmp_path: Path) -> None:
    page = ROOT / "docs" / "commands.md"
    block = next(block for block in _blocks(page) if _directive(page, block) == f"recorded: {name}")
    assert block.lines[0].startswith(f"$ moec {name} ")
    fresh = {
        _form(line) for line in _run(f"moec {LIKE[name].replace('OUT', str(tmp_path / 'out'))}", ROOT).splitlines()
    }
    shown = {_form(line) for line in block.lines[1:]}
    assert {form for form in fresh if form} <= shown


def _form(line: str) -> str:
    """A line of output without its numbers; of a table's rows the first cell that is a word."""
    if "│" in line:
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        return next((cell for cell in cells if re.fullmatch("[a-z_ ]+", cell)), "")
    if "┃" in line or "nearest" in line:
        return " ".join(re.findall("[a-z]{3,}", line.split(":")[0]))
    return "" if set(line) & set("━─") else re.sub(r"(?<=all in ).*", "", re.sub(r"[\d.,:]+", "#", line)).strip()


def test_the_models_of_the_commands_page_are_targets(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    page = ROOT / "docs" / "commands.md"
    model, config = (block for block in _blocks(page) if _runs(block))
    assert _directive(page, model) == "file: my_model.py"
    (tmp_path / "my_model.py").write_text("\n".join(model.lines))
    with chdir(tmp_path):
        exec("\n".join(config.lines), {})
    commands = [line.removeprefix("$ ") for block in _blocks(page) for line in block.lines if line.startswith("$ ")]
    chosen = [line for line in commands if "my_model:make" in line or "tiny-mixtral" in line]
    assert len(chosen) == 5
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "text.md").write_text("some words " * 400)
    for command in chosen:
        _run(command.replace("--steps 100", "--steps 2"), tmp_path)


def _directive(page: Path, block: Block) -> str:
    """The comment above a block."""
    found = re.fullmatch("<!-- (.+) -->", page.read_text().splitlines()[block.first - 2])
    return found[1] if found else ""


def test_every_page_is_reached_from_the_readme() -> None:
    linked = {(ROOT / link).resolve() for link in markdown.links(PAGES[0].read_text()) if "//" not in link}
    assert set(PAGES[1:]) <= linked


def test_the_readme_shows_the_compilation_that_its_excerpts_come_from() -> None:
    assert f"$ {COMPILE}" in [line for block in _blocks(PAGES[0]) for line in block.lines]


# Excerpts


def _blocks(page: Path) -> list[Block]:
    return markdown.blocks(page.read_text())


def _runs(block: Block) -> bool:
    return block.language == "python" and not block.shows


def _source(block: Block, work: Path, printed: str) -> list[str]:
    kind, *words = block.shows[0].split()
    if kind == "output":
        command = block.lines[0].removeprefix("$ ")
        return [block.lines[0], *_run(command, work).splitlines()]
    if kind == "printed":
        return printed.splitlines()
    if kind == "graph":
        stage, unit = words
        return (work / ARTIFACT / "graphs" / stage / f"{unit}.txt").read_text().splitlines()
    if kind == "step":
        return _function((work / ARTIFACT / "step.py").read_text(), *words)
    assert kind == "file", block.shows
    return (ROOT / words[0]).read_text().splitlines()


def _function(text: str, name: str = "") -> list[str]:
    """The lines of one function of a program, or all."""
    parts = text.split("\n\n\n")
    return next(part for part in parts if part.startswith(f"def {name}(")).splitlines() if name else text.splitlines()


def _untimed(lines: typing.Sequence[str]) -> list[str]:
    return [re.sub(r"\d+ ms", "N ms", line.rstrip()) for line in lines]


def _run(command: str, folder: Path) -> str:
    """Run a moec command line in a folder, as in a terminal 120 characters wide."""
    program, *arguments = shlex.split(command)
    assert program == "moec", command
    with chdir(folder), mock.patch("torch.cuda.is_available", return_value=False):
        result = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"}, catch_exceptions=False)
    assert result.exit_code == 0, f"{command}: {result.output}"
    return result.output


def _wrong_command(line: str) -> str:
    """What is wrong with a command line of the documentation, '' when nothing is."""
    program, *words = shlex.split(line, comments=True)
    if program == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return "" if words[0] in targets else f"no target {words[0]}"
    if program == "moec":
        group = typer.main.get_command(app)
        command = group.commands.get(words[0])  # type: ignore[attr-defined]
        known = {option for parameter in command.params for option in parameter.opts} if command else set()
        unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]
        return f"no command {words[0]}" if command is None else ", ".join(unknown)
    if program == "python" and words[0] != "-m":
        return "" if (ROOT / words[0]).is_file() else f"no file {words[0]}"
    return "" if program in ("python", "git", "cd", "torchrun") else "an unknown program"


# Tables: the header, then rows keyed by their first cell; None is a cell that the author writes


def _plan_rows(kind: type[Any], name_in_plan: str = "") -> Callable[[Path], Rows]:
    def rows(_: Path) -> Rows:
        values, hints = Plan().to_dict(), typing.get_type_hints(kind)
        values = values if kind is Plan else values[name_in_plan]
        below = {item.name for item in fields(kind) if is_dataclass(hints[item.name])}
        return [
            ["field", "type", "default", "meaning"],
            *(
                [f"`{name}`", _type_text(hints[name]), "" if name in below else f"`{json.dumps(values[name])}`", None]
                for name in values
                if name not in below
            ),
        ]

    return rows


def _type_text(hint: Any) -> str:
    """A type as a YAML author sees it."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{option}`" for option in inner)
    if origin in (types.UnionType, typing.Union):
        return " or ".join("`null`" if option is type(None) else _type_text(option) for option in inner)
    if origin is tuple:
        count = "a list of" if inner[-1] is Ellipsis else f"{len(inner)}"
        return f"{count} {_type_text(inner[0])}s"
    return {int: "whole number", float: "number", bool: "`true`, `false`", str: "text", CacheRule: "rule"}[hint]


def _pass_rows(_: Path) -> Rows:
    return [
        ["pass", "stage", "needs", "gives", "numbers", "what it does"],
        *(
            [
                f"`{step.name}`",
                step.stage,
                ", ".join(step.requires) or "-",
                ", ".join(step.provides) or "-",
                "may round differently" if step.changes_numerics else "same bits",
                None,
            ]
            for step in SEMANTIC_PASSES
        ),
    ]


def _operator_rows(_: Path) -> Rows:
    return [
        ["op", "what it is", "dimensions", "FLOPs forward", "FLOPs backward", "again in backward", "source"],
        *(
            [
                f"`{name}`",
                one.summary,
                ", ".join(f"{value} [{', '.join(shape.split())}]" for value, shape in one.shapes.items()) or "-",
                f"`{one.flops.replace(_PAIRS, 'P')}`",
                f"`{one.backward_flops.replace(_PAIRS, 'P')}`" if one.backward is not None else "no gradient",
                "yes" if one.recompute else "never",
                one.source or "-",
            ]
            for name, one in sorted(DEFINITIONS.items())
        ),
    ]


def _log_rows(work: Path) -> Rows:
    records = [r for r in PassLog.read(work / ARTIFACT / "log.jsonl").records if r.matches and r.name != "normalize"]
    rows: Rows = [["pass", "unit", "layers", "matched", "nodes"]]
    for record in records:
        texts = [match.what for match in record.matches]
        matched = [f"{n} x {text}" if (n := texts.count(text)) > 1 else text for text in dict.fromkeys(texts)]
        rows.append(
            [
                record.name,
                record.unit,
                str(len(record.instances)),
                ", ".join(matched),
                f"{record.nodes_before} -> {record.nodes_after}",
            ]
        )
    return rows


def _compile_time_rows(_: Path) -> Rows:
    return [
        ["model", "layers", "parameters", "seconds", "of processor time", "peak memory", "lines of `step.py`"],
        *(
            [
                Path(row["target"]).parent.name or row["target"],
                str(row["layers"]),
                f"{row['parameters'] / 1e9:,.1f}B",
                f"{row['seconds']:.1f}",
                f"{row['cpu_seconds']:.1f}" if "cpu_seconds" in row else "-",
                f"{row['peak_gib']:.2f} GiB",
                f"{row['lines']:,}",
            ]
            for name in ("compile_time", "compile_time_qwen3_30b_a3b")
            for row in _results(name)["rows"]
        ),
    ]


def _compile_pass_rows(_: Path) -> Rows:
    deepest = _results("compile_time")["rows"][-1]
    passes = sorted(deepest["passes"].items(), key=lambda item: -item[1])
    return [
        ["stage or pass", "seconds"],
        *([name, f"{seconds:.2f}"] for name, seconds in deepest["stages"].items()),
        *([f"`{name}`", f"{seconds:.2f}"] for name, seconds in passes),
    ]


def _step_time_rows(_: Path) -> Rows:
    rows: Rows = [["model", "batch", "machine", "variant", "ms a step", "tokens/s", "peak memory"]]
    for name in ("step_time_k3_tiny", "step_time_k3_mini"):
        result = _results(name)
        for row in result["rows"]:
            machine = result["card"] or f"{row['threads']} of {result['cores']} cores, load {result['load']}"
            peak = f"{row['peak_gib']:.1f} GiB" if row["peak_gib"] else "-"
            speed = f"{row['tokens_per_second']:,.0f}"
            variant = f"{row['variant']}: {row['kernels']}" if "kernels" in row else row["variant"]
            rows.append([row["preset"], row["shape"], machine, variant, f"{row['step_ms']:.0f}", speed, peak])
    return rows


def _rank_compile_rows(_: Path) -> Rows:
    rows = _results("compile_time_ranks")["rows"]
    worlds = list(dict.fromkeys(row["world"] for row in rows))
    found: Rows = [["layers", *(f"{world} rank{'s' if world > 1 else ''}" for world in worlds)]]
    for layers in dict.fromkeys(row["layers"] for row in rows):
        cells = [row for row in rows if row["layers"] == layers]
        found.append(
            [
                str(layers),
                *(
                    f"{row['cpu_seconds']:.1f} s, {row['nodes']['placed']:,} nodes, {row['lines']:,} lines"
                    for row in cells
                ),
            ]
        )
    return found


def _wire_rows(_: Path) -> Rows:
    return [
        ["fsdp, ep", "collective", "calls on a rank", "formula, bytes of all ranks", "counted"],
        *(
            [f"{r['fsdp']}, {r['ep']}", r["kind"], str(r["calls"]), f"{r['formula']:,}", f"{r['counted']:,}"]
            for r in _results("wire_bytes")["rows"]
        ),
    ]


def _sharded_step_rows(_: Path) -> Rows:
    return [
        ["variant", "s a step", "processor s of all ranks", "relative to FSDP2", "in processor time", "last loss"],
        *(
            [
                r["variant"],
                f"{r['wall_s']:.2f}",
                f"{r['cpu_s']:.2f}",
                f"{r['wall_ratio']:.3f}",
                f"{r['cpu_ratio']:.3f}",
                f"{r['losses'][-1]:.5f}",
            ]
            for r in _results("sharded_step")["rows"]
        ),
    ]


def _rank_equality_rows(_: Path) -> Rows:
    found: Rows = [["model", "dtype", "mesh", "numbers", "loss", "gradient, of its bound", "parameter", "equal"]]
    for row in _results("distributed_equality")["rows"]:
        model, dtype, *mesh = row["case"].split(":")
        worst = row["worst"]
        share = worst["gradient"]["error"] / worst["gradient"]["bound"]
        errors = [f"{worst['loss']['error']:.1e}", f"{share:.2f}", f"{worst['parameter']['error']:.1e}"]
        found.append([model, dtype, ", ".join(mesh), f"{row['compared']:,}", *errors, "yes" if row["equal"] else "no"])
    return found


def _rank_restart_rows(_: Path) -> Rows:
    return [
        ["run", "steps", "loss of the first 16 steps apart", "of all 24"],
        *(
            [r["run"], str(r["steps"]), f"{r['largest_near_the_stop']:.1e}", f"{r['largest_loss_difference']:.1e}"]
            for r in _results("distributed_restart")["rows"]
        ),
    ]


def _bandwidth_rows(_: Path) -> Rows:
    rows = _results("distributed_bandwidth")["rows"]
    sizes = (2**12, 2**20, 2**24, 2**27, 2**30)
    found: Rows = [["collective", *(f"{size / 2**20:.3g} MiB" for size in sizes), "latency", "rate", "error"]]
    for row in (row for row in rows if "fit" in row):
        times = [
            min((r for r in rows if r["collective"] == row["collective"] and "bytes" in r), key=_away_from(size))
            for size in sizes
        ]
        line = row["fit"]
        found.append(
            [
                row["collective"],
                *(f"{1e6 * r['seconds']:,.0f} µs" for r in times),
                f"{1e6 * line['latency']:.0f} µs",
                f"{1e-9 * line['bytes_per_second']:.0f} GB/s",
                f"{line['error']:.0%}",
            ]
        )
    return found


def _away_from(size: int) -> Callable[[dict[str, Any]], float]:
    return lambda row: abs(math.log(row["bytes"] / size))


def _results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def _filled(row: list[str | None], old: tuple[str, ...]) -> list[str]:
    return [cell if cell is not None else "".join(old[index : index + 1]) for index, cell in enumerate(row)]


def _measured_rows(name: str, *arguments: str) -> Callable[[Path], Rows]:
    """What was measured, as the benchmark itself tables it."""

    def make(_: Path) -> Rows:
        folder = str(ROOT / "benchmarks")
        with mock.patch.object(sys, "path", [folder, *sys.path]):
            benchmark = runpy.run_path(f"{folder}/{name}.py", run_name="benchmark")
        found = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        return [list(row) for row in benchmark["table"](found, *arguments)]

    return make


TABLES: dict[str, Callable[[Path], Rows]] = {
    "plan": _plan_rows(Plan),
    "linear_cross_entropy": _measured_rows("linear_cross_entropy"),
    "experts": _measured_rows("experts"),
    "experts up": _measured_rows("experts", "up"),
    "cache": _plan_rows(CachePlan, "cache"),
    "loss": _plan_rows(LossPlan, "loss"),
    "mesh": _plan_rows(MeshPlan, "mesh"),
    "optimizer": _plan_rows(OptimizerPlan, "optimizer"),
    "passes": _pass_rows,
    "operators": _operator_rows,
    "log": _log_rows,
    "compile time": _compile_time_rows,
    "compile passes": _compile_pass_rows,
    "step time": _step_time_rows,
    "ranks compile": _rank_compile_rows,
    "wire": _wire_rows,
    "sharded step": _sharded_step_rows,
    "equality of ranks": _rank_equality_rows,
    "restarts": _rank_restart_rows,
    "bandwidth": _bandwidth_rows,
}
