"""Gradient modes come inline: the same results, gradients and buffers as autograd gives, whatever is nested in what."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from moec.compiler.errors import CaptureError
from moec.compiler.grad_modes import inline_grad_modes


class Case(nn.Module):
    """A function of x [3, 4], a weight [4, 4], a running mean [4] and a counter."""

    mean: Tensor
    count: Tensor

    def __init__(self, function: Callable[[Case, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def exported(case: Case) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The graph of a case (weight, mean, count, x), inlined; and the placeholders that carry a gradient."""
    program = torch.export.export(case, (torch.ones(3, 4),), strict=False)
    module = program.graph_module
    weight, *_, x = module.graph.find_nodes(op="placeholder")
    return module, [weight, x]


CASES: dict[str, Callable[[Case, Tensor], Tensor]] = {}


def case(function: Callable[[Case, Tensor], Tensor]) -> Callable[[Case, Tensor], Tensor]:
    CASES[function.__name__] = function
    return function


@case
def results_are_detached(self: Case, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (x @ self.weight).square().mean()
        best = (x @ self.weight).argmax(-1)
    return x * scale + best.unsqueeze(-1) * self.weight.sum()


@case
def writes_that_nothing_reads(self: Case, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.count.add_(1)
        self.mean.lerp_(x.mean(0), 0.1)
    return x @ self.weight


@case
def a_write_that_is_read_afterwards(self: Case, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.mean.mul_(0.9).add_((x @ self.weight).mean(0), alpha=0.1)
    return (x - self.mean) @ self.weight


@case
def a_write_by_name(self: Case, x: Tensor) -> Tensor:
    with torch.no_grad():
        torch.add(self.mean, (x @ self.weight).mean(0), out=self.mean)
    return (x - self.mean) @ self.weight


@case
def enable_grad_inside_of_no_grad(self: Case, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.count += 1
        gate = (x @ self.weight).sigmoid()
        with torch.enable_grad():
            y = x @ self.weight * gate
        self.mean.copy_(y.mean(0))
    return y + self.mean


@case
def no_grad_inside_of_no_grad(self: Case, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x @ self.weight
        with torch.no_grad():
            self.mean.copy_(y.mean(0))
        z = y * 2
    return x * z + x @ self.weight


@case
def a_mask_made_without_gradient_and_filled_with_it(self: Case, x: Tensor) -> Tensor:
    with torch.no_grad():
        total = torch.zeros_like(x)
    total += x @ self.weight
    return total * total


@pytest.mark.parametrize("name", CASES)
def test_results_gradients_and_buffers_are_eagers(name: str) -> None:
    eager, model = Case(CASES[name]), Case(CASES[name])
    x, other = (torch.linspace(-1, 2, 12).view(3, 4).requires_grad_() for _ in range(2))
    wanted = eager(x)
    wanted.square().sum().backward()
    module, carrying = exported(model)
    inline_grad_modes(module, carrying)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    (found,) = module(model.weight, model.mean, model.count, other)
    found.square().sum().backward()
    assert torch.equal(found, wanted)
    assert torch.equal(model.mean, eager.mean)
    assert torch.equal(model.count, eager.count)
    assert x.grad is not None
    assert other.grad is not None
    assert model.weight.grad is not None
    assert eager.weight.grad is not None
    assert torch.equal(other.grad, x.grad)
    assert torch.equal(model.weight.grad, eager.weight.grad)
    assert not [node for node in module.graph.nodes if "set_grad_enabled" in str(node.target)]


def _on_a_value(self: Case, x: Tensor) -> Tensor:
    y = x @ self.weight
    with torch.no_grad():
        y.mul_(2)
    return y


def _through_a_view(self: Case, x: Tensor) -> Tensor:
    y = x @ self.weight
    with torch.no_grad():
        y[0].zero_()
    return y


def _on_a_weight(self: Case, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.weight.clamp_(-1, 1)
    return x @ self.weight


@pytest.mark.parametrize("function", [_on_a_value, _through_a_view, _on_a_weight])
def test_a_write_that_autograd_does_not_see_is_refused(function: Callable[[Case, Tensor], Tensor]) -> None:
    """In a graph of values the gradient would take the write into account; eager's does not."""
    module, carrying = exported(Case(function))
    with pytest.raises(CaptureError, match=r"writes under no_grad into a value that carries a gradient") as caught:
        inline_grad_modes(module, carrying)
    assert "test_grad_modes.py:" in caught.value.where


def test_a_write_into_a_detached_value_is_taken() -> None:
    def function(self: Case, x: Tensor) -> Tensor:
        y = (x @ self.weight).detach()
        with torch.no_grad():
            y.mul_(2)
        return y * x

    module, carrying = exported(Case(function))
    inline_grad_modes(module, carrying)


def test_constants_of_a_sub_graph_come_along() -> None:
    """torch.export lifts constants out of sub-graphs, and the bodies of other ops stay there: both are attributes."""
    found = Case(results_are_detached)
    module, carrying = exported(found)
    (call,) = [node for node in module.graph.nodes if "wrap_with" in str(node.target)]
    inner: fx.GraphModule = getattr(module, call.args[1].target)
    inner.factor, module.factor_inlined = torch.tensor(3.0), torch.tensor(5.0)
    (mean,) = inner.graph.find_nodes(op="call_function", target=torch.ops.aten.mean.default)
    with inner.graph.inserting_after(mean):
        factor = inner.graph.get_attr("factor")
    with inner.graph.inserting_after(factor):
        tripled = inner.graph.call_function(torch.ops.aten.mul.Tensor, (mean, factor))
    mean.replace_all_uses_with(tripled, delete_user_cb=lambda user: user is not tripled)
    inline_grad_modes(module, carrying)
    assert module.factor_inlined == 5.0, "what the outer module has under the name stays"
    module.graph.lint()
    module.recompile()
    x = torch.randn(3, 4)
    weight = found.weight.detach()
    (result,) = module(weight, found.mean, found.count, x) if len(carrying) == 2 else module(x)
    product = x @ weight
    wanted = x * (3 * product.square().mean()) + product.argmax(-1).unsqueeze(-1) * weight.sum()
    torch.testing.assert_close(result, wanted)
