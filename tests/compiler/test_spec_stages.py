"""The joint, placed and lowered specs: right graphs pass, planted faults are named with their node."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, fx, nn

from moec.compiler import dialect
from moec.compiler.differentiate import differentiate
from moec.compiler.errors import PassError
from moec.compiler.graph import OUTER
from moec.compiler.lower import lower
from moec.compiler.partition import RECOMPUTE, every, partition
from moec.compiler.spec import LOWERED_RULES, check_joint, check_lowered, check_placed

from .units import unit_of

aten = torch.ops.aten


class Routed(nn.Module):
    """A routing decision whose weights the backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights, _ = dialect.route(
            self.gate(x),
            None,
            top_k=2,
            score="softmax",
            softmax_after_topk=False,
            renormalize=True,
            scale=1.0,
        )
        return weights.tanh()


def test_right_graphs_hold() -> None:
    joint = differentiate(unit_of(Routed(), torch.randn(5, 4)))
    check_joint(joint)
    check_placed(partition(joint))
    check_placed(partition(joint, every(RECOMPUTE)))


def test_an_in_place_write_breaks_the_joint_spec() -> None:
    joint = differentiate(unit_of(Routed(), torch.randn(5, 4)))
    tanh = next(iter(joint.graph.find_nodes(op="call_function", target=aten.tanh.default)))
    tanh.target = aten.tanh_.default
    with pytest.raises(PassError, match=rf"(?s)joint spec.*written in place.*%{tanh.name}.*tanh_"):
        check_joint(joint)


def test_a_gradient_nobody_asked_for_breaks_the_joint_spec() -> None:
    joint = differentiate(unit_of(Routed(), torch.randn(5, 4)))
    x = [value.name for value in joint.unit.signature.inputs].index("x")
    joint.grads[x] = joint.results[0]
    with pytest.raises(PassError, match="gradients of x"):
        check_joint(joint)


def test_a_saved_value_that_nothing_reads_breaks_the_placed_spec() -> None:
    parts = partition(differentiate(unit_of(Routed(), torch.randn(5, 4))))
    parts.saved.append(parts.saved[0])
    with pytest.raises(PassError, match=f"saves {parts.saved[0].name}"):
        check_placed(parts)


def test_a_routing_decision_that_runs_again_breaks_the_placed_spec() -> None:
    parts = partition(differentiate(unit_of(Routed(), torch.randn(5, 4))))
    route = next(iter(parts.forward.find_nodes(op="call_function", target=torch.ops.moec.route.default)))
    with parts.backward.inserting_before(parts.backward.output_node()):
        copy = parts.backward.create_node("call_function", route.target, (), {}, name=route.name)
    copy.meta = dict(route.meta)
    with pytest.raises(PassError, match=r"(?s)placed spec.*must run once.*route is a decision"):
        check_placed(parts)


def lowered() -> fx.Graph:
    parts = partition(differentiate(unit_of(Routed(), torch.randn(5, 4))))
    lower(parts.forward)
    return parts.forward


def call(graph: fx.Graph, target: object) -> fx.Node:
    return next(iter(graph.find_nodes(op="call_function", target=target)))


def test_a_lowered_graph_holds() -> None:
    check_lowered(lowered(), "layer")


def test_a_plain_function_breaks_the_lowered_spec() -> None:
    graph = lowered()
    node = call(graph, aten.tanh.default)
    node.target = torch.tanh
    with pytest.raises(PassError) as caught:
        check_lowered(graph, "layer")
    assert caught.value.what == "after lowering the lowered spec does not hold: every op can be written"
    assert f"unit layer, node %{node.name}" in caught.value.where
    assert "test_spec_stages.py:" in caught.value.where
    assert f"%{node.name}:" in caught.value.why


def test_arithmetic_on_sizes_may_stay_in_a_lowered_graph() -> None:
    graph = lowered()
    with graph.inserting_before(graph.output_node()):
        for function in (operator.floordiv, torch.sym_max, operator.ge):
            graph.call_function(function, (7, 2)).meta["val"] = function(7, 2)
    check_lowered(graph, "layer")


@pytest.fixture
def without_kernel() -> Iterator[object]:
    """An op that has a schema and nothing else."""
    library = torch.library.Library("moec_test", "DEF")
    library.define("hollow(Tensor x) -> Tensor")
    yield torch.ops.moec_test.hollow.default
    library._destroy()


def test_an_op_without_implementation_breaks_the_lowered_spec(without_kernel: object) -> None:
    graph = lowered()
    call(graph, aten.tanh.default).target = without_kernel  # type: ignore[assignment]
    with pytest.raises(PassError, match=r"moec_test\.hollow\.default has no implementation for cpu"):
        check_lowered(graph, "layer")


def test_what_holds_a_place_breaks_the_lowered_spec() -> None:
    graph = lowered()
    call(graph, aten.tanh.default).target = torch.ops.moec.held.default
    with pytest.raises(PassError, match="stands for a higher-order op"):
        check_lowered(graph, "layer")


def test_a_layer_that_calls_a_layer_breaks_the_lowered_spec() -> None:
    graph = lowered()
    call(graph, aten.tanh.default).target = torch.ops.moec.region.default
    with pytest.raises(PassError, match="layers are called by the model alone"):
        check_lowered(graph, "layer")
    check_lowered(graph, OUTER)


def test_an_undescribed_value_breaks_the_lowered_spec() -> None:
    graph = lowered()
    del call(graph, aten.tanh.default).meta["val"]
    with pytest.raises(PassError, match="every value is described"):
        check_lowered(graph, "layer")


def test_every_lowered_rule_has_a_test_that_breaks_it() -> None:
    assert {name for name, _ in LOWERED_RULES} == {
        "every op can be written",
        "every op has an implementation",
        "layers are called by the model alone",
        "every value is described",
    }
