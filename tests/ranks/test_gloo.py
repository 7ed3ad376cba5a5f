"""Real gloo processes against one rank: loss, every gradient, three optimizer steps, as test_lockstep.py does it."""

from __future__ import annotations

import pytest
import torch

from moec.rank_checks import verify_ranks
from moec.runtime.groups import connect
from moec.runtime.sharded_state import ShardedState
from moec.verification import Report
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
    return verify_ranks(model_of(name), plan, ranks)


def _double_what_this_rank_sums() -> None:
    accumulate = ShardedState.accumulate_shard

    def wrong(self: ShardedState, bucket: str, reduced: torch.Tensor) -> None:
        accumulate(self, bucket, 2 * reduced)

    ShardedState.accumulate_shard = wrong  # type: ignore[method-assign]
