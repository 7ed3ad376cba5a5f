"""The host cache: same bits and strides, a pool that is reused and may be too small, and no early reuse of memory."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from moec.runtime import copy_lanes, host_pool
from moec.runtime.copy_lanes import Event, ThreadLane
from moec.runtime.host_cache import HostCache
from moec.runtime.host_pool import ALIGNMENT, Block, HostPool

CPU = torch.device("cpu")


def values(seed: int = 0) -> list[Tensor]:
    """Dense, transposed, expanded, sliced, empty, scalar, integer."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 10, generator=generator)
    return [
        x,
        x.t(),
        torch.randn(1, 10, generator=generator).expand(7, 10),
        x[:, 2:5],
        x[:0],
        torch.randn((), generator=generator),
        torch.randint(99, (5,), generator=generator),
        x.bfloat16().view(2, 3, 10).permute(2, 0, 1),
    ]


@pytest.mark.parametrize("early", [False, True])
def test_values_come_back_as_they_were(early: bool) -> None:
    cache = HostCache(CPU, 1 << 16)
    given = values()
    wanted = [value.clone() for value in given]
    parked = [cache.offload(value) for value in given]
    cache.release([*parked, "what else is saved"])
    given[0].fill_(float("nan"))
    if early:
        cache.prefetch(parked)
    for one, want, value in zip(parked, wanted, given, strict=True):
        found = cache.fetch(one)
        assert torch.equal(found, want)
        assert found.dtype == want.dtype
        dense = value.numel() < 2 or value.untyped_storage().nbytes() == value.numel() * value.element_size()
        if dense or 0 in value.stride():
            assert found.stride() == value.stride()
    assert cache.pool.used == 0
    assert cache.kept_bytes == 0


def test_only_what_differs_of_an_expanded_tensor_is_moved() -> None:
    cache = HostCache(CPU, 1 << 16)
    parked = cache.offload(torch.randn(1, 100).expand(1000, 100))
    assert cache.pool.used == ALIGNMENT
    assert cache.fetch(parked).stride() == (0, 1)


def test_a_value_that_finds_no_room_stays_and_a_warning_says_so_once() -> None:
    cache = HostCache(CPU, 2 * ALIGNMENT)
    first, second, third = (torch.randn(200) for _ in range(3))
    one = cache.offload(first)
    with pytest.warns(UserWarning, match=r"pool of 1,024 bytes of host memory is full.*Raise cache.host"):
        two, three = cache.offload(second), cache.offload(third)
    assert cache.kept_bytes == second.nbytes + third.nbytes
    cache.release([one, two, three])
    cache.prefetch([two, one])
    assert torch.equal(cache.fetch(two), second)
    assert torch.equal(cache.fetch(one), first)
    again = cache.offload(third)
    assert cache.pool.used == 2 * ALIGNMENT, "the freed block serves the next value"
    assert torch.equal(cache.fetch(again), third)


def test_dropped_values_free_their_blocks() -> None:
    cache = HostCache(CPU, 1 << 14)
    parked = [cache.offload(torch.randn(64)) for _ in range(3)]
    cache.release(parked[:1])
    cache.prefetch(parked[:1])
    del parked
    gc.collect()
    assert cache.pool.used == 0


def test_the_pool_joins_free_neighbours_and_takes_the_first_that_fits() -> None:
    pool = HostPool(5 * ALIGNMENT - 3)
    blocks = [pool.take(ALIGNMENT) for _ in range(5)]
    assert all(blocks)
    assert pool.take(1) is None
    for index in (1, 3, 2):
        pool.give_back(blocks[index])  # type: ignore[arg-type]
    wide = pool.take(3 * ALIGNMENT)
    assert (wide.start, wide.end) == (ALIGNMENT, 4 * ALIGNMENT)  # type: ignore[union-attr]
    assert pool.most_used == pool.capacity


def test_memory_that_cannot_be_pinned_is_said_and_ordinary_memory_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "pin_memory", lambda memory: "out of locked memory")
    with pytest.warns(UserWarning, match=r"cannot be pinned \(out of locked memory\).*cache.host.*ulimit -l"):
        pool = HostPool(1 << 12, pin=True)
    assert pool.take(1 << 12) is not None


class Poisoned(HostPool):
    """Bytes are overwritten as soon as nothing should read them any more."""

    def give_back(self, block: Block, pending: tuple[Event, ...] = ()) -> None:
        self._memory[block.start : block.end] = 0xFF
        super().give_back(block, pending)


def stormy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies take random times."""
    calm, delays = copy_lanes._copy, random.Random(0)

    def late(into: Tensor, source: Tensor, after: Sequence[Event]) -> None:
        time.sleep(delays.random() * 2e-3)
        calm(into, source, after)

    monkeypatch.setattr(copy_lanes, "_copy", late)


def many_steps(cache: HostCache) -> bool:
    """Two microbatches in flight, with memory overwritten as soon as it is free; whether all values were right."""
    right, generator = True, torch.Generator().manual_seed(3)
    for _ in range(6):
        flight = []
        for _ in range(2):
            given = [torch.randn(300, generator=generator) for _ in range(4)]
            wanted = [value.clone() for value in given]
            parked = []
            for index, value in enumerate(given):
                parked.append(cache.offload(value))
                if index:
                    cache.release(parked[index - 1 : index])
                    if parked[index - 1].block is not None:
                        given[index - 1].fill_(float("nan"))
            flight.append((parked, wanted))
        for parked, wanted in flight:
            for index in reversed(range(4)):
                cache.prefetch(parked[max(0, index - 1) : index])
                right &= torch.equal(cache.fetch(parked[index]), wanted[index])
    return right


@pytest.mark.parametrize("blocks", [5, 8])
@pytest.mark.filterwarnings("ignore:the pool of")
def test_nothing_is_reused_early_however_long_copies_take(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stormy(monkeypatch)
    cache = HostCache(CPU, blocks * 3 * ALIGNMENT)
    cache.pool = Poisoned(cache.pool.capacity)
    assert many_steps(cache)
    assert (cache.kept_bytes > 0) == (blocks < 8)


def test_a_release_that_does_not_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    stormy(monkeypatch)
    monkeypatch.setattr(copy_lanes.ThreadEvent, "wait", lambda self: None)
    cache = HostCache(CPU, 1 << 16)
    assert isinstance(cache._out, ThreadLane)
    assert not many_steps(cache)
