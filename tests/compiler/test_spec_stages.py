"""The joint and placed specs: right graphs pass, planted faults are named with their node."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moec.compiler import dialect
from moec.compiler.differentiate import differentiate
from moec.compiler.errors import PassError
from moec.compiler.partition import partition
from moec.compiler.spec import check_joint, check_placed

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
    check_placed(partition(joint, recompute=True))


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
