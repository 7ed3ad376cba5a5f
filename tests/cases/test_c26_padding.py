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


def assert_only_sentences_count(model: Any, step: moec.CompiledStep, batch: dict[str, Tensor]) -> None:
    """The loss, which includes the indexers', and the gradients are those of the sentences alone."""
    loss, gradients = reference(model)
    assert distance(step.loss(batch)["objective"], loss) <= 2e-6
    assert_equal_gradients(step.gradients(batch), gradients, 2e-5)


@pytest.mark.parametrize("length", [16, 40])
@pytest.mark.parametrize("left", [False, True])
def test_c26_padding_is_not_counted(model: Any, step: moec.CompiledStep, length: int, left: bool) -> None:
    """One step for all lengths."""
    assert_only_sentences_count(model, step, padded(length, left))


def test_c26_padding_that_counts_is_seen(model: Any, step: moec.CompiledStep) -> None:
    """As a part of its sentence, or as tokens to be predicted."""
    joined, predicted = padded(16, left=True), padded(16, left=False)
    joined["document_ids"][:] = 0
    predicted["labels"][:, 9:] = predicted["input_ids"][:, 9:]
    for batch in (joined, predicted):
        with pytest.raises(AssertionError):
            assert_only_sentences_count(model, step, batch)


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
