"""Random batches hold what a step has to handle, and are the same for the same seed."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch import nn

from moec.compiler.plan import Plan
from moec.random_batch import random_batches, vocabulary_of
from moec.runtime.batch import BatchRules
from moec.runtime.step import IGNORED

PLAN = Plan(batch=4, length=128, accumulation=3, packing=True)


def test_the_seed_decides() -> None:
    one, two, other = (list(islice(random_batches(PLAN, 64, seed), 2)) for seed in (1, 1, 2))
    assert all(torch.equal(a[name], b[name]) for a, b in zip(one, two, strict=True) for name in a)
    assert not torch.equal(one[0]["input_ids"], one[1]["input_ids"])
    assert not torch.equal(one[0]["input_ids"], other[0]["input_ids"])


@pytest.mark.parametrize("plan", [PLAN, Plan(batch=2, length=32), Plan(batch=1, length=64, dynamic="length")])
def test_a_step_accepts_them(plan: Plan) -> None:
    for batch in islice(random_batches(plan, 50, seed=0), 3):
        BatchRules(plan, 50, None).checked(batch)


@pytest.mark.parametrize(
    "plan",
    [
        replace(PLAN, image_tokens=37),
        Plan(batch=2, length=32, image_tokens=64),
        Plan(batch=2, length=64, dynamic="length", image_tokens=90),
    ],
)
def test_placeholders_are_as_many_as_the_plan_says_and_have_features(plan: Plan) -> None:
    images = (7, 5)
    for batch in islice(random_batches(plan, 50, 0, images), 4):
        checked = BatchRules(plan, 50, images).checked(batch)  # counts the placeholders of each microbatch
        assert checked["image_features"].shape == (plan.accumulation, plan.image_tokens, 5)
        assert bool((checked["labels"][checked["input_ids"] == 7] == IGNORED).all())
        assert float(checked["image_features"].std()) > 0.5


def test_placeholders_lie_anywhere() -> None:
    plan = replace(PLAN, image_tokens=40)
    ids = next(random_batches(plan, 50, 0, (7, 5)))["input_ids"]
    rows = (ids == 7).sum(-1)
    assert len(rows.unique()) > 2
    assert 0 < len((ids[0] == 7).nonzero()[:, 1].unique()) < 41


def test_documents_are_ragged_and_labels_are_missing() -> None:
    batch = next(random_batches(PLAN, 64, seed=0))
    assert batch["input_ids"].shape == (3, 4, 128)
    sizes = torch.cat([row.bincount() for row in batch["document_ids"].flatten(0, 1)])
    assert int(sizes.min()) == 1
    assert int(sizes.max()) > 30
    ignored = batch["labels"] == IGNORED
    assert 0.1 < float(ignored.float().mean()) < 0.4
    assert len(ignored[..., 1:].sum((1, 2)).unique()) > 1
    assert bool((batch["labels"] == batch["input_ids"])[~ignored].all())


def test_dynamic_lengths_vary() -> None:
    plan = Plan(batch=1, length=64, dynamic="length")
    lengths = {batch["input_ids"].shape[1] for batch in islice(random_batches(plan, 50, seed=0), 8)}
    assert len(lengths) > 3
    assert max(lengths) <= 64


def test_tokens_can_be_predicted_from_the_one_before() -> None:
    tokens = next(random_batches(PLAN, 16, seed=0))["input_ids"]
    pairs = torch.zeros(16, 16).index_put_(
        (tokens[..., :-1].flatten(), tokens[..., 1:].flatten()), torch.ones(()), accumulate=True
    )
    assert float(pairs.max(1).values.sum() / pairs.sum()) > 0.4


def test_the_vocabulary_is_that_of_the_first_embedding() -> None:
    assert vocabulary_of(nn.Sequential(nn.Linear(2, 2), nn.Embedding(7, 3), nn.Embedding(9, 3))) == 7
    assert vocabulary_of(nn.Linear(2, 2)) is None
