"""C11: a rank whose experts get no token takes part in every collective; a rank whose batch is padding as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moec.compiler.errors import CollectiveError
from moec.eager import EagerStep
from moec.simulated import SimulatedRanks
from tests.runtime.processes import run_ranks

from ..spine import VOCABULARY, WIDTH, assert_equal_gradients, distance
from .planting import Op, plant
from .ranks import LENGTH, ROWS, assert_like_one_rank, in_process, on_ranks, plan_for
from .test_c18_hot_expert import EXPERTS, model

ALL = range(EXPERTS)


def batch(experts: Sequence[int], seed: int = 0) -> dict[str, Tensor]:
    """Tokens that go to these experts alone."""
    generator = torch.Generator().manual_seed(seed)
    group = torch.randint(VOCABULARY // EXPERTS, (ROWS, LENGTH), generator=generator)
    expert = torch.tensor(experts)[torch.randint(len(experts), (ROWS, LENGTH), generator=generator)]
    ids = EXPERTS * group + expert
    return {"input_ids": ids, "labels": ids.clone()}


def assert_idle_experts_take_part(many: SimulatedRanks, experts: Sequence[int]) -> None:
    """Everything is as on one rank, and experts without a token have gradients of zeros."""
    found = assert_like_one_rank(many, model(), batch(experts))
    for name in ("layers.0.up", "layers.0.down"):
        idle = [expert for expert in ALL if expert not in experts]
        assert found[name].shape[0] == EXPERTS
        assert not found[name][idle].any()
        assert all(found[name][expert].any() for expert in experts)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("fsdp", "ep"), [(2, 2), (4, 2), (4, 4)])
def test_c11_ranks_without_tokens(fsdp: int, ep: int) -> None:
    many = on_ranks(model(), fsdp, ep)
    for experts in ((0, 1), (2, 3), (1,), ALL):
        assert_idle_experts_take_part(many, experts)


def padded(rank: int, experts: Sequence[int]) -> dict[str, Tensor]:
    """Both rows of one of two ranks without a label."""
    given = batch(experts)
    given["labels"][rank * 2 : rank * 2 + 2] = -100
    return given


@pytest.mark.timeout(30)
@pytest.mark.parametrize("rank", [0, 1])
def test_c11_a_rank_whose_batch_is_padding(rank: int) -> None:
    many = on_ranks(model(), 2, 2)
    for experts in (ALL, (2, 3)):
        given = padded(rank, experts)
        assert_like_one_rank(many, model(), given)
        many(given, lr=0.0)  # a whole step ends, too


@pytest.mark.slow
def test_c11_processes_end() -> None:
    """Real ranks, which would wait for each other for ever: 30 seconds for all of it."""
    batches = [batch((0, 1)), batch((2, 3)), padded(0, ALL), padded(1, ALL)]
    first, second = run_ranks(2, in_process, model, 2, 2, batches, timeout=30)
    for given, one, two in zip(batches, first, second, strict=True):
        assert all(torch.equal(value, two[name]) for name, value in one.items())
        losses, wanted = EagerStep(model(), plan_for(1, 1)).gradients(given)
        assert distance(one.pop("loss"), losses["lm_loss"]) <= 1e-6
        assert_equal_gradients(one, wanted)


def test_c11_a_rank_that_leaves_out_its_empty_part_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets no rows, so it returns none, without the collective that the others wait in."""
    many = on_ranks(model(), 2, 2)

    def shortcut(plain: Op) -> Op:
        def run(rows: Tensor, counts: Tensor, count: int | None = None, **options: Any) -> Any:
            named = {} if count is None else {"count": count}
            return plain(rows, counts, **named, **options) if counts[1].any() else rows.new_zeros(count or 0, WIDTH)

        return run

    for op in ("exchange", "exchange_back"):
        with monkeypatch.context() as planted:
            plant(planted, many.origin, **{op: shortcut})
            assert_idle_experts_take_part(many, ALL)
            with pytest.raises(CollectiveError, match=r"ranks 0 and 1 do not fit|rank 1 ended"):
                assert_idle_experts_take_part(many, (0, 1))
