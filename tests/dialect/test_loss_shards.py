"""A vocabulary cut over simulated ranks: statistics per shard, two reductions, the loss and gradients of the whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor

from moec.compiler import dialect
from moec.compiler.dialect.head import Statistics
from tests.dialect.checks import assert_close, value_and_grads
from tests.dialect.loss_cases import CLASSES, ROWS, eager, labels_for, operands, weights_for

Reduction = Callable[[Tensor], Tensor]


def sharded_loss(
    inputs: list[Tensor], labels: Tensor, sizes: list[int], class_weights: Tensor | None = None, **options: Any
) -> list[Tensor]:
    """The losses [N] as every rank has them; smoothing and class weights as in `linear_cross_entropy`."""
    hidden, weight, *bias = inputs
    form = {name: options.pop(name) for name in ("logit_scale", "softcap", "columns") if name in options}
    first, parts = 0, []
    for size in sizes:
        part = slice(first, first + size)
        weights = None if class_weights is None else class_weights[part]
        more: dict[str, Any] = form | {"first_class": first, "class_weights": weights, "rows": 3}
        more["smoothed"] = bool(options.get("label_smoothing"))
        parts.append(dialect.logit_statistics(hidden, weight[part], labels, *(b[part] for b in bias), **more))
        first += size
    if class_weights is not None:
        options["label_weights"] = class_weights[labels.clamp(0, first - 1)]
        options["weight_of_all_classes"] = class_weights.sum()
    return [dialect.loss_of_statistics(found, labels, first, **options) for found in all_combined(parts)]


def all_combined(parts: list[Statistics]) -> list[Statistics]:
    """`combine` on every simulated rank. Each all-reduce needs what the other ranks give: the first run collects it."""
    maximum = reduce(torch.maximum, [part.maximum.detach() for part in parts])
    given: list[Tensor] = []

    def collect(value: Tensor) -> Tensor:
        given.append(value)
        return value

    for part in parts:
        dialect.combine(part, lambda _: maximum, collect)
    total = torch.stack(given).sum(0)
    return [dialect.combine(part, lambda _: maximum, lambda _: total) for part in parts]


@pytest.mark.parametrize("sizes", [[CLASSES], [4, 4, 3], [1] * CLASSES, [10, 0, 1]], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softcap": 2.0, "logit_scale": 0.5, "columns": 2},
        {"label_smoothing": 0.1},
        {"label_smoothing": 0.2, "class_weights": weights_for(CLASSES)},
        {"class_weights": weights_for(CLASSES)},
    ],
    ids=lambda options: ",".join(options),
)
@pytest.mark.parametrize("bias", [False, True])
def test_every_rank_has_the_loss_and_gradients_of_the_whole(
    bias: bool, options: dict[str, Any], sizes: list[int]
) -> None:
    inputs, labels = operands(bias=bias), labels_for()
    whole = {name: value for name, value in options.items() if name != "columns"}
    expected = value_and_grads(lambda *x: eager(x, labels, reduction="none", **whole), inputs)
    for rank in range(len(sizes)):
        found = value_and_grads(lambda *x, r=rank: sharded_loss(list(x), labels, sizes, **options)[r], inputs)
        assert_close(found, expected)


def test_a_maximum_of_one_shard_does_not_overflow_another() -> None:
    hidden, weight = operands()
    weight[:4] *= 1e3
    inputs, labels = [hidden.float(), weight.float()], labels_for()
    found = value_and_grads(lambda *x: sharded_loss(list(x), labels, [4, 4, 3])[1], inputs)
    assert all(value.isfinite().all() for value in found)
    assert_close(found, value_and_grads(lambda *x: eager(x, labels, reduction="none"), inputs), 1e-4)


def test_a_label_of_no_shard_gives_nan() -> None:
    labels = labels_for()
    labels[4] = CLASSES
    for losses in sharded_loss(operands(), labels, [6, 5]):
        assert losses.isnan().nonzero().flatten().tolist() == [4]


def test_statistics_of_a_shard() -> None:
    hidden, weight = operands()
    labels = torch.arange(ROWS) + 2
    found = dialect.logit_statistics(hidden, weight[4:8], labels, first_class=4, smoothed=True)
    logits = hidden @ weight[4:8].t()
    target = torch.tensor([logits[i, y - 4] if 4 <= y < 8 else 0 for i, y in enumerate(labels)]).double()
    expected = (logits.amax(1), (logits - logits.amax(1, keepdim=True)).exp().sum(1), target, logits.sum(1))
    assert_close(found, expected)


@pytest.mark.parametrize("columns", [6, 4])
def test_contract(columns: int) -> None:
    hidden, weight, bias = (x.requires_grad_() for x in operands(4, 6, True))
    labels = torch.tensor([3, -100, 7, 12])
    arguments = (hidden, weight, labels, bias, weights_for(6), 3, True, 0.5, 2.0, 3, columns)
    torch.library.opcheck(torch.ops.moec.logit_statistics.default, arguments)
    # The maximum is a constant: only what `combine` makes of it has a gradient that finite differences see.
    leaves = (hidden, weight, bias)

    def lse_target_and_sum(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        found = Statistics(*torch.ops.moec.logit_statistics(h, w, labels, b, *arguments[4:]))
        return found.lse, found.target, found.weighted

    assert torch.autograd.gradcheck(lse_target_and_sum, leaves, atol=1e-7, rtol=1e-5)
