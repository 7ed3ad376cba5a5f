"""`offload` and `fetch` as graphs mean them: a copy to host memory and back, with every bit and the strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moec.compiler import dialect

CPU = torch.device("cpu")
VALUES = {
    "dense": torch.randn(3, 4),
    "transposed": torch.randn(3, 4).t(),
    "scalar": torch.randn(()),
    "empty": torch.randn(0, 4),
    "integers": torch.arange(5),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_as_it_left(name: str) -> None:
    value = VALUES[name]
    parked = dialect.offload(value)
    assert value.numel() == 0 or parked.data_ptr() != value.data_ptr()
    found = dialect.fetch(parked, CPU)
    assert torch.equal(found, value)
    assert (found.dtype, found.stride()) == (value.dtype, value.stride())
    torch.library.opcheck(torch.ops.moec.offload.default, (value,))
    torch.library.opcheck(torch.ops.moec.fetch.default, (parked, CPU))


def test_neither_may_run_again() -> None:
    assert not dialect.DEFINITIONS["offload"].recompute
    assert not dialect.DEFINITIONS["fetch"].recompute


def test_an_expanded_value_becomes_whole() -> None:
    value: Tensor = torch.randn(1, 3).expand(4, 3)
    assert torch.equal(dialect.fetch(dialect.offload(value), CPU), value)
