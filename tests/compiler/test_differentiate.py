"""Joint graphs: everything is found by what it is, gradients are autograd's, and the graph runs on real tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moec.compiler import dialect
from moec.compiler.differentiate import differentiate
from moec.compiler.graph import module_path

from ..spine import distance
from .units import Ran, autograd, run_joint, unit_of

aten = torch.ops.aten


class Mixed(nn.Module):
    """Results with and without a gradient, frozen and unreached weights, a buffer that is written, an integer input."""

    n: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unreached = nn.Linear(4, 4)
        self.register_buffer("n", torch.ones(4))

    def forward(self, x: Tensor, index: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        self.n.add_(x.detach().mean(0))
        hidden = self.a(x) * self.n
        choice = self.unreached(x).argmax(-1)
        return F.softplus(hidden.t()).t() + self.frozen(y)[index], choice, y, hidden.detach(), x.sum()


def mixed() -> tuple[Mixed, tuple[Tensor, ...], dict[int, Tensor]]:
    torch.manual_seed(0)
    args = (torch.randn(3, 4, requires_grad=True), torch.tensor([0, 2, 1]), torch.randn(3, 4, requires_grad=True))
    return Mixed(), args, {0: torch.randn(3, 4), 2: torch.randn(3, 4), 4: torch.randn(())}


def assert_same(found: Ran, wanted: Ran, names: dict[str, str], bound: float = 1e-6) -> None:
    assert len(found.results) == len(wanted.results)
    for got, expected in zip(found.results, wanted.results, strict=True):
        assert distance(got, expected) <= bound
    grads = {names.get(name, name): grad for name, grad in found.grads.items()}
    assert grads.keys() == wanted.grads.keys()
    for name, grad in grads.items():
        assert distance(grad, wanted.grads[name]) <= bound, name
    for name, value in found.buffers.items():
        assert torch.equal(value, wanted.buffers[name]), name


def test_results_buffers_and_gradients_are_autograds() -> None:
    module, args, tangents = mixed()
    joint = differentiate(unit_of(module, *args))
    found = run_joint(joint, module, args, tangents)
    assert set(found.buffers) == {"n"}
    assert_same(found, autograd(module, args, tangents), {"x": "input 0", "y": "input 2"})


def test_only_what_needs_a_gradient_gets_one() -> None:
    module, args, _ = mixed()
    joint = differentiate(unit_of(module, *args))
    names = [value.name for value in joint.unit.signature.inputs]
    assert [names[index] for index in joint.grads] == ["a.weight", "a.bias", "x", "y"]
    assert list(joint.tangents) == [0, 2, 4], "neither for the integer result nor for the detached one"
    assert list(joint.buffers) == ["n"]


def test_input_flags_override_the_signature() -> None:
    module, args, _ = mixed()
    unit = unit_of(module, *args)
    flags = [value.name == "frozen.weight" for value in unit.signature.inputs]
    joint = differentiate(unit, input_flags=flags)
    assert [unit.signature.inputs[index].name for index in joint.grads] == ["frozen.weight"]


def test_a_unit_without_gradients_has_a_forward_only() -> None:
    module = nn.Linear(4, 4).requires_grad_(False)
    joint = differentiate(unit_of(module, torch.randn(2, 4)))
    assert (joint.grads, joint.tangents) == ({}, {})


def test_views_of_the_traced_graph_run_whatever_strides_a_kernel_returns() -> None:
    """softplus_backward returns the strides of the gradient on a CPU, of the input as a fake; `view` then fails."""

    class Strided(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.softplus(x.transpose(0, 1)).reshape(-1, 4)

    args = (torch.randn(4, 6, requires_grad=True),)
    joint = differentiate(unit_of(Strided(), *args))
    assert not joint.graph.find_nodes(op="call_function", target=aten.view.default)
    for tangent in (torch.randn(6, 4), torch.randn(4, 6).t(), torch.ones(()).expand(6, 4)):
        found = run_joint(joint, Strided(), args, {0: tangent})
        assert distance(found.grads["x"], autograd(Strided(), args, {0: tangent}).grads["input 0"]) <= 1e-6


def test_gradients_of_dialect_ops_are_their_backward_ops() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return dialect.rms_norm(x, self.weight, 1e-6)

    args = (torch.randn(3, 4, requires_grad=True),)
    module = Norm()
    joint = differentiate(unit_of(module, *args))
    assert len(joint.graph.find_nodes(op="call_function", target=torch.ops.moec.rms_norm_backward.default)) == 1
    tangents = {0: torch.randn(3, 4)}
    assert_same(run_joint(joint, module, args, tangents), autograd(module, args, tangents), {"x": "input 0"})


def test_nothing_flows_back_through_a_buffer_that_is_written() -> None:
    """A running mean outside no_grad: its new value has a gradient in the graph, which no later step hands back."""

    class Running(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            self.mean.mul_(0.5).add_(x.mean(0))
            return x * self.mean.clone()

    args, tangents = (torch.randn(3, 4, requires_grad=True),), {0: torch.randn(3, 4)}
    joint = differentiate(unit_of(Running(), *args))
    assert list(joint.tangents) == [0]
    found = run_joint(joint, Running(), args, tangents)
    assert_same(found, autograd(module := Running(), args, tangents), {"x": "input 0"})
    assert not torch.equal(module.mean, torch.ones(4))


def test_sizes_of_intermediate_values_are_computed_from_those_of_inputs() -> None:
    class Shifted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            rows = torch.cat([x[1:], x])
            return rows.flip(0)[:-1].exp().reshape(-1) * x[1:].numel()

    args = (torch.randn(6, 4, requires_grad=True),)
    unit = unit_of(Shifted(), *args, dynamic_shapes=({0: torch.export.Dim("n", min=3, max=64)},))
    joint = differentiate(unit)
    sizes = joint.graph.find_nodes(op="call_function", target=aten.sym_size.int)
    assert all(node.args[0] in joint.inputs for node in sizes)
    for rows in (4, 7, 64):
        given = (torch.randn(rows, 4, requires_grad=True),)
        tangents = {0: torch.randn(4 * (2 * rows - 2))}
        assert_same(
            run_joint(joint, Shifted(), given, tangents), autograd(Shifted(), given, tangents), {"x": "input 0"}
        )


def test_sizes_are_read_from_inputs() -> None:
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.proj(x)
            return hidden.reshape(-1, 2) / hidden.shape[0]

    args = (torch.randn(6, 4, requires_grad=True),)
    module = Pool()
    unit = unit_of(module, *args, dynamic_shapes=({0: torch.export.Dim("n", min=2, max=64)},))
    joint = differentiate(unit)
    sizes = joint.graph.find_nodes(op="call_function", target=aten.sym_size.int)
    assert sizes
    assert all(node.args[0] in joint.inputs for node in sizes)
    for rows in (2, 5, 64):
        given = (torch.randn(rows, 4, requires_grad=True),)
        tangents = {0: torch.randn(rows * 2, 2)}
        assert_same(run_joint(joint, module, given, tangents), autograd(module, given, tangents), {"x": "input 0"})


def test_backward_nodes_carry_the_module_of_their_forward() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)))

    joint = differentiate(unit_of(Two(), torch.randn(3, 4, requires_grad=True)))
    products = [n for n in joint.graph.find_nodes(op="call_function", target=aten.mm.default)]
    assert {module_path(node) for node in products} == {"first", "second"}
    weight = joint.grads[0]
    assert module_path(weight) == "first"


def test_differentiating_leaves_the_unit_as_it_was() -> None:
    module, args, _ = mixed()
    unit = unit_of(module, *args)
    before = str(unit.graph)
    differentiate(unit)
    assert str(unit.graph) == before


@pytest.mark.parametrize("kind", ["twice", "input", "same input twice"])
def test_results_may_repeat(kind: str) -> None:
    class Repeat(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            product = x * y
            return {"twice": (product, product), "input": (x, product), "same input twice": (x, x)}[kind]

    args = (torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True))
    joint = differentiate(unit_of(Repeat(), *args))
    tangents = {0: torch.randn(3), 1: torch.randn(3)}
    found, wanted = run_joint(joint, Repeat(), args, tangents), autograd(Repeat(), args, tangents)
    assert len(found.results) == 2
    assert_same(found, wanted, {"x": "input 0", "y": "input 1"})
