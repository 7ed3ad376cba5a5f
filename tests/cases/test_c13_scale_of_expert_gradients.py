"""C13: gradients of experts and of dense weights have the same scale on every mesh: that of one rank."""

from __future__ import annotations

import pytest
from torch import Tensor

import moec
from moec.runtime.sharded_state import ShardedState

from .ranks import assert_like_one_rank, on_ranks, plan_for
from .test_c11_empty_ranks import ALL, batch
from .test_c18_hot_expert import model


def test_c13_one_rank() -> None:
    assert_like_one_rank(moec.compile(model(), plan_for(1, 1)), model(), batch(ALL))


@pytest.mark.parametrize(("fsdp", "ep"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_c13_the_same_gradients_on_every_mesh(fsdp: int, ep: int) -> None:
    assert_like_one_rank(on_ranks(model(), fsdp, ep), model(), batch(ALL))


@pytest.mark.parametrize(("fsdp", "ep"), [(2, 2), (4, 2)])
def test_c13_expert_gradients_times_ep_are_seen(fsdp: int, ep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when each gradient is averaged over the ranks that share it, which for experts are fewer by a factor of ep."""
    shards, whole = ShardedState.accumulate_shard, ShardedState.accumulate

    def of_bucket(state: ShardedState, bucket: str, reduced: Tensor) -> None:
        shards(state, bucket, reduced * ep if bucket.endswith(":experts") else reduced)

    monkeypatch.setattr(ShardedState, "accumulate_shard", of_bucket)
    monkeypatch.setattr(ShardedState, "accumulate", lambda state, path, gradient: whole(state, path, gradient * ep))
    with pytest.raises(AssertionError, match=r"layers\.0\.(up|down)"):
        assert_like_one_rank(on_ranks(model(), fsdp, ep), model(), batch(ALL))
