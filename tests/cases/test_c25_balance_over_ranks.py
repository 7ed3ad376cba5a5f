"""C25: the same coefficient gives the same balance gradient on any number of ranks.

Hugging Face models: counts are those of all ranks, so every gradient is that of one rank with the whole batch. A model
that returns its whole loss (C24's): each rank's loss, its balance part included, counts by its valid tokens.
"""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import moec
from moec.compiler.plan import MeshPlan, Plan
from moec.placing import UnconnectedStep
from moec.rank_checks import verify_lockstep

from ..models.huggingface.support import build
from ..spine import PLAN, assert_equal_gradients, batch_for, eager, seeded
from .test_c24_auxiliary_loss import Model


def with_aux_loss(kind: str, **changes: Any) -> nn.Module:
    model: Any = build(kind, output_router_logits=True, router_aux_loss_coef=0.5, **changes).model
    return model.train()  # type: ignore[no-any-return]


def assert_counts_are_those_of_all(kind: str, fsdp: int, ep: int, **changes: Any) -> None:
    plan = Plan(batch=1, length=16, accumulation=2, mesh=MeshPlan(fsdp=fsdp, ep=ep))
    report = verify_lockstep(with_aux_loss(kind, **changes), plan, steps=1)
    assert report.equal, str(report)
    names = {comparison.name for comparison in report.comparisons}
    assert "aux_loss" in names
    assert any("mlp.gate.weight" in name or "router.weight" in name for name in names)


@pytest.mark.parametrize(
    ("kind", "fsdp", "ep"),
    [
        ("mixtral", 2, 1),
        ("qwen3_next", 2, 2),
        pytest.param("mixtral", 4, 4, marks=pytest.mark.slow),
        pytest.param("gpt_oss", 3, 3, marks=pytest.mark.slow),
    ],
)
def test_c25_counts_of_all_ranks(kind: str, fsdp: int, ep: int) -> None:
    assert_counts_are_those_of_all(kind, fsdp, ep)


@pytest.mark.slow
def test_c25_counts_of_each_rank_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.moec, "rank_mean", lambda x, ranks, role: x.clone())
    with pytest.raises(AssertionError, match="aux_loss"):
        assert_counts_are_those_of_all("mixtral", 2, 1, num_hidden_layers=1)


COEFFICIENT = 0.1


def assert_ranks_count_by_their_tokens(ranks: int, coefficient: float) -> None:
    """The gradients of ranks that train with `coefficient` are the sum of each rank's, by its share of the tokens."""
    plan = Plan(batch=1, length=PLAN.length, mesh=MeshPlan(fsdp=ranks))
    batch = batch_for(Plan(batch=ranks, length=PLAN.length))
    many = cast(UnconnectedStep, moec.compile(seeded(Model, coefficient), plan)).simulate_ranks()
    found = many.gradients(batch)
    valid = [int((row[1:] != -100).sum()) for row in batch["labels"]]
    assert len(set(valid)) > 1
    model = seeded(Model, COEFFICIENT)
    wanted: dict[str, Tensor | None] = {}
    for rank, count in enumerate(valid):
        _, grads = eager(model, {name: value[rank : rank + 1] for name, value in batch.items()})
        for name, grad in grads.items():
            assert grad is not None
            wanted[name] = grad * (count / sum(valid)) + wanted.get(name, torch.zeros(()))  # type: ignore[operator]
    assert_equal_gradients(found, wanted)


@pytest.mark.parametrize("ranks", [2, 4])
def test_c25_each_rank_by_itself(ranks: int) -> None:
    assert_ranks_count_by_their_tokens(ranks, COEFFICIENT)


def test_c25_a_coefficient_that_shrinks_with_the_ranks_is_seen() -> None:
    with pytest.raises(AssertionError):
        assert_ranks_count_by_their_tokens(2, COEFFICIENT / 2)
