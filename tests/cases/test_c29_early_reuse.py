"""C29: host memory is reused, or freed, while a copy still runs, and gradients are silently wrong from step 2 on.

Five steps whose pool is smaller than what one step needs. Copies take random times, and bytes are overwritten as soon
as nothing should read them any more.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import moec
from moec.compiler.errors import NonFiniteError
from moec.compiler.plan import CachePlan, CacheRule, Plan
from moec.random_batch import random_batches
from moec.runtime import copy_lanes
from moec.runtime.copy_lanes import Event
from moec.runtime.host_pool import Block, HostPool

from ..spine import VOCABULARY, Language, Layer, seeded, small_k3

PLAN = Plan(batch=2, length=16, accumulation=2)
OFFLOAD = CachePlan(policy=(CacheRule("offload"), CacheRule("offload", "*", "input")))


class Poisoned(HostPool):
    def give_back(self, block: Block, pending: tuple[Event, ...] = ()) -> None:
        self._memory[block.start : block.end] = 0xFF
        super().give_back(block, pending)


def plain() -> Any:
    return seeded(Language, Layer(), Layer(), Layer())


def losses_and_weights(
    cache: CachePlan, pool: float = 0.0, make: Callable[[], Any] = small_k3
) -> tuple[list[Tensor], list[Tensor], int]:
    """Of five steps, and the bytes that found no room; pool: size as a share of what is offloaded at a time."""
    model = make()
    step = moec.compile(model, Plan(**{**vars(PLAN), "cache": cache}))
    kept = 0
    if pool:
        size = int(pool * step.memory.host)
        step.program.HOST_POOL = size  # type: ignore[attr-defined]
        step.state.host_cache(size).pool = Poisoned(size)
    batches = random_batches(step.plan, VOCABULARY, 0)
    losses = [step(next(batches)).loss for _ in range(5)]
    if pool:
        kept = step.state.host_cache(0).kept_bytes
    return losses, [weight.detach().clone() for weight in model.parameters()], kept


@pytest.mark.filterwarnings("ignore:the pool of")
def test_c29_nothing_is_reused_early(monkeypatch: pytest.MonkeyPatch) -> None:
    losses, weights, _ = losses_and_weights(CachePlan())
    calm, delays = copy_lanes._copy, random.Random(0)

    def late(into: Tensor, source: Tensor, after: Sequence[Event]) -> None:
        time.sleep(delays.random() * 2e-3)
        calm(into, source, after)

    monkeypatch.setattr(copy_lanes, "_copy", late)
    for pool in (0.5, 1.5):
        found, moved, kept = losses_and_weights(OFFLOAD, pool)
        assert all(map(torch.equal, losses, found))
        assert all(map(torch.equal, weights, moved))
        assert (kept > 0) == (pool < 1)


def test_c29_an_event_that_nobody_waits_for_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a model without routing: garbage is no index there."""
    losses, _, _ = losses_and_weights(CachePlan(), make=plain)
    calm = copy_lanes._copy

    def late(into: Tensor, source: Tensor, after: Sequence[Event]) -> None:
        time.sleep(2e-3)
        calm(into, source, after)

    monkeypatch.setattr(copy_lanes, "_copy", late)
    monkeypatch.setattr(copy_lanes.ThreadEvent, "wait", lambda self: None)
    try:
        found, _, _ = losses_and_weights(OFFLOAD, 1.5, plain)
    except NonFiniteError:
        return
    assert not all(map(torch.equal, losses, found))
