"""C21: without a valid label the loss is 0, gradients are zero and weights stay finite, whatever computes the loss."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moec
from moec.compiler.plan import LossPlan, Plan
from moec.eager import EagerStep

from ..spine import Language, Layer, assert_equal_gradients, batch_for, distance, mean_loss, seeded, small_k3
from .planting import plant
from .ranks import ROWS, assert_like_one_rank, on_ranks, plan_for

PLAN = Plan(batch=3, length=6, accumulation=2)


class Summed(Language):
    """Sums the losses, and divides by the count itself: 0 / 0 where there is none."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits, targets = self.head(self.hidden(input_ids))[:, :-1], labels[:, 1:]
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.sum() / (targets != -100).sum()


class PerToken(Language):
    """Losses whose weights depend on themselves: the gradient is not known in the forward."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits, targets = self.head(self.hidden(input_ids))[:, :-1], labels[:, 1:]
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return (losses * (1 + losses.detach())).sum() / (targets != -100).sum()


class Regular(Language):
    """Label smoothing and a z-loss, over the tokens that count."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits, targets = self.head(self.hidden(input_ids))[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        valid = (targets != -100).float()
        z_loss = (logits.logsumexp(-1).square() * valid).sum() / valid.sum()
        return nn.functional.cross_entropy(logits, targets, label_smoothing=0.1) + 0.01 * z_loss


class Capped(Language):
    """Logits that are capped before the loss."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = 2 * torch.tanh(self.head(self.hidden(input_ids)) / 2)
        return mean_loss(logits, labels)


MAKERS: dict[str, tuple[Callable[[], Any], Plan]] = {
    "fused": (lambda: seeded(Language, Layer(), Layer()), PLAN),
    "fused in chunks": (
        lambda: seeded(Language, Layer(), Layer()),
        dataclasses.replace(PLAN, loss=LossPlan(rows=5, columns=6)),
    ),
    "not fused": (
        lambda: seeded(Language, Layer(), Layer()),
        dataclasses.replace(PLAN, disable=("chunk_loss",)),
    ),
    "summed": (lambda: seeded(Summed, Layer()), PLAN),
    "per token": (lambda: seeded(PerToken, Layer()), PLAN),
    "z-loss and smoothing": (lambda: seeded(Regular, Layer()), PLAN),
    "capped": (lambda: seeded(Capped, Layer()), PLAN),
    "k3": (lambda: small_k3(full_attention="dsa"), PLAN),
}


@pytest.fixture(scope="module", params=MAKERS)
def made(request: pytest.FixtureRequest) -> tuple[moec.CompiledStep, EagerStep]:
    """A compiled step and the eager one of an equal model."""
    make, plan = MAKERS[request.param]
    model = make()
    return moec.compile(model, plan), EagerStep(copy.deepcopy(model), plan)


def ignoring(where: Any) -> dict[str, Tensor]:
    batch = batch_for(PLAN)
    batch["labels"][where] = -100
    return batch


@pytest.mark.parametrize("where", [(0,), (1,), (slice(None), 0), (0, slice(1, None))], ids=str)
def test_c21_rows_and_microbatches_without_labels_weigh_nothing(
    made: tuple[moec.CompiledStep, EagerStep], where: Any
) -> None:
    step, eager = made
    batch = ignoring(where)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses, gradients = eager.gradients(batch)
        found = step.loss(batch)
        assert float(found["lm_loss"]) > 0.1
        assert distance(found["lm_loss"], losses["lm_loss"]) <= 1e-6
        assert_equal_gradients(step.gradients(batch), gradients, 2e-5)


def assert_a_batch_without_labels_is_nothing(step: moec.CompiledStep) -> None:
    """Loss and gradients are 0, and only weight decay moves the weights, which are put back."""
    before = {name: weight.detach().clone() for name, weight in step.state.weights.items()}
    batch = ignoring(...)
    assert all(not gradient.any() for gradient in step.gradients(batch).values())
    with pytest.warns(UserWarning, match="no label of this batch is valid"):
        result = step(batch, lr=0.5)
    assert (float(result.loss), float(result.gradient_norm)) == (0.0, 0.0)
    decayed = 1 - 0.5 * step.plan.optimizer.weight_decay
    for name, weight in step.state.weights.items():
        assert torch.equal(weight, before[name]) or distance(weight, decayed * before[name]) <= 1e-6, name
    with torch.no_grad():
        for name, weight in step.state.weights.items():
            weight.copy_(before[name])


def test_c21_a_batch_without_labels_is_zero_and_leaves_weights_finite(
    made: tuple[moec.CompiledStep, EagerStep],
) -> None:
    """The policy of every loss."""
    assert_a_batch_without_labels_is_nothing(made[0])


def test_c21_ranks_without_labels() -> None:
    """One of two ranks, then both: the loss is that of the valid tokens of all, and 0 where there is none."""
    many = on_ranks(seeded(Language, Layer(), Layer()), 2, 1)
    batch = batch_for(plan_for(1, 1))
    batch["labels"][: ROWS // 2] = -100
    assert_like_one_rank(many, seeded(Language, Layer(), Layer()), batch)
    batch["labels"][:] = -100
    assert all(not gradient.any() for gradient in many.gradients(batch).values())
    with pytest.warns(UserWarning, match="no label of this batch is valid"):
        result = many(batch, lr=0.5)
    assert (float(result.loss), float(result.gradient_norm)) == (0.0, 0.0)
    assert all(weight.isfinite().all() for weight in many.weights().values())


def test_c21_a_mean_over_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain mean of the model itself is not a number there, nor is that of a step without labels of its own."""
    model = seeded(Language, Layer())
    batch = ignoring(...)
    assert bool(model(batch["input_ids"][0], batch["labels"][0]).isnan())
    step = moec.compile(model, PLAN)
    plant(monkeypatch, step, "torch", where=lambda plain: lambda condition, one, other: one)
    with pytest.raises(AssertionError):
        assert_a_batch_without_labels_is_nothing(step)
