"""What the cases of several ranks share: a step on simulated ranks beside eager PyTorch on the rows of all."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

import moec
from moec.compiler.plan import MeshPlan, Plan
from moec.eager import EagerStep
from moec.placing import UnconnectedStep
from moec.simulated import SimulatedRanks

from ..spine import assert_equal_gradients, distance

ROWS, LENGTH = 4, 8


def on_ranks(model: nn.Module, fsdp: int, ep: int, **options: Any) -> SimulatedRanks:
    """The model's step on a mesh whose ranks have ROWS rows between them."""
    plan = Plan(batch=ROWS // fsdp, length=LENGTH, mesh=MeshPlan(fsdp=fsdp, ep=ep, **options), check=True)
    return cast(UnconnectedStep, moec.compile(model, plan)).simulate_ranks()


def assert_like_one_rank(many: SimulatedRanks, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Loss within 1e-6 and every gradient within 1e-5 of eager PyTorch on the joined batch; returns the gradients."""
    losses, wanted = EagerStep(model, Plan(batch=ROWS, length=LENGTH)).gradients(batch)
    assert distance(many.loss(batch)["lm_loss"], losses["lm_loss"]) <= 1e-6
    found = many.gradients(batch)
    assert_equal_gradients(found, wanted)
    return found
