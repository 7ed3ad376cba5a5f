"""C14: routing weights that play no part in the loss, and weights that are applied to the input of the experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moec
from moec.compiler import dialect

from ..spine import PLAN, WIDTH, Language, assert_equal_gradients, batch_for, distance, eager, seeded

EXPERTS = 4


class Experts(nn.Module):
    """Top-2 experts of one matrix each; `weigh` says where the routing weights go."""

    def __init__(self, weigh: str, fused: bool) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.matrices = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))
        self.weigh, self.fused = weigh, fused

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        weights, chosen = self._route(tokens)
        rows, order, offsets = dialect.permute(tokens, chosen, experts=EXPERTS)
        if self.weigh == "input":  # llama4
            rows = rows * weights.flatten()[order].unsqueeze(-1)
        rows = dialect.grouped_linear(torch.tanh(rows), self.matrices, offsets)
        given = weights if self.weigh == "output" else torch.ones_like(weights)
        return hidden + dialect.unpermute(rows, order, given).view_as(hidden)

    def _route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(tokens)
        if self.fused:
            return dialect.route(
                logits, None, top_k=2, score="sigmoid", softmax_after_topk=False, renormalize=True, scale=1.0
            )
        values, chosen = logits.sigmoid().topk(2)
        return values / (values.sum(-1, keepdim=True) + 1e-20), chosen


def reference(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Every expert on every token, weighted by a one-hot matrix: the same loss without any dispatch."""

    def run(layer: Experts, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        weights, chosen = layer._route(tokens)
        matrix = F.one_hot(chosen, EXPERTS).to(weights.dtype)
        weighed = (matrix * weights.unsqueeze(-1)).sum(1)
        plain = matrix.sum(1)
        if layer.weigh == "input":
            inner = torch.tanh(tokens.unsqueeze(1) * weighed.unsqueeze(-1))
            outputs = torch.einsum("nei,eoi->neo", inner, layer.matrices)
            return hidden + (outputs * plain.unsqueeze(-1)).sum(1).view_as(hidden)
        outputs = torch.einsum("ni,eoi->neo", torch.tanh(tokens), layer.matrices)
        return hidden + (outputs * (weighed if layer.weigh == "output" else plain).unsqueeze(-1)).sum(1).view_as(hidden)

    hidden = model.embed(batch["input_ids"])
    for layer in model.layers:
        hidden = run(layer, hidden)
    logits = model.head(hidden)[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), ignore_index=-100)


@pytest.mark.parametrize("fused", [True, False], ids=["route op", "plain"])
@pytest.mark.parametrize("weigh", ["nowhere", "input", "output"])
def test_c14_the_step_is_eagers_wherever_the_weights_go(weigh: str, fused: bool) -> None:
    model = seeded(Language, Experts(weigh, fused), Experts(weigh, fused))
    batch = batch_for(PLAN)
    loss, gradients = eager(model, batch)
    assert distance(loss, reference(model, batch)) <= 1e-5, "the eager model itself"
    step = moec.compile(model, PLAN)
    assert distance(step.loss(batch)["lm_loss"], loss) <= 1e-6
    found = step.gradients(batch)
    assert_equal_gradients(found, gradients)
    router = found.get("layers.0.router.weight")
    assert (router is None or not router.any()) == (weigh == "nowhere")


def test_c14_weights_at_the_wrong_end_are_seen() -> None:
    batch = batch_for(PLAN)
    wrong = moec.compile(seeded(Language, Experts("output", True)), PLAN).gradients(batch)
    _, gradients = eager(seeded(Language, Experts("input", True)), batch)
    with pytest.raises(AssertionError):
        assert_equal_gradients(wrong, gradients)
