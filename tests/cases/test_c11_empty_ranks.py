"""C11: a rank whose experts get no token takes part in every collective; a rank whose batch is padding as well."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ..spine import VOCABULARY
from .ranks import LENGTH, ROWS, assert_like_one_rank, on_ranks
from .test_c18_hot_expert import EXPERTS, model

ALL = range(EXPERTS)


def batch(experts: Sequence[int], seed: int = 0) -> dict[str, Tensor]:
    """Tokens that go to these experts alone."""
    generator = torch.Generator().manual_seed(seed)
    group = torch.randint(VOCABULARY // EXPERTS, (ROWS, LENGTH), generator=generator)
    expert = torch.tensor(experts)[torch.randint(len(experts), (ROWS, LENGTH), generator=generator)]
    ids = EXPERTS * group + expert
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.parametrize(("fsdp", "ep"), [(2, 2), (4, 2), (4, 4)])
def test_c11_ranks_without_tokens(fsdp: int, ep: int) -> None:
    many = on_ranks(model(), fsdp, ep)
    for experts in ((0, 1), (2, 3), (1,), ALL):
        found = assert_like_one_rank(many, model(), batch(experts))
        for name in ("layers.0.up", "layers.0.down"):
            idle = [expert for expert in ALL if expert not in experts]
            assert found[name].shape[0] == EXPERTS
            assert not found[name][idle].any()
            assert all(found[name][expert].any() for expert in experts)


@pytest.mark.parametrize("rank", [0, 1])
def test_c11_a_rank_whose_batch_is_padding(rank: int) -> None:
    many = on_ranks(model(), 2, 2)
    for experts in (ALL, (2, 3)):
        given = batch(experts)
        given["labels"][rank * 2 : rank * 2 + 2] = -100
        assert_like_one_rank(many, model(), given)
        many(given, lr=0.0)  # a whole step ends, too
