"""Specs: each rule is broken once, and the error shows the pass, the node, its module, its line and what is around."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

from moec.compiler import dialect
from moec.compiler.differentiate import Joint, differentiate
from moec.compiler.errors import PassError
from moec.compiler.graph import Signature, Unit
from moec.compiler.partition import RECOMPUTE, every, partition
from moec.compiler.pass_manager import Pass, PassContext, Report
from moec.compiler.spec import AROUND, RULES, check_joint, check_placed, check_stage

from .units import unit_of

aten = torch.ops.aten


class Step(Pass):
    name = "step"

    def run(self, unit: Unit, context: PassContext) -> Report:
        return Report()


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Sequential(*[nn.Tanh() for _ in range(20)])
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.steps(x))


def deep() -> Unit:
    return unit_of(Deep(), torch.randn(2, 4))


def middle(unit: Unit) -> fx.Node:
    return unit.graph.find_nodes(op="call_function", target=aten.tanh.default)[10]


def unregistered(unit: Unit) -> None:
    middle(unit).target = torch.tanh


def undescribed(unit: Unit) -> None:
    del middle(unit).meta["val"]


def too_many_results(unit: Unit) -> None:
    unit.graph.output_node().args = ((middle(unit), middle(unit)),)


def added_input(unit: Unit) -> None:
    with unit.graph.inserting_after(unit.graph.find_nodes(op="placeholder")[-1]):
        unit.graph.placeholder("extra")


BROKEN: list[tuple[Callable[[Unit], None], str]] = [
    (unregistered, "only registered ops"),
    (undescribed, "every value is described"),
    (too_many_results, "outputs match the signature"),
]


def test_a_captured_unit_holds_its_spec() -> None:
    check_stage(deep(), Step())


def test_sizes_may_be_computed_with() -> None:
    class Pool(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(x.shape[0] * 2, -1) * (x.shape[0] // 2 + 1)

    unit = unit_of(Pool(), torch.randn(8, 4), dynamic_shapes=({0: torch.export.Dim("n", min=4, max=64)},))
    check_stage(unit, Step())


@pytest.mark.parametrize(("breaking", "rule"), BROKEN)
def test_each_rule_is_broken_by_name(breaking: Callable[[Unit], None], rule: str) -> None:
    unit = deep()
    breaking(unit)
    with pytest.raises(PassError) as caught:
        check_stage(unit, Step())
    assert f"after pass step the recognized spec does not hold: {rule}" in str(caught.value)


def test_every_rule_has_a_test_that_breaks_it() -> None:
    assert {rule.name for rule in RULES} == {name for _, name in BROKEN}


def test_an_input_beyond_the_signature_is_an_error() -> None:
    unit = deep()
    added_input(unit)
    with pytest.raises(PassError, match="takes 4 values, its signature says 3") as caught:
        check_stage(unit, Step())
    assert "must change unit.signature too" in caught.value.hint


def test_the_error_shows_where_and_what_is_around() -> None:
    unit = deep()
    unregistered(unit)
    node = middle_after(unit)
    with pytest.raises(PassError) as caught:
        check_stage(unit, Step())
    error = caught.value
    assert f"unit unit, node %{node.name}, module steps.10" in error.where
    assert "activation.py:" in error.where, "the source line, here torch's own Tanh"
    lines = error.why.splitlines()[1:]
    assert len(lines) == AROUND + 1
    assert any(f"%{node.name}:" in line for line in lines)
    assert "plan.disable" in error.hint


def middle_after(unit: Unit) -> fx.Node:
    (node,) = [node for node in unit.graph.nodes if node.target is torch.tanh]
    return node


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = dialect.route(
            self.gate(x), None, top_k=2, score="sigmoid", softmax_after_topk=False, renormalize=True, scale=1.0
        )
        return torch.sin(weights) * (experts + 1)


def joint() -> Joint:
    return differentiate(unit_of(Routed(), torch.randn(3, 4, requires_grad=True)))


def test_joint_and_placed_graphs_hold_their_specs() -> None:
    found = joint()
    check_joint(found)
    check_placed(partition(found))
    check_placed(partition(joint(), every(RECOMPUTE)))


def test_a_gradient_that_nobody_wants_is_an_error() -> None:
    found = joint()
    signature = found.unit.signature
    found.unit.signature = Signature(
        tuple(replace(v, requires_grad=False) for v in signature.inputs), signature.outputs
    )
    with pytest.raises(PassError, match=r"has gradients of gate.bias, gate.weight, x, which wants none"):
        check_joint(found)


def test_a_write_in_a_joint_graph_is_an_error() -> None:
    found = joint()
    (sine,) = found.graph.find_nodes(op="call_function", target=aten.sin.default)
    sine.target = aten.sin_.default
    with pytest.raises(PassError, match=r"nothing is written in place") as caught:
        check_joint(found)
    assert "aten.sin_.default writes its argument self in place" in caught.value.why


def test_a_saved_value_that_nobody_reads_is_an_error() -> None:
    parts = partition(joint())
    for node in parts.backward.find_nodes(op="placeholder"):
        if node.meta["role"] == ("saved", 0):
            node.meta["role"] = ("saved", 1)
    with pytest.raises(PassError, match=f"saves {parts.saved[0].name}, which its backward never reads"):
        check_placed(parts)


def test_a_routing_decision_taken_twice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moec.compiler.partition.may_recompute", lambda node: (True, ""))
    parts = partition(joint(), every(RECOMPUTE))
    with pytest.raises(PassError, match="what must run once runs once") as caught:
        check_placed(parts)
    assert "route is a decision that must be taken once" in caught.value.why
