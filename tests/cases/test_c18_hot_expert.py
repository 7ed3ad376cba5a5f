"""C18: all tokens to one expert, then balanced, then to another one: right results, no rebuild, no growth, no drop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moec
from moec import driver
from moec.compiler import dialect
from moec.compiler.plan import OptimizerPlan, Plan
from moec.eager import EagerStep

from ..spine import VOCABULARY, WIDTH, Language, Layer, assert_equal_gradients, distance, seeded

EXPERTS = 4
PLAN = Plan(batch=2, length=8, optimizer=OptimizerPlan(lr=1e-2))


class ByToken(nn.Module):
    """Experts chosen by the first features of the hidden state, which the embedding decides; weighted by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.choose = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))
        self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        scores = self.choose(tokens).softmax(-1)
        weights, experts = scores.topk(1)
        rows, order, offsets = dialect.permute(tokens, experts, experts=EXPERTS)
        rows = F.silu(dialect.grouped_linear(rows, self.up, offsets))
        rows = dialect.grouped_linear(rows, self.down, offsets)
        return hidden + dialect.unpermute(rows, order, weights).view_as(hidden)


def model() -> Any:
    """Token t goes to expert t % 4: its embedding points at that expert's row of the router."""
    made = seeded(Language, ByToken(), Layer())
    with torch.no_grad():
        made.layers[0].choose.weight.copy_(F.pad(torch.eye(EXPERTS), (0, WIDTH - EXPERTS)))
        made.embed.weight[:, :EXPERTS] = 2 * F.one_hot(torch.arange(VOCABULARY) % EXPERTS, EXPERTS).float()
    return made


def batch(experts: list[int], seed: int) -> dict[str, Tensor]:
    """Tokens that go to these experts alone."""
    generator = torch.Generator().manual_seed(seed)
    shape = PLAN.batch, PLAN.length
    group = torch.randint(VOCABULARY // EXPERTS, shape, generator=generator)
    expert = torch.tensor(experts)[torch.randint(len(experts), shape, generator=generator)]
    ids = EXPERTS * group + expert
    return {"input_ids": ids, "labels": ids}


BATCHES = [batch(experts, seed) for seed, experts in enumerate([[0]] * 3 + [[0, 1, 2, 3]] * 2 + [[3]] * 2)]


def counts_of(made: Any, ids: Tensor) -> list[int]:
    with torch.no_grad():
        chosen = made.layers[0].choose(made.embed(ids)).argmax(-1)
    return chosen.flatten().bincount(minlength=EXPERTS).tolist()


def kept_bytes(step: moec.CompiledStep, one: dict[str, Tensor]) -> int:
    """What the forward hands to the backward."""
    microbatch = one | {"inverse_tokens": torch.tensor(0.1)}
    with torch.no_grad():
        _, saved = step.program.forward(step.state, microbatch)
    return sum(t.numel() * t.element_size() for t in torch.utils._pytree.tree_leaves(saved) if isinstance(t, Tensor))


def test_c18_steps_are_eagers_whoever_is_hot(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    assert [max(counts_of(made, one["input_ids"])) for one in BATCHES[:3]] == [16, 16, 16]
    assert min(counts_of(made, BATCHES[3]["input_ids"])) > 0
    assert counts_of(made, BATCHES[-1]["input_ids"])[3] == 16
    step, eager = moec.compile(made, PLAN), EagerStep(model(), PLAN)
    monkeypatch.setattr(driver, "capture", None)  # nothing is traced again
    held = set()
    for one in BATCHES:
        losses, gradients = eager.gradients(one)
        found = step.gradients(one)
        assert_equal_gradients(found, gradients)
        idle = [expert for expert, count in enumerate(counts_of(eager.model, one["input_ids"])) if count == 0]
        assert not found["layers.0.up"][idle].any()
        held.add(kept_bytes(step, one))
        rate = step.learning_rate()
        assert distance(step(one, lr=rate).loss, losses["lm_loss"]) <= 1e-6
        eager.update(gradients, rate)
        for name, parameter in eager.model.named_parameters():
            assert distance(step.state.weights[name], parameter) <= 1e-5, name
            parameter.data.copy_(step.state.weights[name])  # each step is compared from equal weights
    assert len(held) == 1, "what is kept for backward depends on the number of tokens alone"


def test_c18_a_dropped_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of the hot expert is lost without a word."""
    step = moec.compile(model(), PLAN)
    losses, _ = EagerStep(model(), PLAN).gradients(BATCHES[0])
    assert distance(step.loss(BATCHES[0])["lm_loss"], losses["lm_loss"]) <= 1e-6
    plain = step.program.moec.grouped_linear

    def capped(x: Tensor, weight: Tensor, offsets: Tensor, *more: Any, **named: Any) -> Tensor:
        rows = plain(x, weight, offsets, *more, **named)
        return rows.index_fill(0, torch.tensor([3]), 0.0)

    monkeypatch.setattr(step.program.moec, "grouped_linear", capped)
    assert distance(step.loss(BATCHES[0])["lm_loss"], losses["lm_loss"]) > 1e-5
