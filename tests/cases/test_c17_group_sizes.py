"""C17: grouped products with empty groups and odd counts are those of a loop over experts; no group sees another."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from moec.compiler import dialect

from ..dialect.checks import poisoned_memory, relative_error, value_and_grads

COUNTS = [
    [0, 1, 7, 8, 9, 0, 16, 0],
    [0, 5, 3, 0],
    [0, 0, 0, 13, 0, 0],
    [17, 1],
]
IN, OUT = 24, 20


def ends(counts: Sequence[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).int()


def operands(counts: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Rows of all groups, one matrix and one bias per expert."""
    generator = torch.Generator().manual_seed(len(counts))
    shapes = ((sum(counts), IN), (len(counts), OUT, IN), (len(counts), OUT))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def grouped(counts: Sequence[int], x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return dialect.grouped_linear(x, weight, ends(counts), bias)


def looped(counts: Sequence[int], x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """One product per expert; an empty group still gives its weights a gradient of zeros."""
    groups = zip(x.split(list(counts)), weight, bias, strict=True)
    return torch.cat([rows @ matrix.t() + offset for rows, matrix, offset in groups])


def assert_groups_are_those_of_a_loop(counts: Sequence[int], dtype: torch.dtype) -> None:
    inputs = operands(counts, dtype)
    exact = value_and_grads(lambda *x: looped(counts, *x), [value.double() for value in inputs])
    eager = value_and_grads(lambda *x: looped(counts, *x), inputs)
    with poisoned_memory():
        found = value_and_grads(lambda *x: grouped(counts, *x), inputs)
    for value, other, truth in zip(found, eager, exact, strict=True):
        bound = 1e-6 if dtype == torch.float32 else max(1.5 * relative_error(other, truth), 2.0**-11)
        assert relative_error(value, truth) <= bound
    empty = [expert for expert, count in enumerate(counts) if count == 0]
    assert all(not gradient[empty].any() for gradient in found[2:])


def assert_rows_of_other_groups_are_untouched(counts: Sequence[int], dtype: torch.dtype) -> None:
    """Other rows in one group change nothing outside of it, to the last bit."""
    x, weight, bias = operands(counts, dtype)
    before = value_and_grads(lambda *values: grouped(counts, *values), [x, weight, bias])
    group = max(range(len(counts)), key=lambda expert: counts[expert])
    mine = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)) == group
    changed = torch.where(mine[:, None], 3 * x.flip(1), x)
    after = value_and_grads(lambda *values: grouped(counts, *values), [changed, weight, bias])
    others = torch.arange(len(counts)) != group
    for part, kept in zip((0, 1, 2, 3), (~mine, ~mine, others, others), strict=True):
        assert torch.equal(before[part][kept], after[part][kept])
    assert not torch.equal(before[0][mine], after[0][mine])
    assert not torch.equal(before[2][group], after[2][group])


both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@both_dtypes
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_c17_groups_are_those_of_a_loop(counts: list[int], dtype: torch.dtype) -> None:
    assert_groups_are_those_of_a_loop(counts, dtype)


@both_dtypes
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_c17_rows_of_other_groups_are_untouched(counts: list[int], dtype: torch.dtype) -> None:
    assert_rows_of_other_groups_are_untouched(counts, dtype)


@both_dtypes
def test_c17_a_group_that_ends_at_a_multiple_of_8_is_seen(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a kernel wants aligned counts: the group goes on over rows of the next one."""
    plain = dialect.grouped_linear

    def aligned(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor) -> Tensor:
        return plain(x, weight, ((offsets + 7) // 8 * 8).clamp_max(len(x)), bias)

    monkeypatch.setattr(dialect, "grouped_linear", aligned)
    with pytest.raises(AssertionError):
        assert_groups_are_those_of_a_loop(COUNTS[0], dtype)
    with pytest.raises(AssertionError):
        assert_rows_of_other_groups_are_untouched(COUNTS[0], dtype)
