"""C24: the auxiliary loss reaches the router, in proportion to its coefficient."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moec
from moec.compiler import dialect

from ..spine import PLAN, WIDTH, Language, assert_equal_gradients, batch_for, distance, eager, mean_loss, seeded

EXPERTS = 4


class Experts(nn.Module):
    """Top-2 experts that also return the balance loss of Switch Transformers: E * sum of count share x mean score."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.matrices = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        tokens = hidden.flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        weights, chosen = scores.topk(2)
        rows, order, offsets = dialect.permute(tokens, chosen, experts=EXPERTS)
        rows = dialect.grouped_linear(torch.tanh(rows), self.matrices, offsets)
        share = F.one_hot(chosen, EXPERTS).float().mean((0, 1))
        balance = EXPERTS * (share * scores.mean(0)).sum()
        return hidden + dialect.unpermute(rows, order, weights).view_as(hidden), balance


class Model(Language):
    def __init__(self, coefficient: float) -> None:
        super().__init__(Experts(), Experts())
        self.coefficient = coefficient

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden, total = self.embed(input_ids), torch.zeros(())
        for layer in self.layers:
            hidden, balance = layer(hidden)
            total = total + balance
        return mean_loss(self.head(hidden), labels) + self.coefficient * total

    def balance_gradient(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """d(sum of balance losses) / d(routers), by eager autograd."""
        hidden, total = self.embed(batch["input_ids"]), torch.zeros(())
        for layer in self.layers:
            hidden, balance = layer(hidden)
            total = total + balance
        routers = {name: p for name, p in self.named_parameters() if "router" in name}
        return dict(zip(routers, torch.autograd.grad(total, list(routers.values())), strict=True))


@cache
def gradients(coefficient: float) -> tuple[Any, dict[str, Tensor]]:
    model = seeded(Model, coefficient)
    return model, moec.compile(model, PLAN).gradients(batch_for(PLAN))


def test_c24_router_gradients_grow_with_the_coefficient() -> None:
    model, plain = gradients(0.0)
    wanted = model.balance_gradient(batch_for(PLAN))
    assert all(grad.norm() > 1e-3 for grad in wanted.values())
    for coefficient in (0.01, 0.1):
        _, found = gradients(coefficient)
        for name, grad in wanted.items():
            difference = found[name] - plain[name]
            # A difference of two float32 gradients keeps their absolute error.
            bound = 1e-5 * float((coefficient * grad).norm()) + 1e-6 * float(plain[name].norm())
            assert float((difference - coefficient * grad).norm()) <= bound, (name, coefficient)


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_c24_all_gradients_are_eagers(coefficient: float) -> None:
    model, found = gradients(coefficient)
    _, wanted = eager(model, batch_for(PLAN))
    assert_equal_gradients(found, wanted)


def test_c24_a_lost_auxiliary_loss_is_seen() -> None:
    _, plain = gradients(0.0)
    model = seeded(Model, 0.1)
    _, wanted = eager(model, batch_for(PLAN))
    assert distance(plain["layers.0.router.weight"], wanted["layers.0.router.weight"]) > 1e-3  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        assert_equal_gradients(plain, wanted)
