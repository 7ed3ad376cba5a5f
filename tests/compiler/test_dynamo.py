"""Units of Dynamo graphs: export-level ops, names and paths, and everything a trace would lose held out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from moec.compiler.dynamo import dynamo_units, runnable
from moec.compiler.graph import Unit, module_path, op_histogram
from moec.compiler.pass_manager import Pass, PassContext, Report
from moec.compiler.spec import check_stage

aten = torch.ops.aten


class Checked(Pass):
    name = "dynamo"

    def run(self, unit: Unit, context: PassContext) -> Report:
        return Report()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def captured(function: Callable[..., Any], *args: Any) -> tuple[list[Unit], list[str], fx.GraphModule]:
    """Units, notes and the Dynamo graph of the one graph that a function has."""
    found: list[tuple[list[Unit], list[str], fx.GraphModule]] = []

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        notes: list[str] = []
        found.append((dynamo_units(graph, "graph", notes), notes, graph))
        return graph

    torch.compile(function, backend=backend, fullgraph=True)(*args)
    assert len(found) == 1
    for unit in found[0][0]:
        check_stage(unit, Checked())
    return found[0]


def ops(unit: Unit) -> list[str]:
    return [str(node.target) for node in unit.graph.nodes if node.op == "call_function"]


class Block(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.proj(self.norm(x))) * self.scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.mean()


def test_a_unit_has_the_ops_of_an_export_and_the_names_of_the_model() -> None:
    (unit,), notes, _ = captured(Model(), torch.randn(2, 4))
    assert notes == []
    assert ops(unit)[:5] == [
        "aten.layer_norm.default",
        "aten.linear.default",
        "aten.silu.default",
        "aten.mul.Tensor",
        "aten.add.Tensor",
    ]
    names = {(value.kind, value.name, value.requires_grad) for value in unit.signature.inputs}
    assert ("weight", "blocks.1.proj.weight", True) in names
    assert ("buffer", "blocks.0.scale", False) in names
    assert [value.name for value in unit.signature.inputs if value.kind == "input"] == ["x"]
    paths = [module_path(node) for node in unit.graph.find_nodes(op="call_function", target=aten.linear.default)]
    assert paths == ["blocks.0.proj", "blocks.1.proj"]
    assert all(
        "test_dynamo.py:" in node.meta["custom"]["line"]
        for node in unit.graph.find_nodes(op="call_function", target=aten.silu.default)
    )


def test_a_function_around_a_model_gives_the_same_names() -> None:
    model = Model()
    (unit,), _, _ = captured(lambda x: model(x) * 2, torch.randn(2, 4))
    assert "blocks.1.proj.weight" in unit.signature.names("weight")
    (linear, _) = unit.graph.find_nodes(op="call_function", target=aten.linear.default)
    assert module_path(linear) == "blocks.0.proj"


def test_symbolic_sizes_are_inputs() -> None:
    found: list[Unit] = []

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        found.extend(dynamo_units(graph, "graph", []))
        return graph

    compiled = torch.compile(Model(), backend=backend, fullgraph=True, dynamic=True)
    compiled(torch.randn(3, 4))
    compiled(torch.randn(5, 4))
    assert len(found) == 1
    x = dict((value.name, node) for node, value in found[0].placeholders())["x"]
    assert isinstance(x.meta["val"].shape[0], torch.SymInt)


def test_no_grad_becomes_detached_values() -> None:
    weight = torch.randn(4, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = (x * weight).sigmoid()
            index = gate.argmax(-1)
        return (gate * weight).sum() + index.sum()

    (unit,), _, _ = captured(function, torch.randn(3, 4))
    assert op_histogram(unit.graph)["aten.detach.default"] == 1, "the integer result needs none"
    assert not [node for node in unit.graph.nodes if "set_grad_enabled" in str(node.target)]


def test_no_grad_that_writes_outside_is_left_alone() -> None:
    class Running(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.proj = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.proj(x)
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0))
            return x - self.mean

    found: list[Unit] = []

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        found.extend(dynamo_units(graph, "graph", []))
        return graph

    torch.compile(Running(), backend=backend, fullgraph=True)(torch.randn(3, 4))
    assert len([node for node in found[0].graph.nodes if "set_grad_enabled" in str(node.target)]) == 2


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * first, 3 * second


def test_an_autograd_function_is_held_out_with_its_backward() -> None:
    def function(x: Tensor) -> Tensor:
        one, two = Doubled.apply(x.sin(), x.cos())
        return one.sum() + two.sum()

    (unit,), notes, _ = captured(function, torch.randn(3, requires_grad=True))
    assert ops(unit)[:3] == ["aten.sin.default", "aten.cos.default", "autograd_function_apply"]
    assert "moec.held.default" not in ops(unit)
    assert len(notes) == 1
    assert notes[0].startswith("graph: autograd_function_apply")
    assert "test_dynamo.py:" in notes[0]


def test_a_branch_is_held_out() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x * 2,)).exp()

    (unit,), notes, _ = captured(function, torch.randn(3))
    assert "cond" in ops(unit)
    assert len(notes) == 1


def test_what_a_checkpoint_runs_is_a_unit_of_its_own() -> None:
    block = Block()

    def function(x: Tensor) -> Tensor:
        return checkpoint(lambda y: block(y) * torch.tensor([1.0, 2.0, 3.0, 4.0]), x.sin(), use_reentrant=False).sum()

    (unit, inner), notes, _ = captured(function, torch.randn(2, 4, requires_grad=True))
    assert notes == []
    assert (unit.name, inner.name) == ("graph", "graph checkpoint 0")
    assert "tag_activation_checkpoint" in ops(unit)
    assert "aten.layer_norm.default" in ops(inner)
    (call,) = [node for node in unit.graph.nodes if str(node.target) == "tag_activation_checkpoint"]
    assert getattr(unit.module, call.args[0].target) is inner.module
    assert len(call.args) == 1 + len(inner.signature.inputs), "with the constant of the body as a further argument"


@pytest.mark.parametrize("kind", ["inside", "around", "vmap"])
def test_ops_that_are_not_what_they_say_make_no_unit(kind: str) -> None:
    def plain(x: Tensor) -> Tensor:
        return F.linear(x, x)

    def inside(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return plain(x)

    x = torch.randn(4, 4)
    match kind:
        case "inside":
            units, notes, _ = captured(inside, x)
        case "around":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                units, notes, _ = captured(plain, x)
        case _:
            units, notes, _ = captured(lambda x: torch.vmap(torch.sin)(x), x)
    assert units == []
    word = "functorch transform" if kind == "vmap" else "autocast"
    assert notes[0].startswith("graph is left as it is: it ")
    assert word in notes[0]


def test_runnable_graphs_take_their_constants_as_arguments() -> None:
    def function(x: Tensor) -> Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0, 4.0]) + torch.tensor(5.0)

    (unit,), _, graph = captured(function, torch.randn(2, 4))
    module, constants = runnable(unit, graph)
    assert [constant.tolist() for constant in constants] == [[1.0, 2.0, 3.0, 4.0], 5.0]
    assert not module.graph.find_nodes(op="get_attr")
    assert list(module.buffers()) == []
    x = torch.randn(2, 4)
    assert torch.equal(module(x, *constants)[0], function(x))
    sources = [node._dynamo_source for node in module.graph.find_nodes(op="placeholder")]
    assert (sources[0] is None, sources[1:]) == (False, [None, None])
    assert module.meta["dynamo_compile_id"] == graph.meta["dynamo_compile_id"]


def test_tracing_leaves_the_gradient_mode_alone() -> None:
    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            return x.sin()

    captured(function, torch.randn(3))
    assert torch.is_grad_enabled()
    with torch.no_grad():
        captured(lambda x: x.cos(), torch.randn(3))
        assert not torch.is_grad_enabled()
