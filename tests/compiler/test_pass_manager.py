"""The pipeline: contracts are checked before anything runs, and every run is recorded."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn

from moec.compiler.errors import PassError
from moec.compiler.graph import Program, Unit
from moec.compiler.pass_manager import Change, NearMiss, Pass, PassContext, Pipeline, Report

from .units import unit_of

aten = torch.ops.aten


class Nothing(Pass):
    name = "nothing"

    def run(self, unit: Unit, context: PassContext) -> Report:
        return Report()


class Relu(Pass):
    """relu -> silu, except in module `keep`; leaves a fact for later passes."""

    name = "relu"
    provides = ("activations",)

    def run(self, unit: Unit, context: PassContext) -> Report:
        report = Report()
        for node in unit.graph.find_nodes(op="call_function", target=aten.relu.default):
            if node.meta["custom"]["path"] == "keep":
                report.near_miss(node, "relu", "it is kept")
                continue
            node.target = aten.silu.default
            report.match(node, "relu to silu")
        context.facts[f"relus in {unit.name}"] = len(report.matches)
        return report

    def expected(self, unit: Unit) -> str:
        return "the unit has a tanh" if unit.graph.find_nodes(op="call_function", target=aten.tanh.default) else ""


def unit(act: nn.Module, name: str = "unit") -> Unit:
    return unit_of(nn.Sequential(nn.Linear(4, 4), act), torch.randn(2, 4), name=name)


def made(**contract: object) -> Pass:
    return type("Made", (Nothing,), {"name": "made", **contract})()  # type: ignore[no-any-return]


def test_a_pass_without_what_it_requires_is_refused() -> None:
    with pytest.raises(PassError) as caught:
        Pipeline([made(requires=("norms",))]).validate()
    assert "pass made requires 'norms', which no earlier pass provides" in str(caught.value)
    assert caught.value.why == "no pass provides it"
    Pipeline([made(requires=("norms",))]).validate(given=["norms"])


def test_a_requirement_that_comes_too_late_names_the_other_pass() -> None:
    late = [made(requires=("activations",)), Relu()]
    with pytest.raises(PassError) as caught:
        Pipeline(late).validate()
    assert caught.value.why == "relu provides it, but comes later"
    Pipeline(late[::-1]).validate()


def test_conflicts_and_repetition_are_refused() -> None:
    with pytest.raises(PassError) as caught:
        Pipeline([Relu(), made(conflicts=("activations",))]).validate()
    assert caught.value.why == "relu already provided it"
    with pytest.raises(PassError, match="pass nothing is listed twice"):
        Pipeline([Nothing(), Nothing()]).validate()


def test_records_tell_what_each_pass_did_to_each_unit() -> None:
    program = Program({"one": unit(nn.ReLU(), "one"), "two": unit(nn.Tanh(), "two")})
    program.units["one"].instances = ("layers.0", "layers.1")
    context = PassContext()
    first, second = Pipeline([Relu()]).run(program, context)
    assert (first.name, first.unit, first.instances) == ("relu", "one", ("layers.0", "layers.1"))
    assert first.matches == (Change("1", "relu to silu"),)
    assert (first.added, first.removed) == ({"aten.silu.default": 1}, {"aten.relu.default": 1})
    assert first.nodes_before == first.nodes_after
    assert first.cost_before.flops == first.cost_after.flops > 0
    assert first.warning == ""
    assert (second.matches, second.warning) == ((), "the unit has a tanh")
    assert context.facts == {"relus in one": 1, "relus in two": 0}
    assert all(record.seconds >= 0 for record in (first, second))


def test_near_misses_carry_path_and_reason() -> None:
    found = unit(nn.ReLU())
    for node in found.graph.nodes:
        node.meta["custom"]["path"] = "keep"
    (record,) = Pipeline([Relu()]).run(Program({"unit": found}), PassContext())
    assert record.near_misses == (NearMiss("keep", "relu", "it is kept"),)


def test_each_pass_leaves_a_sound_graph_and_a_module_that_runs_it() -> None:
    found = unit(nn.ReLU())
    Pipeline([Relu()]).run(Program({"unit": found}), PassContext())
    weight, bias, x = torch.eye(4), torch.zeros(4), torch.tensor([[1.0, -1.0, 2.0, -2.0]])
    (result,) = found.module(weight, bias, x)
    assert torch.equal(result, nn.functional.silu(x))


def test_dead_nodes_go_after_each_pass() -> None:
    class Detour(Nothing):
        def run(self, unit: Unit, context: PassContext) -> Report:
            (relu,) = unit.graph.find_nodes(op="call_function", target=aten.relu.default)
            relu.replace_all_uses_with(relu.args[0])
            return Report()

    found = unit(nn.ReLU())
    (record,) = Pipeline([Detour()]).run(Program({"unit": found}), PassContext())
    assert record.removed == {"aten.relu.default": 1}
    assert record.nodes_after == record.nodes_before - 1


def test_a_broken_graph_is_an_error_at_the_pass() -> None:
    class Break(Nothing):
        order: ClassVar[list[str]] = []

        def run(self, unit: Unit, context: PassContext) -> Report:
            (relu,) = unit.graph.find_nodes(op="call_function", target=aten.relu.default)
            relu.args = (unit.graph.output_node(),)
            return Report()

    with pytest.raises(RuntimeError, match="used before it has been defined"):
        Pipeline([Break()]).run(Program({"unit": unit(nn.ReLU())}), PassContext())


def test_the_hook_sees_every_pass_on_every_unit_in_order() -> None:
    seen: list[tuple[str, str]] = []
    pipeline = Pipeline([Relu(), Nothing()], after_pass=lambda step, unit: seen.append((step.name, unit.name)))
    pipeline.run(Program({"a": unit(nn.ReLU(), "a"), "b": unit(nn.ReLU(), "b")}), PassContext())
    assert seen == [("relu", "a"), ("relu", "b"), ("nothing", "a"), ("nothing", "b")]
