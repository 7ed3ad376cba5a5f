"""Peak memory of the loss ops, by counting allocations: gradients, small values, and a chunk of logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moec.compiler.allocations import AllocationCount
from moec.compiler.dialect import log_probs, loss, loss_shards
from moec.compiler.dialect.head import REFERENCE
from tests.dialect.loss_cases import WIDTH, labels_for, operands, weights_for

ROWS, CLASSES = 600, 1000
Chunk = tuple[int, int]


def _given() -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = (x.float() for x in operands(ROWS, CLASSES))
    return hidden, weight, labels_for(ROWS, CLASSES)


def per_row(chunk: Chunk, *form: Any) -> None:
    hidden, weight, labels = _given()
    class_weights = weights_for(CLASSES).float()
    options = (hidden, weight, labels, None, class_weights, -100, *form, *chunk)
    losses, lse, *saved = loss.forward(REFERENCE, *options)
    loss.backward(REFERENCE, losses, lse, *saved, *options)


def summed(chunk: Chunk, *form: Any) -> None:
    hidden, weight, labels = _given()
    tokens = weights_for(ROWS).float()
    options = (tokens, tokens, None, weights_for(CLASSES).float(), -100, *form, *chunk, True, True, torch.float32)
    total, *rest = loss.sum_forward(REFERENCE, hidden, weight, labels, *options)
    loss.sum_backward(total, *rest, torch.float32)


def picked(chunk: Chunk, scale: float, softcap: float, smoothing: float) -> None:
    options = (*_given(), None, -100, scale, softcap, *chunk)
    found, *saved = log_probs.forward(REFERENCE, *options)
    log_probs.backward(REFERENCE, found, *saved, *options)


def shard(chunk: Chunk, scale: float, softcap: float, smoothing: float) -> None:
    options = (*_given(), None, None, 0, True, scale, softcap, *chunk)
    maximum, total, target, weighted = loss_shards.forward(REFERENCE, *options)
    loss_shards.backward(REFERENCE, total, target, weighted, maximum, *options)


def peak(run: Callable[..., None], chunk: Chunk, form: tuple[float, ...]) -> int:
    """Bytes beyond those of inputs, of gradients (their sums and the results), and of 100 numbers per row or class."""
    with AllocationCount() as memory:
        run(chunk, *form)
    return memory.peak - 4 * (3 * WIDTH * (ROWS + CLASSES) + 100 * (ROWS + CLASSES))


@pytest.mark.parametrize("columns", [CLASSES, 250])
@pytest.mark.parametrize("form", [(1.0, 0.0, 0.0), (0.5, 3.0, 0.1)], ids=str)
@pytest.mark.parametrize("run", [per_row, summed, picked, shard])
def test_peak_memory_is_that_of_a_chunk(
    run: Callable[..., None], form: tuple[float, ...], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(REFERENCE, "min_rows", 1)
    monkeypatch.setattr(REFERENCE, "cached_logits", 1 << 40)
    assert peak(run, (100, columns), form) <= 4 * 100 * columns
    assert peak(run, (200, columns), form) <= 4 * 200 * columns
    grown = peak(run, (600, columns), form) - peak(run, (200, columns), form)
    assert 0.5 <= grown / (4 * 400 * columns) <= 1.05, "it grows with the chunk, or nothing was counted"


def test_whole_logits_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(chunk: Chunk, *form: Any) -> None:
        hidden, weight, labels = _given()
        torch.nn.functional.cross_entropy(hidden @ weight.t(), labels)

    assert peak(whole, (100, CLASSES), ()) > 4 * 100 * CLASSES
