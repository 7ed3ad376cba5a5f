"""C26: padding changes neither loss nor gradients, on either side and at any length; counts are those of the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import moec
from moec.compiler.plan import Plan
from moec.models.k3.loss import IGNORED

from ..spine import VOCABULARY, assert_equal_gradients, distance, small_k3

SENTENCES = [torch.randint(VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)) for n in (5, 7)]


def padded(length: int, left: bool) -> dict[str, Tensor]:
    """Both sentences as rows of one batch; padding is a document of its own without labels."""
    batch = {name: torch.zeros(2, length, dtype=torch.int64) for name in ("input_ids", "document_ids")}
    batch["labels"] = torch.full((2, length), IGNORED)
    for row, sentence in enumerate(SENTENCES):
        start = length - len(sentence) if left else 0
        place = slice(start, start + len(sentence))
        batch["input_ids"][row, place] = sentence
        batch["labels"][row, place] = sentence
        batch["labels"][row, start] = IGNORED
        batch["document_ids"][row, place] = int(left)
        if not left:
            batch["document_ids"][row, len(sentence) :] = 1
    return batch


def reference(model: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Each sentence alone, without padding, in eager mode."""
    model = copy.deepcopy(model)
    count = sum(len(sentence) - 1 for sentence in SENTENCES)
    total = torch.zeros(())
    for sentence in SENTENCES:
        labels = sentence.clone()
        labels[0] = IGNORED
        loss = model(sentence[None], labels[None], inverse_tokens=torch.tensor(1 / count)).loss
        loss.backward()
        total = total + loss.detach()
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def model() -> Any:
    """One KDA and one sparse attention layer, so that convolutions, states, selections and experts could all leak."""
    return small_k3(full_attention="dsa")


@pytest.fixture(scope="module")
def step(model: Any) -> moec.CompiledStep:
    return moec.compile(model, Plan(batch=2, length=40, packing=True, dynamic="length", min_length=8))


def test_c26_padding_is_not_seen(model: Any, step: moec.CompiledStep) -> None:
    """One step for all lengths; the loss includes the indexers'."""
    loss, gradients = reference(model)
    for length, left in ((16, False), (16, True), (40, False), (40, True)):
        batch = padded(length, left)
        assert distance(step.loss(batch)["objective"], loss) <= 2e-6, (length, left)
        assert_equal_gradients(step.gradients(batch), gradients, 2e-5)


def test_c26_padding_that_is_trained_on_is_seen(model: Any, step: moec.CompiledStep) -> None:
    batch = padded(16, left=False)
    batch["labels"][:, 9:] = batch["input_ids"][:, 9:]
    assert distance(step.loss(batch)["objective"], reference(model)[0]) > 1e-3


def test_c26_routing_counts_are_the_models_own(model: Any, step: moec.CompiledStep) -> None:
    """Quantile balancing counts every token that is routed, padding too: eager and compiled the same."""
    eager, batch = copy.deepcopy(model), padded(16, left=True)
    before = {path: router.histogram.clone() for path, router in model.routers().items()}
    inverse = torch.tensor(0.1)
    with torch.no_grad():
        step.program.forward(step.state, {**batch, "inverse_tokens": inverse})
        eager(batch["input_ids"], batch["labels"], batch["document_ids"], inverse_tokens=inverse)
    for path, router in model.routers().items():
        assert torch.equal(router.histogram, eager.routers()[path].histogram)
        # The histogram counts one quantile per token and expert.
        added = int((router.histogram - before[path]).sum())
        assert added == batch["input_ids"].numel() * model.config.experts
