"""C05: recomputed layers whose routing changes compile nothing anew, in torch.compile and on ranks with EP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import moec
from moec import driver
from moec.compiler.plan import CachePlan
from moec.placing import UnconnectedStep

from ..moec.dynamo import Experts, assert_same, batch_of, compiled
from ..spine import VOCABULARY, WIDTH, Language, Layer, seeded
from .ranks import assert_like_one_rank, plan_for
from .test_c03_any_count_of_tokens import CountedOnTheHost
from .test_c11_empty_ranks import batch
from .test_c18_hot_expert import EXPERTS, ByToken

STEPS = 12


class Checkpointed(Language):
    def hidden(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        return hidden


def assert_compiled_once(experts: Experts, steps: int, tell: Callable[[int], None] = lambda seed: None) -> None:
    """Steps whose tokens go to other experts each time."""
    model: Any = seeded(Checkpointed, experts, Layer())
    function, log = compiled(model)
    for seed in range(steps):
        tell(seed)
        assert_same(function, model, *batch_of(seed=seed))
        assert len(log.compiled) == 1
    assert [match.path for _, match in log.passes.matches("recognize_mlp")] == ["layers.1"], "inside a checkpoint"


@pytest.mark.usefixtures("fresh_dynamo")
def test_c05_recomputation_with_changing_routes_compiles_nothing_anew() -> None:
    assert_compiled_once(Experts(), STEPS)


@pytest.mark.usefixtures("fresh_dynamo")
def test_c05_guards_on_what_the_router_chose_are_seen() -> None:
    experts = CountedOnTheHost()
    with pytest.raises(AssertionError, match="assert 2 == 1"):
        assert_compiled_once(experts, STEPS, lambda seed: setattr(experts, "first", seed))


def routed() -> Any:
    """Two equal layers, in the first of which token t goes to expert t % 4."""
    made = seeded(Language, ByToken(), ByToken())
    with torch.no_grad():
        for layer in made.layers:
            layer.choose.weight.copy_(F.pad(torch.eye(EXPERTS), (0, WIDTH - EXPERTS)))
        made.embed.weight[:, :EXPERTS] = 2 * F.one_hot(torch.arange(VOCABULARY) % EXPERTS, EXPERTS).float()
    return made


def test_c05_on_ranks_that_share_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that recomputes what it can, EP = 2, and routes that leave out other experts in each step."""
    plan = replace(plan_for(2, 2), cache=CachePlan(policy="recompute"))
    step = cast(UnconnectedStep, moec.compile(routed(), plan))
    assert any(p.decision == "recompute" for rows in step.log.placements.values() for p in rows)
    many = step.simulate_ranks()
    monkeypatch.setattr(driver, "capture", None)  # nothing is traced again
    generator = torch.Generator().manual_seed(0)
    for seed in range(STEPS):
        count = int(torch.randint(1, EXPERTS + 1, (), generator=generator))
        experts = torch.randperm(EXPERTS, generator=generator)[:count].tolist()
        assert_like_one_rank(many, routed(), batch(experts, seed))
