"""C13: gradients of experts and of dense weights have the same scale on every mesh: that of one rank."""

from __future__ import annotations

import pytest

from ..spine import assert_equal_gradients
from .ranks import assert_like_one_rank, on_ranks
from .test_c11_empty_ranks import ALL, batch
from .test_c18_hot_expert import model


@pytest.mark.parametrize(("fsdp", "ep"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_c13_the_same_gradients_on_every_mesh(fsdp: int, ep: int) -> None:
    many, given = on_ranks(model(), fsdp, ep), batch(ALL)
    found = assert_like_one_rank(many, model(), given)
    with pytest.raises(AssertionError, match=r"layers\.0\.up"):
        assert_equal_gradients({**found, "layers.0.up": found["layers.0.up"] * ep * 2}, found)
