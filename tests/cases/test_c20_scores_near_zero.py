"""C20: a sigmoid router whose scores are all near 0: the epsilon of its normaliser decides, as in the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moec
from moec import driver
from moec.compiler import dialect

from ..spine import PLAN, WIDTH, Language, assert_equal_gradients, batch_for, distance, eager, mean_loss, seeded
from .planting import Op, plant

EXPERTS, EPSILON = 4, 1e-20


class Experts(nn.Module):
    """Top-2 experts by normalised sigmoids; `balanced`: with the balance loss of the normalised scores (DeepSeek-V3).

    What else reads the scores keeps the choice from becoming the route op.
    """

    def __init__(self, balanced: bool) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.matrices = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))
        self.balanced = balanced

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        tokens = hidden.flatten(0, 1)
        scores = self.router(tokens).sigmoid()
        weights, chosen = scores.topk(2)
        weights = weights / (weights.sum(-1, keepdim=True) + EPSILON)
        rows, order, offsets = dialect.permute(tokens, chosen, experts=EXPERTS)
        rows = dialect.grouped_linear(torch.tanh(rows), self.matrices, offsets)
        balance = torch.zeros(())
        if self.balanced:
            share = F.one_hot(chosen, EXPERTS).float().mean((0, 1))
            shares = scores / (scores.sum(-1, keepdim=True) + EPSILON)
            balance = EXPERTS * (share * shares.mean(0)).sum()
        return hidden + dialect.unpermute(rows, order, weights).view_as(hidden), balance


class Model(Language):
    def __init__(self) -> None:
        super().__init__(Experts(True), Experts(False))

    def balance(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states, and the sum of the balance losses."""
        hidden, total = self.embed(input_ids), torch.zeros(())
        for layer in self.layers:
            hidden, balance = layer(hidden)
            total = total + balance
        return hidden, total

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden, total = self.balance(input_ids)
        return mean_loss(self.head(hidden), labels) + total


def model() -> Any:
    """Logits of -60, with differences of a tenth."""
    made = seeded(Model)
    with torch.no_grad():
        for layer in made.layers:
            layer.router.weight.mul_(0.1)
            layer.router.bias.fill_(-60.0)
    return made


def assert_as_the_model(step: moec.CompiledStep, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, weights and all gradients are the model's and finite; its balance loss lies far below its floor of 1."""
    batch, seen = batch_for(PLAN), []

    def recorded(route: Op) -> Op:
        def run(*args: Any, **options: Any) -> Any:
            found = route(*args, **options)
            seen.append(found[0])
            return found

        return run

    loss, wanted = eager(made, batch)
    with monkeypatch.context() as watched:
        plant(watched, step, route=recorded)
        assert distance(step.loss(batch)["lm_loss"], loss) <= 1e-6
    (weights,) = seen
    assert 0 < float(weights.sum(-1).max()) < 1e-4
    assert 0 < float(made.balance(batch["input_ids"])[1].detach()) < 1e-4
    found = step.gradients(batch)
    assert all(gradient.isfinite().all() for gradient in found.values())
    assert found["layers.0.router.weight"].any()
    assert_equal_gradients(found, wanted)


def test_c20_router_scores_near_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    step = moec.compile(made, PLAN)
    assert "renorm_eps=1e-20" in step.source
    assert_as_the_model(step, made, monkeypatch)


@pytest.mark.parametrize("direction", ["route", "route_backward"])
def test_c20_an_epsilon_that_a_kernel_loses_is_seen(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    step = moec.compile(made, PLAN)

    def without(plain: Op) -> Op:
        return lambda *args, **options: plain(*args, **{**options, "renorm_eps": 0.0})

    plant(monkeypatch, step, **{direction: without})
    with pytest.raises(AssertionError):
        assert_as_the_model(step, made, monkeypatch)


def test_c20_an_epsilon_that_a_program_loses_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the layer whose router is plain operators."""
    write = driver.write_program

    def without(*args: Any, **options: Any) -> Any:
        program = write(*args, **options)
        assert "+ 1e-20" in program.text
        return replace(program, text=program.text.replace("+ 1e-20", "+ 0.0"))

    monkeypatch.setattr(driver, "write_program", without)
    made = model()
    with pytest.raises(AssertionError):
        assert_as_the_model(moec.compile(made, PLAN), made, monkeypatch)
