"""C36: two runs from the same seed have bit-equal losses and gradients, step after step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import moec
from moec.compiler.plan import OptimizerPlan, Plan

from ..spine import Language, Layer, batch_for, recomputed, seeded, small_k3

PLAN = Plan(batch=2, length=6, accumulation=2, optimizer=OptimizerPlan(lr=1e-2, schedule="constant"))


class Dropped(Layer):
    """With dropout: the draws are part of the run."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(F.dropout(hidden, 0.5, self.training))


def run(step: moec.CompiledStep, seed: int = 0, steps: int = 5) -> list[list[Tensor]]:
    """Per step: the loss, the gradient norm, and the gradients before the step."""
    torch.manual_seed(seed)
    found = []
    for number in range(steps):
        gradients = list(step.gradients(batch_for(PLAN, number)).values())
        result = step(batch_for(PLAN, number))
        found.append([result.loss, result.gradient_norm, *(grad.clone() for grad in gradients)])
    return found


def same(one: list[list[Tensor]], two: list[list[Tensor]]) -> bool:
    return all(
        torch.equal(a, b) for left, right in zip(one, two, strict=True) for a, b in zip(left, right, strict=True)
    )


MODELS: list[Callable[[], Any]] = [
    lambda: seeded(Language, Layer(), Layer(), tied=True),
    lambda: seeded(Language, Dropped(), Dropped()),
    lambda: small_k3(full_attention="dsa"),
]


@pytest.mark.parametrize("make", MODELS, ids=["tied", "dropout", "k3-dsa"])
def test_c36_five_steps_are_bit_equal(make: Callable[[], Any], tmp_path: Path) -> None:
    step = moec.compile(make(), PLAN)
    folder = step.save(tmp_path / "step", weights=True)
    first = run(step)
    assert same(first, run(moec.load(folder)))
    assert not torch.equal(first[0][0], first[1][0]), "the steps differ from each other"


def test_c36_another_seed_is_seen(tmp_path: Path) -> None:
    step = moec.compile(MODELS[1](), PLAN)
    folder = step.save(tmp_path / "step", weights=True)
    assert not same(run(step, seed=0, steps=1), run(moec.load(folder), seed=1, steps=1))


def test_c36_a_recomputed_dropout_draws_once() -> None:
    """Recomputation must not draw again: same loss and gradients as without it."""

    def gradients(recompute: tuple[str, ...]) -> list[Tensor]:
        step = moec.compile(MODELS[1](), Plan(batch=2, length=6, cache=recomputed(*recompute)))
        torch.manual_seed(0)
        return list(step.gradients(batch_for(Plan(batch=2, length=6))).values())

    assert all(torch.equal(a, b) for a, b in zip(gradients(()), gradients(("*",)), strict=True))
