"""rank_mean: the same mean on every rank, no gradient."""

from __future__ import annotations

import pytest
import torch

from moec.compiler import dialect
from moec.compiler.plan import MeshPlan
from moec.runtime.simulate import simulate


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_rank_gets_the_mean(ranks: int) -> None:
    values = torch.randn(ranks, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for mean in simulate(MeshPlan(fsdp=ranks), lambda rank: dialect.rank_mean(values[rank].t(), ranks=ranks)):
        torch.testing.assert_close(mean, values.mean(0).t(), rtol=1e-12, atol=0)


def test_contract(group: str) -> None:
    torch.library.opcheck(torch.ops.moec.rank_mean.default, (torch.randn(3, 2), 1, group))


def test_what_carries_a_gradient_is_refused() -> None:
    with pytest.raises(ValueError, match="no gradient"):
        dialect.rank_mean(torch.randn(3, requires_grad=True), ranks=2)
