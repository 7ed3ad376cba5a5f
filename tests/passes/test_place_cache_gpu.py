"""Caching on a GPU: every way gives the bits of everything kept, however long copies take and small the pool is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moec
from moec.compiler.plan import CachePlan, CacheRule, Plan
from moec.models.huggingface.adapter import from_config
from moec.models.huggingface.tiny import tiny_config
from moec.random_batch import random_batches
from tests.passes.test_place_cache import MIXTURE
from tests.spine import small_k3

pytestmark = pytest.mark.gpu
OFFLOAD = (CacheRule("offload"), CacheRule("offload", "*", "input"))
PLAN = Plan(batch=2, length=256, accumulation=2, check=True)


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    if not name.startswith("k3"):
        return from_config(tiny_config(name), torch.float32, "cuda").train()
    attention: Any = "dsa" if "dsa" in name else "mla"
    return small_k3(full_attention=attention, layers=4).to("cuda", torch.bfloat16).train()


def run(name: str, policy: Any, steps: int, pool: float = 0.0) -> tuple[list[Tensor], dict[str, Tensor], Any]:
    """Losses, weights after the steps, and the step. pool: share of the needed host memory that there is."""
    model = model_of(name)
    step = moec.compile(model, dataclasses.replace(PLAN, cache=CachePlan(policy=policy)))
    if pool:
        step.program.HOST_POOL = int(step.memory.host * pool)  # type: ignore[attr-defined]
    batches = random_batches(PLAN, step.vocabulary, 0)
    losses = [step(next(batches)).loss for _ in range(steps)]
    return losses, {path: weight.detach().clone() for path, weight in model.named_parameters()}, step


def assert_same_bits(one: Any, two: Any) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one[0], two[0], strict=True))
    assert all(torch.equal(weight, two[1][path]) for path, weight in one[1].items())


@pytest.mark.parametrize("name", ["k3-tiny", "k3-dsa-tiny", "mixtral", "deepseek_v3"])
def test_whole_models_give_the_same_bits(name: str) -> None:
    kept = run(name, "keep", 3)
    assert_same_bits(kept, run(name, "keep", 3))
    for policy in ("recompute", OFFLOAD, MIXTURE):
        assert_same_bits(kept, run(name, policy, 3))


@pytest.mark.filterwarnings("ignore:the pool of")
@pytest.mark.parametrize("name", ["k3-tiny", "mixtral"])
def test_twenty_steps_with_a_pool_smaller_than_a_step_needs(name: str) -> None:
    kept, found = run(name, "keep", 20), run(name, OFFLOAD, 20, pool=0.4)
    assert_same_bits(kept, found)
    cache = found[2].state.host_cache(0)
    assert cache.kept_bytes > 0
    assert 0 < cache.pool.most_used <= cache.pool.capacity < found[2].memory.host


def test_the_copies_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    from moec.compiler._torch_compat import spin
    from moec.runtime.copy_lanes import StreamLane

    kept, copy = run("k3-tiny", "keep", 3), StreamLane.copy

    def late(self: StreamLane, into: Tensor, source: Tensor, after: Any = ()) -> Any:
        with torch.cuda.stream(self._stream):
            spin(torch.device("cuda"), 1e-3)
        return copy(self, into, source, after)

    monkeypatch.setattr(StreamLane, "copy", late)
    assert_same_bits(kept, run("k3-tiny", OFFLOAD, 3))


def test_the_pool_is_pinned_and_as_large_as_asked() -> None:
    from moec.runtime.host_pool import HostPool

    pool = HostPool((1 << 20) + 512, pin=True)
    block = pool.take(1 << 20)
    assert block is not None
    assert pool.capacity == (1 << 20) + 512
    assert pool.view(block, torch.Size((1 << 18,)), (1,), torch.float32).is_pinned()
