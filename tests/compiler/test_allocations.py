"""The count of allocations: what lives, what has gone, what ops of the dialect hold inside, and views for nothing."""

from __future__ import annotations

import torch

from moec.compiler import dialect
from moec.compiler.allocations import AllocationCount

KIB = torch.float32.itemsize * 256


def test_storages_count_while_a_tensor_holds_them() -> None:
    given = torch.randn(256)
    with AllocationCount() as count:
        first = given + 1
        view = first.view(16, 16)[2:]
        assert count.held == KIB
        del first
        assert count.held == KIB, "a view holds its storage"
        second = view.sum()
        assert count.peak == KIB + 4
        del view
        assert count.held == 4
        second.mul_(2)
        assert count.held == 4, "nothing new in place"


def test_an_allocator_hands_out_multiples() -> None:
    with AllocationCount(granularity=512) as count:
        held = [torch.ones(1), torch.ones(129), torch.empty(0)]
        assert count.held == 512 + 1024
        held.clear()
    assert count.held == 0


def test_ops_of_the_dialect_are_looked_into() -> None:
    x, weight = torch.randn(256, dtype=torch.bfloat16).view(4, 64), torch.randn(64)
    with AllocationCount() as count:
        result = dialect.rms_norm(x, weight, eps=1e-6)
    assert count.held == result.numel() * result.element_size()
    assert count.peak > 2 * KIB, "the norm computes in float32"
