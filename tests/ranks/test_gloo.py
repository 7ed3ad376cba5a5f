"""Real gloo processes against one rank: loss, every gradient, three optimizer steps, as test_lockstep.py does it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch.distributed.tensor import DTensor

from moec import driver, rank_checks
from moec.compiler.allocations import AllocationCount
from moec.compiler.deferred import deferred_init
from moec.compiler.plan import MeshPlan, Plan
from moec.models.build import build
from moec.rank_checks import verify_ranks
from moec.runtime.groups import connect
from moec.runtime.sharded_state import ShardedState
from moec.verification import Report
from tests.moec.small_models import SMALL_K3
from tests.ranks.models import HUGGINGFACE, PRESETS, model_of, needs_transformers, plan_of
from tests.runtime.processes import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
meshes = pytest.mark.parametrize(("fsdp", "ep"), [(2, 1), (2, 2), (4, 2), (4, 4)])


@meshes
@pytest.mark.parametrize("name", PRESETS)
def test_processes_equal_one_rank(name: str, fsdp: int, ep: int) -> None:
    check(name, fsdp, ep)


@needs_transformers
@meshes
@pytest.mark.parametrize("name", HUGGINGFACE)
def test_processes_of_hugging_face_models_equal_one_rank(name: str, fsdp: int, ep: int) -> None:
    check(name, fsdp, ep)


def test_a_wrong_rank_is_seen() -> None:
    """Rank 1 doubles its gradients: the loss of the first step stays, the gradients do not."""
    first, *_ = run_ranks(2, verify, "mixtral", 2, 2, True, timeout=500)
    assert not first.equal
    assert {one.kind for one in first.differences()} >= {"gradient"}
    assert all(one.equal for one in first.comparisons if one.kind == "loss" and one.step == 1)


def test_only_the_first_rank_holds_the_model() -> None:
    """The others hold their own rows, with gradients and moments, and one tensor of what they send to the first."""
    found = run_ranks(4, peak_of_verification, timeout=500)
    for rank, (peak, own, largest, total) in enumerate(found):
        assert largest < total / 4
        assert own < total / 3
        if rank:
            # Weights, two moments, gradients of the step, and those that it returns while they are compared.
            assert peak < 5 * own + 2 * largest + ACTIVATIONS
        else:
            assert peak > 3 * total, "the reference, and everything that is compared"


ACTIVATIONS = 400_000
EXPERTS = replace(
    SMALL_K3, layers=4, full_attention_layers=(2, 4), experts=64, expert_size=64, hidden_size=32, latent_size=64
)


def peak_of_verification(rank: int) -> tuple[int, int, int, int]:
    """Bytes: the most that a rank held, its weights, the largest weight, and all weights."""
    plan = Plan(batch=1, length=8, mesh=MeshPlan(fsdp=4, ep=4, prefetch=0))
    ranks = connect(plan.mesh, torch.device("cpu"))
    with deferred_init():
        model = build(EXPERTS).train()
    whole = build(EXPERTS).train() if ranks.is_first else None
    sizes = [weight.nbytes for weight in model.parameters()]
    # Around what runs, since nothing may look at a compilation: how the weights are made, and what is compared.
    memory = AllocationCount()
    driver.step_over = _counted(driver.step_over, memory)
    rank_checks.compare = _counted(rank_checks.compare, memory)
    verify_ranks(model, plan, ranks, whole, steps=1)
    own = sum(cast(DTensor, weight).to_local().nbytes for weight in model.parameters())
    return memory.peak, own, max(sizes), sum(sizes)


def _counted(function: Callable[..., Any], memory: AllocationCount) -> Callable[..., Any]:
    def counted(*arguments: Any, **options: Any) -> Any:
        with memory:
            return function(*arguments, **options)

    return counted


def check(name: str, fsdp: int, ep: int) -> None:
    first, *others = run_ranks(fsdp, verify, name, fsdp, ep, timeout=500)
    assert first.equal, str(first)
    assert len(first.losses) == 3
    assert first.losses[0] != first.losses[-1], "a step that does nothing would be equal too"
    assert all(not report.comparisons for report in others), "the first rank alone holds the reference"


def verify(rank: int, name: str, fsdp: int, ep: int, wrong: bool = False) -> Report:
    """What one process does."""
    plan = plan_of(fsdp, ep, packing=name in PRESETS)
    ranks = connect(plan.mesh, torch.device("cpu"))
    if wrong and rank == 1:
        _double_what_this_rank_sums()
    return verify_ranks(model_of(name), plan, ranks, model_of(name) if ranks.is_first else None)


def _double_what_this_rank_sums() -> None:
    accumulate = ShardedState.accumulate_shard

    def wrong(self: ShardedState, bucket: str, reduced: torch.Tensor) -> None:
        accumulate(self, bucket, 2 * reduced)

    ShardedState.accumulate_shard = wrong  # type: ignore[method-assign]
