"""Graphs as text: readable, complete, saved and read back, diffed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from moec.compiler.printer import StageGraphs, graph_text, value_text

from .units import unit_of


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        values, chosen = self.proj(x).topk(2, dim=-1, sorted=False)
        return torch.cat([values, x[index]], -1), chosen


def text() -> str:
    unit = unit_of(Small(), torch.randn(3, 4), torch.tensor([1, 0, 2]))
    return graph_text(unit.graph, {node: value.name for node, value in unit.placeholders()})


def test_a_graph_is_one_line_per_value_with_shape_and_module() -> None:
    assert text() == (
        "%proj.weight: f32[4, 4] = input\n"
        "%x: f32[3, 4] = input\n"
        "%index: i64[3] = input\n"
        "%linear: f32[3, 4] = aten.linear(%x, %proj.weight)  # proj\n"
        "%topk: (f32[3, 2], i64[3, 2]) = aten.topk(%linear, 2, -1, True, False)\n"
        "%getitem: f32[3, 2] = getitem(%topk, 0)\n"
        "%getitem_1: i64[3, 2] = getitem(%topk, 1)\n"
        "%index_1: f32[3, 4] = aten.index.Tensor(%x, [%index])\n"
        "%cat: f32[3, 6] = aten.cat([%getitem, %index_1], -1)\n"
        "return [%cat, %getitem_1]"
    )


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (torch.zeros(2, 3, dtype=torch.bfloat16), "bf16[2, 3]"),
        (torch.zeros((), dtype=torch.bool), "bool[]"),
        (torch.zeros(1, dtype=torch.uint8), "uint8[1]"),
        ((torch.zeros(1), None), "(f32[1], ?)"),
        (3, "int"),
        (2.0, "float"),
    ],
)
def test_values_are_shown_by_dtype_and_shape(value: object, shown: str) -> None:
    assert value_text(value) == shown


def test_symbolic_sizes_are_shown_by_name() -> None:
    unit = unit_of(
        Small(), torch.randn(3, 4), torch.tensor([1, 0, 2]), dynamic_shapes=({0: torch.export.Dim("n")},) * 2
    )
    size = unit.graph.find_nodes(op="placeholder")[1].meta["val"].shape[0]
    assert f"f32[{size}, 4]" in graph_text(unit.graph)


def test_stages_are_saved_and_read_back(tmp_path: Path) -> None:
    stage = StageGraphs("fused", {"layer": text(), "model": "return []"})
    paths = stage.save(tmp_path / "fused")
    assert [path.name for path in paths] == ["layer.txt", "model.txt"]
    assert StageGraphs.read("fused", tmp_path / "fused") == stage
    assert str(stage).startswith("# fused: layer\n%proj.weight")


def test_a_diff_goes_from_one_stage_to_the_other() -> None:
    one = StageGraphs("captured", {"layer": "a\nb\nc", "gone": "x"})
    two = StageGraphs("fused", {"layer": "a\nB\nc", "new": "y"})
    lines = one.diff(two).splitlines()
    assert {"-b", "+B", "-x", "+y", "--- captured/layer", "+++ fused/layer"} <= set(lines)
    assert one.diff(one) == ""
