"""C04: with a frozen base and LoRA, equal blocks share a graph, though only the first has an input without gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moec
from moec.compiler.plan import OptimizerPlan, Plan

from ..spine import PLAN, WIDTH, Language, assert_equal_gradients, batch_for, eager, seeded


class Adapted(nn.Module):
    """A frozen linear layer and its low-rank adapter."""

    def __init__(self, alpha: float = 2.0) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.alpha = alpha

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.alpha * self.b(self.a(x))


class Attention(nn.Module):
    def __init__(self, alpha: float = 2.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.q, self.k, self.v = Adapted(alpha), nn.Linear(WIDTH, WIDTH).requires_grad_(False), Adapted(alpha)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        q, k, v = self.q(normed), self.k(normed), self.v(normed)
        return hidden + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def model(*alphas: float) -> Any:
    made = seeded(Language, *[Attention(alpha) for alpha in alphas])
    made.embed.requires_grad_(False)
    made.head.requires_grad_(False)
    return made


def templates(step: moec.CompiledStep) -> set[str]:
    return {name for name in vars(step.program) if name.endswith("_forward")}


def assert_few_graphs(step: moec.CompiledStep) -> None:
    assert len(templates(step)) <= 2


def test_c04_four_equal_blocks_have_two_graphs_and_eagers_gradients() -> None:
    made = model(2.0, 2.0, 2.0, 2.0)
    step = moec.compile(made, PLAN)
    assert_few_graphs(step)
    batch = batch_for(PLAN)
    _, gradients = eager(made, batch)
    assert {name.split(".")[-2] for name, grad in gradients.items() if grad is not None} == {"a", "b"}
    # The queries' gradients mostly cancel: eager's own are 1.4e-5 off those of float64.
    assert_equal_gradients(step.gradients(batch), gradients, 3e-5)


def test_c04_the_base_is_not_touched() -> None:
    made = model(2.0, 2.0)
    before = {name: parameter.clone() for name, parameter in made.named_parameters()}
    step = moec.compile(made, Plan(batch=2, length=6, optimizer=OptimizerPlan(lr=0.1, schedule="constant")))
    step(batch_for(PLAN))
    moved = {name for name, parameter in made.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {name for name, parameter in made.named_parameters() if parameter.requires_grad}
    assert all(parameter.grad is None for parameter in made.parameters())


def test_c04_blocks_that_share_no_graph_are_seen() -> None:
    step = moec.compile(model(1.0, 2.0, 3.0, 4.0), PLAN)
    assert len(templates(step)) == 4
    with pytest.raises(AssertionError):
        assert_few_graphs(step)


def test_c04_a_gradient_in_the_wrong_adapter_is_seen() -> None:
    made = model(2.0, 2.0)
    found = moec.compile(made, PLAN).gradients(batch_for(PLAN))
    _, gradients = eager(made, batch_for(PLAN))
    one, two = "layers.0.q.a.weight", "layers.1.q.a.weight"
    with pytest.raises(AssertionError):
        assert_equal_gradients({**found, one: found[two], two: found[one]}, gradients)
