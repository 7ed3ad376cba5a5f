"""C34: documents of 7, 1 and 9 tokens packed in a row are those documents alone, through the compiled step.

Hugging Face models are in tests/models/huggingface/test_packing.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import moec
from moec.compiler.plan import Plan
from moec.eager import EagerStep

from ..spine import VOCABULARY, assert_equal_gradients, distance, small_k3

LENGTHS = (7, 1, 9)
PLAN = Plan(batch=2, length=sum(LENGTHS), packing=True)
KINDS = ("mla", "dsa", "gqa")


def batch(first: int = 0) -> dict[str, Tensor]:
    """Two packed rows; `first` is the id of the first document."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (2, sum(LENGTHS)), generator=generator)
    documents = torch.repeat_interleave(torch.arange(first, first + len(LENGTHS)), torch.tensor(LENGTHS)).expand(2, -1)
    starts = torch.cat([torch.ones(2, 1, dtype=torch.bool), documents[:, 1:] != documents[:, :-1]], 1)
    return {"input_ids": ids, "labels": ids.masked_fill(starts, -100), "document_ids": documents.contiguous()}


def made(kind: str) -> Any:
    # Eight heads: with few of them many scores are exactly 0, and which of equal keys is taken depends on the length.
    return small_k3(full_attention=kind, indexer_heads=8)


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> tuple[moec.CompiledStep, Any]:
    """The compiled step for packed rows, and the model."""
    model = made(request.param)
    return moec.compile(model, PLAN), copy.deepcopy(model)


def separate(model: Any, given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients of the documents one by one in eager, weighted by their tokens."""
    valid = sum(length - 1 for length in LENGTHS) * 2
    model.zero_grad(set_to_none=True)
    total, start = torch.zeros(()), 0
    for length in LENGTHS:
        ids, labels = (given[name][:, start : start + length] for name in ("input_ids", "labels"))
        output = model(ids, labels, inverse_tokens=torch.tensor(1.0 / valid))
        output.loss.backward()
        total, start = total + output.lm_loss.detach(), start + length
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("first", [0, 5])
def test_c34_packed_rows_are_their_documents(pair: tuple[moec.CompiledStep, Any], first: int) -> None:
    step, model = pair
    given = batch(first)
    loss, gradients = separate(model, given)
    assert distance(step.loss(given)["lm_loss"], loss) <= 2e-6
    assert_equal_gradients(step.gradients(given), gradients, 2e-5)


def test_c34_the_first_document_does_not_matter_to_the_others(pair: tuple[moec.CompiledStep, Any]) -> None:
    step, _ = pair
    given = batch()
    given["labels"][:, : LENGTHS[0]] = -100
    changed = given["input_ids"].clone()
    changed[:, : LENGTHS[0]] = (changed[:, : LENGTHS[0]].flip(1) + 1) % VOCABULARY
    assert torch.equal(step.loss(given)["lm_loss"], step.loss(given | {"input_ids": changed})["lm_loss"])


def test_c34_a_leak_is_seen(pair: tuple[moec.CompiledStep, Any]) -> None:
    """The same rows as one document each: attention, convolution and state see what lies before."""
    step, model = pair
    given = batch()
    loss, _ = separate(model, given)
    leaking = given | {"document_ids": torch.zeros_like(given["document_ids"])}
    assert distance(step.loss(leaking)["lm_loss"], loss) > 1e-4


def test_c34_the_eager_reference_keeps_them_apart_too(pair: tuple[moec.CompiledStep, Any]) -> None:
    _, model = pair
    given = batch()
    loss, _ = separate(model, given)
    model.zero_grad(set_to_none=True)
    assert distance(EagerStep(model, PLAN).gradients(given)[0]["lm_loss"], loss) <= 2e-6
