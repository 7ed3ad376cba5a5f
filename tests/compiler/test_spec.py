"""Specs: each rule is broken once, and the error shows the pass, the node, its module, its line and what is around."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from moec.compiler.errors import PassError
from moec.compiler.graph import Unit
from moec.compiler.pass_manager import Pass, PassContext, Report
from moec.compiler.spec import AROUND, RULES, check_stage

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
