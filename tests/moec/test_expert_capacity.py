"""Experts with a capacity, in whole steps: rows left out are counted, or refused on every rank before any update."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import moec
from moec.compiler.errors import CapacityError, PlanError
from moec.compiler.plan import MeshPlan, Plan
from moec.placing import UnconnectedStep
from moec.rank_checks import verify_lockstep
from moec.simulated import SimulatedRanks

from ..spine import VOCABULARY, small_k3

RANKS, LENGTH, EXPERTS = 2, 8, 4


def plan_with(capacity: float, overflow: str, accumulation: int = 1) -> Plan:
    mesh = MeshPlan(RANKS, RANKS, capacity=capacity, overflow=cast(Any, overflow))
    return Plan(batch=1, length=LENGTH, accumulation=accumulation, mesh=mesh, check=True)


def small_model() -> Any:
    """Experts in the second layer alone: what one layer leaves out would change how the next one routes."""
    return small_k3(experts=EXPERTS, dense_layers=1, balancing=False)


@cache
def simulated(capacity: float, overflow: str, accumulation: int = 1) -> SimulatedRanks:
    model = small_model()
    return cast(UnconnectedStep, moec.compile(model, plan_with(capacity, overflow, accumulation))).simulate_ranks()


def batch_of(accumulation: int = 1) -> dict[str, Tensor]:
    shape = (accumulation, RANKS, LENGTH) if accumulation > 1 else (RANKS, LENGTH)
    ids = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def rows_beyond(capacity: float, batch: dict[str, Tensor]) -> int:
    """Counted from the routers' own choices: eager, each rank and microbatch by itself."""
    model = small_model()
    counts: list[Tensor] = []
    for router in model.routers().values():
        router.register_forward_hook(
            lambda module, args, output: counts.append(torch.bincount(output[1].flatten(), minlength=EXPERTS))
        )
    for row in batch["input_ids"].flatten(0, -2):
        model(row[None], row[None])
    room = -(-capacity * LENGTH * 2 // EXPERTS)
    return int((torch.stack(counts) - int(room)).clamp_min(0).sum())


@pytest.mark.parametrize("accumulation", [1, 2])
def test_rows_left_out_are_counted(accumulation: int) -> None:
    batch = batch_of(accumulation)
    wanted = rows_beyond(0.75, batch)
    assert wanted > 0
    many = simulated(0.75, "drop", accumulation)
    assert int(many.loss(batch)["dropped_rows"]) == wanted
    for _ in range(2):  # each step counts its own rows only
        assert int(cast(Tensor, many(batch, lr=0.0).metrics["dropped_rows"])) == wanted
    assert int(simulated(4.0, "drop").loss(batch_of())["dropped_rows"]) == 0


def test_too_many_rows_stop_every_rank_before_the_update() -> None:
    many, batch = simulated(0.75, "refuse"), batch_of()
    before = many.weights()
    rows = many._rows(batch)

    def attempt(rank: int) -> str:
        with pytest.raises(CapacityError) as caught:
            many.steps[rank](rows[rank])
        return str(caught.value)

    texts = many.run(attempt)
    assert len(set(texts)) == 1
    assert "layers.1.feed_forward.mlp.experts" in texts[0]
    assert "takes at most 3 rows from a rank" in texts[0]
    after = many.weights()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_forward_alone_and_gradients_refuse_too() -> None:
    many, batch = simulated(0.75, "refuse"), batch_of()
    for call in (many.loss, many.gradients):
        with pytest.raises(CapacityError, match="rows more than it takes"):
            call(batch)


def test_enough_capacity_is_as_one_rank() -> None:
    report = verify_lockstep(small_k3(experts=EXPERTS), plan_with(4.0, "refuse", accumulation=2), steps=2)
    assert report.equal, str(report)


def test_a_capacity_without_an_exchange_is_refused() -> None:
    options: dict[str, Any] = {"fsdp": 2, "capacity": 1.0}
    with pytest.raises(PlanError, match=r"mesh\.capacity is 1\.0, mesh\.ep is 1"):
        MeshPlan(**options)
