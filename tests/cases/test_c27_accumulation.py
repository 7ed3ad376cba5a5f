"""C27: microbatches with 3, 11, 0 and 16 valid tokens weigh as their tokens do, as in one batch of all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import moec
from moec.compiler.plan import OptimizerPlan, Plan

from ..spine import VOCABULARY, Language, Layer, assert_equal_gradients, distance, eager, seeded, small_k3

VALID = (3, 11, 0, 16)
ROWS, LENGTH = 2, 9
PARTS = Plan(batch=ROWS, length=LENGTH, accumulation=len(VALID))
JOINED = Plan(batch=ROWS * len(VALID), length=LENGTH)


def batch() -> dict[str, Tensor]:
    """[4, 2, 9] tokens of which VALID predictions count per microbatch."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (len(VALID), ROWS, LENGTH), generator=generator)
    labels = torch.full_like(ids, -100)
    for part, count in enumerate(VALID):
        places = torch.randperm(ROWS * (LENGTH - 1), generator=generator)[:count]
        labels[part, places // (LENGTH - 1), places % (LENGTH - 1) + 1] = 7
    return {"input_ids": ids, "labels": labels}


def joined() -> dict[str, Tensor]:
    return {name: value.flatten(0, 1) for name, value in batch().items()}


def language() -> Any:
    return seeded(Language, Layer(), Layer())


def test_c27_both_parts_of_a_sparse_models_loss_are_means_over_valid_tokens() -> None:
    """So microbatches are one batch for its indexers too; the reference is the eager model on the joined batch."""
    assert [int((labels[:, 1:] != -100).sum()) for labels in batch()["labels"]] == list(VALID)
    model = small_k3(full_attention="dsa")
    step, eager_model = moec.compile(model, PARTS), copy.deepcopy(model)
    losses = step.loss(batch())
    output = eager_model(joined()["input_ids"], joined()["labels"])
    output.loss.backward()
    for name, wanted in (
        ("objective", output.loss),
        ("lm_loss", output.lm_loss),
        ("indexer_loss", output.indexer_loss),
    ):
        assert distance(losses[name], wanted) <= 2e-6, name
    gradients = {name: parameter.grad for name, parameter in eager_model.named_parameters()}
    assert_equal_gradients(step.gradients(batch()), gradients, 2e-5)


def test_c27_the_joined_batch_is_eagers() -> None:
    model = language()
    loss, gradients = eager(model, joined())
    step = moec.compile(model, PARTS)
    assert distance(step.loss(batch())["lm_loss"], loss) <= 1e-6
    assert_equal_gradients(step.gradients(batch()), gradients)


def test_c27_a_mean_over_microbatches_is_seen() -> None:
    """What a trainer does that divides by the number of microbatches."""
    model = language()
    _, wanted = eager(model, joined())
    means: dict[str, Tensor] = {}
    for ids, labels in zip(batch()["input_ids"], batch()["labels"], strict=True):
        if (labels[:, 1:] != -100).any():
            _, gradients = eager(model, {"input_ids": ids, "labels": labels})
            means = {name: means.get(name, 0) + grad / len(VALID) for name, grad in gradients.items()}  # type: ignore[operator]
    with pytest.raises(AssertionError):
        assert_equal_gradients(means, wanted)


def test_c27_three_steps_train_alike() -> None:
    options = OptimizerPlan(lr=1e-2, schedule="constant")
    models = [language(), language()]
    plans = [
        Plan(batch=p.batch, length=LENGTH, accumulation=p.accumulation, optimizer=options) for p in (PARTS, JOINED)
    ]
    for model, plan, data in zip(models, plans, (batch(), joined()), strict=True):
        step = moec.compile(model, plan)
        for _ in range(3):
            step(data)
    for (name, one), two in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert distance(one, two) <= 1e-5, name
