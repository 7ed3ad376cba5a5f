"""One emitted function: names, comments, inlining, and variables that go as soon as they may."""

from __future__ import annotations

import ast
import keyword
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor, fx, nn

from moec.codegen.function import WIDTH, FunctionWriter, fold, identifier, literal
from moec.compiler.graph import Unit

from ..compiler.units import unit_of


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4, bias=False)
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.proj(x).transpose(0, 1))
        return hidden.exp() + hidden.reshape(4, -1)


def writer_for(unit: Unit, **options: Any) -> FunctionWriter:
    names = {node: value.name.replace(".", "_") for node, value in unit.placeholders()}
    given = {node: f'w["{v.name}"]' if v.kind == "weight" else names[node] for node, v in unit.placeholders()}
    return FunctionWriter(unit.graph, given=given, owned=set(), taken={"w"}, attributes=unit.module, **options)


def lines_of(module: nn.Module, *args: Tensor, **options: Any) -> tuple[list[str], str]:
    """The statements, and the text of the first result."""
    unit = unit_of(module, *args)
    writer = writer_for(unit, **options)
    results = list(unit.graph.output_node().args[0])  # type: ignore[arg-type]
    lines = writer.lines(results)
    return lines, writer.text(results[0])


def run(module: nn.Module, *args: Tensor) -> Any:
    lines, result = lines_of(module, *args)
    unit = unit_of(module, *args)
    scope: dict[str, Any] = {
        "torch": torch,
        "aten": torch.ops.aten,
        "moec": torch.ops.moec,
        "DEVICE": torch.device("cpu"),
    }
    scope["w"] = dict(module.named_parameters())
    names = [value.name for value in unit.signature.inputs if value.kind == "input"]
    scope |= dict(zip(names, args, strict=True))
    exec("\n".join(lines), scope)
    return eval(result, scope)


def test_statements_are_named_commented_inlined_and_freed() -> None:
    lines, result = lines_of(Small(), torch.randn(3, 4))
    assert lines == [
        "# proj",
        'proj = aten.linear.default(x, w["proj.weight"])',
        "# act",
        "act = torch.tanh(proj.transpose(0, 1))",
        "del proj",
        "# the layer itself",
        "exp = torch.exp(act)",
        "add = exp + act.reshape([4, -1])",
        "del act, exp",
    ]
    assert result == "add"


def test_the_statements_compute_the_module() -> None:
    module, x = Small(), torch.randn(3, 4)
    assert torch.equal(run(module, x), module(x))


def test_a_view_used_twice_is_a_variable() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.t()
            return y * y.sum()

    lines, _ = lines_of(Twice(), torch.randn(3, 4))
    assert lines[1] == "t = x.t()"


def test_results_and_what_is_not_owned_are_never_deleted() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x.exp()
            return y, y.sum()

    lines, _ = lines_of(Pair(), torch.randn(3))
    assert not [line for line in lines if line.startswith("del")]


def test_a_result_that_is_a_view_keeps_what_it_views() -> None:
    class View(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x.exp()
            return y.t(), y.sum()

    lines, result = lines_of(View(), torch.randn(3, 3))
    assert not [line for line in lines if line.startswith("del")]
    assert result == "exp.t()"


def test_several_results_are_taken_apart_and_unused_ones_dropped() -> None:
    class Top(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.topk(2).indices + x.sort().indices[..., :2]

    lines, _ = lines_of(Top(), torch.randn(3, 4))
    assert lines[1:4] == [
        "_, indices = aten.topk.default(x, 2)",
        "del _",
        "_, indices_2 = aten.sort.default(x)",
    ]
    assert torch.equal(run(Top(), x := torch.randn(3, 4)), Top()(x))


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1.0, float("inf"), float("-inf"), -0.5]),
        torch.tensor(float("nan")),
        torch.tensor([True, False]),
        torch.tensor([[1, -2], [3, 4]]),
        torch.tensor([0.1, 1e-30], dtype=torch.float64),
        torch.tensor([1.5, 3e38], dtype=torch.bfloat16),
    ],
)
def test_small_constants_are_written_out_exactly(value: Tensor) -> None:
    graph = fx.Graph()
    node = graph.create_node("get_attr", "constant")
    module = nn.Module()
    module.constant = value
    text = FunctionWriter(graph, {}, set(), set(), attributes=module)._constant(node)
    found = eval(text, {"torch": torch, "DEVICE": torch.device("cpu")})
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert torch.equal(found.nan_to_num(7.0), value.nan_to_num(7.0))


def test_large_and_empty_constants_are_kept_aside_under_names_of_their_own() -> None:
    constants: dict[str, Tensor] = {}
    values = [torch.arange(17.0), torch.zeros(0, 3), torch.arange(17.0)]
    texts = []
    for value in values:
        graph, module = fx.Graph(), nn.Module()
        module.table = value
        writer = FunctionWriter(graph, {}, set(), set(), attributes=module, constants=constants)
        texts.append(writer._constant(graph.create_node("get_attr", "table")))
    assert texts == ['CONSTANTS["table"]', 'CONSTANTS["table_2"]', 'CONSTANTS["table_3"]']
    assert [constants[name] is value for name, value in zip(constants, values, strict=True)] == [True] * 3


@pytest.mark.parametrize(
    "value",
    [
        1,
        -1.5,
        1e-5,
        True,
        None,
        [1, [2.0, None]],
        "silu",
        torch.float32,
        torch.contiguous_format,
        float("inf"),
        -float("inf"),
    ],
)
def test_constants_are_python_text(value: Any) -> None:
    assert eval(literal(value), {"torch": torch}) == value


def test_devices_are_the_programs_own() -> None:
    assert literal([torch.device("cpu"), float("nan")]) == '[DEVICE, float("nan")]'


@given(st.text(max_size=12))
def test_identifiers_are_valid_whatever_the_path(text: str) -> None:
    name = identifier(text)
    assert name.isidentifier()
    assert not keyword.iskeyword(name)
    assert identifier(name) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [("layers.0.q_proj", "layers_0_q_proj"), ("0", "v_0"), ("class", "class_"), ("sum", "sum_"), ("A_log", "a_log")],
)
def test_identifiers_are_readable(text: str, name: str) -> None:
    assert identifier(text) == name


@given(st.lists(st.text("abc_xyz", min_size=1, max_size=30), min_size=1, max_size=30), st.booleans())
def test_folding_keeps_the_meaning_and_the_width(names: list[str], unpacked: bool) -> None:
    names = [f"v_{name}" for name in names]
    call = f'f({", ".join(names)}, option=[1, 2], text="a, b")'
    text = f"{', '.join(names)} = {call}" if unpacked else f"result = {call}"
    folded = fold(text)
    assert ast.dump(ast.parse("\n".join(folded))) == ast.dump(ast.parse(text))
    assert all(len(line) <= WIDTH for line in folded)


def test_short_statements_stay_as_they_are() -> None:
    assert fold("a = b + c") == ["a = b + c"]
