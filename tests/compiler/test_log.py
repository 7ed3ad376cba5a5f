"""The log: everything is in the text and in the JSON lines, which read back equal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from moec.compiler.cost import Cost
from moec.compiler.errors import ArtifactError
from moec.compiler.log import PassLog, StageTime
from moec.compiler.partition import Placement
from moec.compiler.pass_manager import Change, NearMiss, PassRecord


def record(**changes: object) -> PassRecord:
    values = {
        "name": "recognize_norm",
        "stage": "recognized",
        "unit": "layer",
        "instances": ("layers.0", "layers.1"),
        "seconds": 0.25,
        "matches": (Change("norm", "rms_norm"), Change("post", "rms_norm"), Change("out", "gated_norm")),
        "near_misses": (NearMiss("odd", "norm", "the mean is over two dimensions"),),
        "nodes_before": 20,
        "nodes_after": 12,
        "added": {"moec.rms_norm": 2},
        "removed": {"aten.pow": 2},
        "cost_before": Cost(4e-3, 4e9, 2e6, launches=12),
        "cost_after": Cost(3e-3, 3e9, 1e6, launches=9),
    }
    return PassRecord(**{**values, **changes})  # type: ignore[arg-type]


FULL = PassLog(
    notes=["experts run as grouped products"],
    near_misses=[NearMiss("layers.3", "Layer", "it returns no tensor")],
    records=[
        record(),
        record(unit="model", matches=(), near_misses=(), warning="the graph has a softmax"),
        record(name="fuse_kda", unit="model", matches=(), near_misses=(), cost_after=Cost(4e-3, 4e9, 2e6, launches=12)),
    ],
    placements={"layer": [Placement("tanh", "act", "aten.tanh.default", 64, "keep", "backward uses it")]},
    lowering={"moec.kda.default": "reference"},
    stages=[StageTime("captured", 1.5, 30), StageTime("emitted", 0.5, 0)],
)


def test_lines_read_back_equal(tmp_path: Path) -> None:
    FULL.write(tmp_path / "log.jsonl")
    assert PassLog.read(tmp_path / "log.jsonl") == FULL
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert set(kinds) == {"note", "near_miss", "pass", "placement", "lowering", "stage"}


def test_an_empty_log_reads_back(tmp_path: Path) -> None:
    PassLog().write(tmp_path / "log.jsonl")
    assert PassLog.read(tmp_path / "log.jsonl") == PassLog()


@pytest.mark.parametrize("line", ["not json", '{"kind": "pass"}', '{"kind": "what"}', "3", '{"text": "x"}'])
def test_a_damaged_line_is_an_error_with_its_number(line: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    FULL.write(path)
    path.write_text(path.read_text() + line + "\n")
    number = len(path.read_text().splitlines())
    with pytest.raises(ArtifactError, match=f"log.jsonl line {number} is not a log entry"):
        PassLog.read(path)


def test_the_text_says_it_all() -> None:
    text = str(FULL)
    for part in (
        "note experts run as grouped products",
        "not a template layers.3: it returns no tensor",
        "2 x rms_norm, gated_norm",
        "20->12",
        "matched nothing recognize_norm on model: the graph has a softmax",
        "captured",
        "2.00",
    ):
        assert part in text, part


def test_estimates_are_of_all_layers() -> None:
    log = PassLog(records=[record(), record(unit="model", instances=("",)), record(name="b", cost_after=Cost(1.0))])
    assert log.estimates() == {
        "recognize_norm": (Cost(4e-3, 4e9, 2e6, launches=12) * 3, Cost(3e-3, 3e9, 1e6, launches=9) * 3),
        "b": (Cost(4e-3, 4e9, 2e6, launches=12) * 2, Cost(1.0) * 2),
    }


def test_the_table_of_estimates_shows_every_pass_that_changed_something() -> None:
    records = [record(), record(name="idle", cost_after=record().cost_before), record(name="last")]
    text = str(PassLog(records=records))
    rows = [line.strip("│").split("│") for line in text.splitlines() if "FLOP" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["(none)", "8 ms", "8 GFLOP", "4 MB", "24"],
        ["recognize_norm", "6 ms", "6 GFLOP", "2 MB", "18"],
        ["last", "6 ms", "6 GFLOP", "2 MB", "18"],
    ]
    assert "one H200" in text
    assert "network" not in text


def test_bytes_over_links_are_shown_where_there_are_any() -> None:
    text = str(PassLog(records=[record(cost_after=Cost(1.0, network_bytes=7e9, host_bytes=3e12))]))
    assert all(part in text for part in ("network", "14 GB", "host link", "6 TB"))


def test_idle_passes_are_named_once_and_have_no_row() -> None:
    assert FULL.idle_passes() == ["fuse_kda"]
    assert str(FULL).count("fuse_kda") == 1
    assert "matched nothing in any unit fuse_kda" in " ".join(str(FULL).split())


def test_matches_of_routine_are_one_row_in_short_and_all_rows_in_full() -> None:
    drops = (Change("", "3 x aten.to.dtype dropped"),)
    tidy = [record(name="normalize", unit=unit, matches=drops, routine="tidied") for unit in ("layer", "model")]
    log = PassLog(records=[tidy[0], tidy[1], record()])
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in _text(log, folded=True)]
    assert ["normalize", "2 units", "4", "tidied", "2", "40->24", "500"] in cells
    assert any(row[0] == "recognize_norm" for row in cells)
    assert "aten.to.dtype" not in " ".join(_text(log, folded=True))
    assert " ".join(_text(log, folded=False)).count("3 x aten.to.dtype dropped") == 2


def _text(log: PassLog, folded: bool) -> list[str]:
    console = Console(width=200, record=True, file=io.StringIO())
    for part in log.renderables(folded):
        console.print(part)
    return console.export_text().splitlines()


def test_matches_and_warnings_are_found_by_pass() -> None:
    assert [(unit, match.path) for unit, match in FULL.matches("recognize_norm")] == [
        ("layer", "norm"),
        ("layer", "post"),
        ("layer", "out"),
    ]
    assert FULL.matches("unknown") == []
    assert FULL.warnings() == ["recognize_norm on model: the graph has a softmax"]
