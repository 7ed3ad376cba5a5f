"""C03: an expert with 0, 1, 2, 5 or all tokens is one compilation, and each step is eager's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ..moec.dynamo import EXPERTS, Experts, assert_same, compiled
from ..spine import WIDTH, Language, seeded

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

COUNTS = (3, 0, 1, 2, 5, 12, 0, 4)
TOKENS = 12


class CountedOnTheHost(Experts):
    """Experts that are told by the host how many tokens the first of them gets."""

    first: int = 0

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = super().forward(hidden).flatten(0, 1)
        return torch.cat(tokens.split([self.first, TOKENS - self.first])).view_as(hidden)


def forced_counts(count: int) -> Tensor:
    """Tokens of which `count` go to expert 0 of `routed`, the others to the other experts in turn."""
    rest = torch.arange(TOKENS - count) % (EXPERTS - 1) + 1
    return torch.cat([torch.zeros(count, dtype=torch.int64), rest]).view(2, -1)


def routed(kind: type[Experts]) -> Any:
    """A model whose token i goes to expert i % 4, with gradients everywhere."""
    model = seeded(Language, kind(), kind())
    with torch.no_grad():
        model.embed.weight[:WIDTH] = 4 * torch.eye(WIDTH)
        for layer in model.layers:
            layer.router.weight.copy_(torch.eye(EXPERTS).repeat(1, 2) * 3)
            layer.down.mul_(0.01)
    return model


def assert_one_compilation(
    model: Any, counts: Sequence[int], tell: Callable[[Any, int], None] = lambda layer, count: None
) -> None:
    """Over a step for each count of expert 0."""
    function, log = compiled(model)
    for count in counts:
        ids = forced_counts(count)
        assert int((model.layers[0].router(model.embed(ids)).argmax(-1) == 0).sum()) == count
        for layer in model.layers:
            tell(layer, count)
        assert_same(function, model, ids, ids)
    assert len(log.compiled) == 1


def test_c03_any_count_of_tokens_is_one_compilation() -> None:
    assert_one_compilation(routed(Experts), COUNTS)


def test_c03_counts_that_specialise_a_graph_are_seen() -> None:
    with pytest.raises(AssertionError, match=r"assert 3 == 1"):
        assert_one_compilation(
            routed(CountedOnTheHost), COUNTS[:3], lambda layer, count: setattr(layer, "first", count)
        )
