"""Gradients that a joint graph does not use are not computed; frozen weights are not asked for from the start."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from moec.compiler import dialect
from moec.compiler.cost import node_flops
from moec.compiler.differentiate import Joint, differentiate
from moec.compiler.partition import partition
from moec.compiler.unused_gradients import ask_for_used_gradients

from .units import run_joint, unit_of

ROWS, IN, OUT, EXPERTS = 12, 4, 6, 3
OFFSETS = torch.tensor([5, 5, 12], dtype=torch.int32)
GROUPED = torch.ops.moec.grouped_linear_backward.default


class Experts(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.Parameter(torch.randn(IN))
        self.weight = nn.Parameter(torch.randn(EXPERTS, OUT, IN))
        self.bias = nn.Parameter(torch.randn(EXPERTS, OUT)) if bias else None

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return dialect.grouped_linear(dialect.rms_norm(x, self.norm, 1e-6), self.weight, offsets, self.bias)


def joint_of(module: Experts) -> Joint:
    return differentiate(unit_of(module, torch.randn(ROWS, IN, requires_grad=True), OFFSETS))


def backward_op(joint: Joint, target: object = GROUPED) -> fx.Node:
    (node,) = joint.graph.find_nodes(op="call_function", target=target)
    return node


def inputs_that_get_a_gradient(joint: Joint) -> list[str]:
    return [joint.unit.signature.inputs[index].name for index in joint.grads]


def test_what_is_used_is_asked_for_in_the_short_form() -> None:
    joint = joint_of(Experts())
    assert len(backward_op(joint).args) == 6, "all gradients, so no flags"
    assert ask_for_used_gradients(joint.graph) == 0


@pytest.mark.parametrize("bias", [False, True])
def test_a_frozen_weight_is_not_asked_for_and_its_operand_not_kept(bias: bool) -> None:
    module = Experts(bias)
    trained = node_flops(backward_op(joint_of(module)))
    module.weight.requires_grad_(False)
    joint = joint_of(module)
    node = backward_op(joint)
    assert "weight" not in inputs_that_get_a_gradient(joint)
    assert (node.args[1], node.args[-1]) == (None, [True, False, True])
    assert node_flops(node) == trained / 2 == 2 * ROWS * IN * OUT
    (norm,) = joint.graph.find_nodes(op="call_function", target=torch.ops.moec.rms_norm.default)
    assert norm not in partition(joint).saved


def test_frozen_norms_sum_nothing_over_the_rows() -> None:
    module = Experts()
    module.norm.requires_grad_(False)
    norm = torch.ops.moec.rms_norm_backward.default
    frozen, trained = (node_flops(backward_op(joint_of(one), norm)) for one in (module, Experts()))
    assert trained - frozen == 2 * ROWS * IN


def drop_gradient(joint: Joint, name: str) -> None:
    """Nobody wants the gradient of an input after all."""
    index = [value.name for value in joint.unit.signature.inputs].index(name)
    gone = joint.grads.pop(index)
    output = joint.graph.output_node()
    output.args = (tuple(None if value is gone else value for value in output.args[0]),)  # type: ignore[union-attr]
    joint.graph.eliminate_dead_code()


@pytest.mark.parametrize(("name", "flags", "unread"), [("weight", [True, False, True], True)])
def test_a_gradient_that_nothing_uses_is_no_longer_made(name: str, flags: list[bool], unread: bool) -> None:
    module = Experts()
    joint = joint_of(module)
    x, tangent = torch.randn(ROWS, IN), torch.randn(ROWS, OUT)
    wanted = run_joint(joint, module, [x, OFFSETS], {0: tangent}).grads
    drop_gradient(joint, name)
    assert ask_for_used_gradients(joint.graph) == 1
    node = backward_op(joint)
    assert node.args[-1] == flags
    assert (node.args[1] is None) == unread
    assert [value.numel() for value in node.meta["val"]] == [ROWS * IN, 0, 0]
    assert ask_for_used_gradients(joint.graph) == 0
    found = run_joint(joint, module, [x, OFFSETS], {0: tangent}).grads
    assert found.keys() == wanted.keys() - {name}
    assert all(torch.equal(found[one], wanted[one]) for one in found)


def test_what_was_not_asked_for_stays_so() -> None:
    module = Experts(bias=True)
    module.weight.requires_grad_(False)
    joint = joint_of(module)
    drop_gradient(joint, "bias")
    assert ask_for_used_gradients(joint.graph) == 1
    assert backward_op(joint).args[-1] == [True, False, False]
