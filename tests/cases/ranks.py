"""What the cases of several ranks share: a step on simulated ranks, or real ones, beside eager PyTorch on all rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

import moec
from moec.compiler.plan import MeshPlan, Plan
from moec.eager import EagerStep
from moec.placing import UnconnectedStep
from moec.runtime.groups import connect
from moec.runtime.sharded_state import ShardedState
from moec.runtime.whole import whole_weights
from moec.simulated import SimulatedRanks, split_rows

from ..spine import assert_equal_gradients, distance

ROWS, LENGTH = 4, 8


class Numbers(Protocol):
    """A step of one rank, or the steps of simulated ranks."""

    def loss(self, batch: dict[str, Tensor], /) -> dict[str, Tensor]: ...
    def gradients(self, batch: dict[str, Tensor], /) -> dict[str, Tensor]: ...


def plan_for(fsdp: int, ep: int, **options: Any) -> Plan:
    """The plan of a mesh whose ranks have ROWS rows between them."""
    return Plan(batch=ROWS // fsdp, length=LENGTH, mesh=MeshPlan(fsdp=fsdp, ep=ep, **options), check=True)


def on_ranks(model: nn.Module, fsdp: int, ep: int, **options: Any) -> SimulatedRanks:
    """The model's step on a mesh."""
    return cast(UnconnectedStep, moec.compile(model, plan_for(fsdp, ep, **options))).simulate_ranks()


def in_process(
    rank: int, make: Callable[[], nn.Module], fsdp: int, ep: int, batches: list[dict[str, Tensor]]
) -> list[dict[str, Tensor]]:
    """What one of several real ranks does: loss and whole gradients of each batch, and a step of it that ends."""
    plan, found = plan_for(fsdp, ep), []
    connect(plan.mesh, torch.device("cpu"))
    step = moec.compile(make(), plan)
    for batch in batches:
        rows = split_rows(batch, plan)[rank]
        gradients = whole_weights(cast(ShardedState, step.state), step.gradients(rows))
        found.append({"loss": step(rows, lr=0.0).loss} | gradients)
    return found


def assert_like_one_rank(many: Numbers, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Loss within 1e-6 and every gradient within 1e-5 of eager PyTorch on the joined batch; returns the gradients."""
    losses, wanted = EagerStep(model, Plan(batch=ROWS, length=LENGTH)).gradients(batch)
    assert distance(many.loss(batch)["lm_loss"], losses["lm_loss"]) <= 1e-6
    found = many.gradients(batch)
    assert_equal_gradients(found, wanted)
    return found
