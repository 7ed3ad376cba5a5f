"""C19: a bf16 model whose router computes in float32 chooses by margins that bf16 does not have, fused or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import moec
from moec.compiler import dialect
from moec.compiler.plan import Plan
from moec.passes.normalize import FOLDS
from moec.passes.rewrite import Rewriter

from ..spine import PLAN, VOCABULARY, WIDTH, Language, Layer, seeded
from .planting import Op, plant

EXPERTS = 4
STEPS = (1, 3, 0, 2)
"""Margins of the experts' logits in units of 2**-10, one step of bf16 in a weight and an eighth of one in a logit."""


class Experts(nn.Module):
    """Top-2 experts by a router in float32, in a model of whatever dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.matrices = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts [N, 2]."""
        scores = F.linear(tokens.float(), self.router.weight.float()).sigmoid()
        weights, chosen = scores.topk(2)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20), chosen

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        weights, chosen = self.route(tokens)
        rows, order, offsets = dialect.permute(tokens, chosen, experts=EXPERTS)
        rows = dialect.grouped_linear(torch.tanh(rows), self.matrices, offsets)
        return hidden + dialect.unpermute(rows, order, weights.to(rows.dtype)).view_as(hidden)


def model() -> Any:
    """Tokens are multiples of one vector: their logits are c * (1 + margin), a tie of all experts in bf16."""
    made = seeded(Language, Experts(), Layer()).to(torch.bfloat16)
    factors = torch.tensor([1.0, -1.0, 2.0, -0.5]).repeat(VOCABULARY // 4)
    with torch.no_grad():
        made.embed.weight.copy_(factors.unsqueeze(1).expand(VOCABULARY, WIDTH))
        weight = torch.full((EXPERTS, WIDTH), 1 / WIDTH)
        weight[:, 0] += torch.tensor(STEPS) * 2.0**-10
        made.layers[0].router.weight.copy_(weight)
    return made


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (PLAN.batch, PLAN.length), generator=generator)
    return {"input_ids": ids, "labels": ids}


def assert_choices_are_eagers(step: moec.CompiledStep, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The route op of the step sees float32 logits, and takes the experts that the model in eager takes."""
    seen: list[tuple[torch.dtype, Tensor]] = []

    def recorded(route: Op) -> Op:
        def run(logits: Tensor, *args: Any, **options: Any) -> Any:
            weights, chosen = route(logits, *args, **options)
            seen.append((logits.dtype, chosen))
            return weights, chosen

        return run

    with monkeypatch.context() as watched:
        plant(watched, step, route=recorded)
        step.loss(batch())
    ((dtype, chosen),) = seen
    assert dtype == torch.float32
    with torch.no_grad():
        _, wanted = made.layers[0].route(made.embed(batch()["input_ids"]).flatten(0, 1))
    assert {frozenset(pair) for pair in wanted.tolist()} == {frozenset({1, 3}), frozenset({0, 2})}
    assert torch.equal(chosen.sort().values, wanted.sort().values)


def test_c19_near_ties_choose_as_the_models_router(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    tokens = made.embed(batch()["input_ids"]).flatten(0, 1)
    ties = F.linear(tokens, made.layers[0].router.weight)
    assert bool((ties == ties[:, :1]).all()), "in bf16 there is nothing to choose by"
    assert_choices_are_eagers(moec.compile(made, Plan(**{**vars(PLAN), "check": True})), made, monkeypatch)


def test_c19_casts_that_are_dropped_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that takes every cast for one that changes nothing."""

    def dropped(node: fx.Node, rewriter: Rewriter) -> Any:
        return node.args[0]

    monkeypatch.setitem(FOLDS, torch.ops.aten.to.dtype, dropped)
    with pytest.raises(AssertionError):
        assert_choices_are_eagers(moec.compile(model(), Plan(**{**vars(PLAN), "check": False})), model(), monkeypatch)


def test_c19_logits_that_pass_through_bf16_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    step = moec.compile(made, PLAN)
    plant(monkeypatch, step, route=lambda route: lambda logits, **rest: route(logits.bfloat16().float(), **rest))
    with pytest.raises(AssertionError):
        assert_choices_are_eagers(step, made, monkeypatch)
