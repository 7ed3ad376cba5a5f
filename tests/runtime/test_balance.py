"""The balance update is the dialect's, in place, over the sum of the microbatches."""

from __future__ import annotations

import torch
from torch import nn

from moec.compiler import dialect
from moec.runtime import StepState, update_balance


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(8))
        self.register_buffer("histogram", torch.zeros(8, 1000, dtype=torch.int64), persistent=False)


def test_bias_is_rewritten_in_place_and_the_counts_start_again() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([Router(), Router()])
    state = StepState.from_module(model)
    logits = torch.randn(512, 8) + torch.linspace(-2, 2, 8)
    router = model[1]
    for part in logits.split(128):  # four microbatches
        router.histogram += dialect.route_histogram(part, router.bias, top_k=2)
    whole = dialect.route_histogram(logits, router.bias, top_k=2)
    expected = dialect.balanced_bias(router.bias, whole, 2)
    bias = router.bias
    update_balance(state, [("1.bias", "1.histogram", 2)])
    assert model[1].bias is bias
    assert torch.equal(bias, expected)
    assert not torch.equal(bias, torch.zeros(8))
    assert not router.histogram.any()
    assert torch.equal(model[0].bias, torch.zeros(8))


def test_skewed_scores_balance_within_a_few_updates() -> None:
    torch.manual_seed(0)
    model = Router()
    state = StepState.from_module(model)
    logits = torch.randn(4096, 8) + torch.linspace(-2, 2, 8)

    def imbalance() -> float:
        _, chosen = dialect.route(
            logits, model.bias, top_k=2, score="sigmoid", softmax_after_topk=False, renormalize=True, scale=1.0
        )
        load = torch.bincount(chosen.flatten(), minlength=8).float()
        return float(load.max() / load.mean())

    assert imbalance() > 2
    for _ in range(6):
        model.histogram += dialect.route_histogram(logits, model.bias, top_k=2)
        update_balance(state, [("bias", "histogram", 2)])
    assert imbalance() <= 1.05
