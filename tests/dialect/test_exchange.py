"""The exchange of rows between ranks against a description by hand, on simulated ranks; schemas on a real group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moec.compiler import dialect
from moec.compiler._torch_compat import FakeTensorMode, ShapeEnv
from moec.compiler.dialect.registry import DEFINITIONS, nbytes
from moec.compiler.layout import expert_places, places_per_rank
from moec.compiler.plan import MeshPlan
from moec.runtime.simulate import simulate
from tests.dialect.checks import poisoned_memory
from tests.dialect.contract import check_gradients

ROLE = "exchange"
WIDTH = 3
# Rows per expert, for each rank: balanced, all to one expert, a rank without rows, no rows at all, one expert each.
CASES = [
    [[2, 1, 3, 2], [1, 4, 1, 2]],
    [[0, 0, 8, 0], [0, 0, 5, 0]],
    [[0, 0, 0, 0], [3, 1, 0, 2]],
    [[0, 0, 0, 0], [0, 0, 0, 0]],
    [[4, 0, 1], [2, 2, 2], [0, 0, 6]],
    [[1, 2, 3, 4, 5, 6, 7, 8], [8, 0, 0, 1, 0, 0, 2, 3], [0, 5, 0, 0, 0, 0, 0, 1]],
    [[5, 1, 0, 2, 3]],
]
T = TypeVar("T")
Rows = list[Tensor]


def on_ranks(cases: list[list[int]], function: Callable[[int, Tensor, Tensor], T]) -> list[T]:
    """function(rank, rows [R, WIDTH], counts) on every rank; row i of rank r holds r, its expert, and i."""
    ranks = len(cases)

    def run(rank: int) -> T:
        local = -(-len(cases[0]) // ranks)
        offsets = torch.tensor(cases[rank]).cumsum(0).int()
        counts = dialect.exchange_counts(offsets, ranks=ranks, local_experts=local, role=ROLE)
        return function(rank, rows_of(cases, rank), counts)

    return simulate(MeshPlan(fsdp=ranks, ep=ranks), run)


def rows_of(cases: list[list[int]], rank: int) -> Tensor:
    expert = torch.arange(len(cases[rank])).repeat_interleave(torch.tensor(cases[rank]))
    return torch.stack((torch.full_like(expert, rank), expert, torch.arange(len(expert))), 1).double()


def received_by_hand(cases: list[list[int]], capacity: int = 10**6) -> Rows:
    """For each rank: rows by local expert, then source rank, then their order there; at most `capacity` of each."""
    ranks, experts = len(cases), len(cases[0])
    local = -(-experts // ranks)
    found = []
    for rank in range(ranks):
        parts = [torch.empty(0, WIDTH, dtype=torch.float64)]
        for expert in range(rank * local, min(rank * local + local, experts)):
            for source in range(ranks):
                rows = rows_of(cases, source)
                parts.append(rows[rows[:, 1] == expert][:capacity])
        found.append(torch.cat(parts))
    return found


def returned_by_hand(cases: list[list[int]], rank: int, capacity: int) -> Tensor:
    """This rank's rows with those beyond the capacity of their expert as zeros."""
    rows = rows_of(cases, rank)
    place = torch.cat([torch.arange(count) for count in cases[rank]])
    return rows.masked_fill((place >= capacity).unsqueeze(1), 0)


def test_the_host_reads_counts_once_and_again_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: reads.append(1) or tolist(self))
    op = torch.ops.moec

    def there_and_back(rank: int, rows: Tensor, counts: Tensor) -> int:
        reads.clear()
        for _ in range(2):
            received = op.exchange(rows, counts, ROLE)
            assert torch.equal(op.exchange_back(received, counts, rows.shape[0], ROLE), rows)
        once = len(reads)
        counts.zero_()
        assert op.exchange(rows[:0], counts, ROLE).shape[0] == 0
        return 10 * once + len(reads)

    assert on_ranks(CASES[-1], there_and_back) == [12]


def wave(shape: torch.Size, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("cases", CASES)
def test_counts_are_those_of_the_other_side(cases: list[list[int]]) -> None:
    ranks = len(cases)
    local = -(-len(cases[0]) // ranks)
    table = torch.zeros(ranks, ranks * local, dtype=torch.int64)
    table[:, : len(cases[0])] = torch.tensor(cases)
    table = table.view(ranks, ranks, local)
    for rank, counts in enumerate(on_ranks(cases, lambda rank, rows, counts: counts)):
        assert counts.dtype == torch.int64
        assert counts[0].equal(table[rank])
        assert counts[1].equal(table[:, rank])


@pytest.mark.parametrize("cases", CASES)
def test_rows_arrive_by_expert_then_source_then_order(cases: list[list[int]]) -> None:
    def run(rank: int, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        return dialect.exchange(rows, counts, role=ROLE), dialect.local_offsets(counts)

    with poisoned_memory():
        found = on_ranks(cases, run)
    local = -(-len(cases[0]) // len(cases))
    for rank, ((received, offsets), wanted) in enumerate(zip(found, received_by_hand(cases), strict=True)):
        assert received.equal(wanted)
        ends = [int((wanted[:, 1] <= rank * local + expert).sum()) for expert in range(local)]
        assert (offsets.dtype, offsets.tolist()) == (torch.int32, ends)


@pytest.mark.parametrize("cases", CASES)
def test_rows_come_back_to_their_places(cases: list[list[int]]) -> None:
    def run(rank: int, rows: Tensor, counts: Tensor) -> Tensor:
        received = dialect.exchange(rows, counts, role=ROLE)
        return dialect.exchange_back(received * 2, counts, rows.shape[0], role=ROLE)

    with poisoned_memory():
        found = on_ranks(cases, run)
    for rank, returned in enumerate(found):
        assert returned.equal(rows_of(cases, rank) * 2)


@pytest.mark.parametrize("capacity", [1, 2, 3, 20])
@pytest.mark.parametrize("cases", CASES)
def test_padded_rows_arrive_as_the_others_and_zeros_after_them(cases: list[list[int]], capacity: int) -> None:
    def run(rank: int, rows: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
        received = dialect.exchange_padded(rows, counts, capacity=capacity, role=ROLE)
        offsets = dialect.local_offsets(counts, capacity=capacity)
        # What lies past the rows must not come back, whatever it is.
        full = torch.where(torch.arange(len(received)).unsqueeze(1) < offsets[-1], received, float("nan"))
        returned = dialect.exchange_padded_back(full, counts, rows.shape[0], capacity=capacity, role=ROLE)
        return received, offsets, returned, dialect.overflow(counts, experts=len(cases[0]), capacity=capacity)

    with poisoned_memory():
        found = on_ranks(cases, run)
    ranks = len(cases)
    local = -(-len(cases[0]) // ranks)
    for rank, (received, offsets, returned, over) in enumerate(found):
        wanted = received_by_hand(cases, capacity)[rank]
        assert received.shape[0] == ranks * local * capacity
        assert received[: len(wanted)].equal(wanted)
        assert not received[len(wanted) :].any()
        assert offsets[-1] == len(wanted)
        assert returned.equal(returned_by_hand(cases, rank, capacity))
        assert over.tolist() == [max(0, count - capacity) for count in cases[rank]]


@pytest.mark.parametrize("capacity", [0, 2])
@pytest.mark.parametrize("cases", CASES)
def test_gradients_travel_the_other_way(cases: list[list[int]], capacity: int) -> None:
    """For linear maps: <A x, g> = <x, A^T g>, summed over ranks, for x and g without relation."""

    def run(rank: int, rows: Tensor, counts: Tensor) -> tuple[float, float, float, float]:
        x = wave(rows.shape, rank).requires_grad_()
        if capacity:
            there = dialect.exchange_padded(x, counts, capacity=capacity, role=ROLE)
        else:
            there = dialect.exchange(x, counts, role=ROLE)
        g = wave(there.shape, 100 + rank)
        (d_x,) = torch.autograd.grad(there, x, g)
        z = wave(there.shape, 200 + rank).requires_grad_()
        if capacity:
            back = dialect.exchange_padded_back(z, counts, rows.shape[0], capacity=capacity, role=ROLE)
        else:
            back = dialect.exchange_back(z, counts, rows.shape[0], role=ROLE)
        h = wave(back.shape, 300 + rank)
        (d_z,) = torch.autograd.grad(back, z, h)
        assert d_x.shape == x.shape
        assert d_z.shape == z.shape
        return tuple(float((a * b).detach().sum()) for a, b in ((there, g), (x, d_x), (back, h), (z, d_z)))  # type: ignore[return-value]

    totals = [sum(column) for column in zip(*on_ranks(cases, run), strict=True)]
    assert totals[0] == pytest.approx(totals[1], rel=1e-12, abs=1e-12)
    assert totals[2] == pytest.approx(totals[3], rel=1e-12, abs=1e-12)
    if sum(map(sum, cases)):
        assert totals[0] != 0


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_any_routing(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 5))
    experts = data.draw(st.integers(ranks, 9).filter(lambda experts: -(-experts // ranks) * (ranks - 1) < experts))
    cases = [[data.draw(st.integers(0, 4)) for _ in range(experts)] for _ in range(ranks)]

    def run(rank: int, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        received = dialect.exchange(rows, counts, role=ROLE)
        return received, dialect.exchange_back(received, counts, rows.shape[0], role=ROLE)

    for rank, ((received, back), wanted) in enumerate(zip(on_ranks(cases, run), received_by_hand(cases), strict=True)):
        assert received.equal(wanted)
        assert back.equal(rows_of(cases, rank))


@pytest.mark.parametrize(("experts", "ranks", "parts"), [(8, 3, 2), (5, 2, 2), (6, 4, 2), (7, 2, 3)])
def test_places_may_stay_empty_between_experts(experts: int, ranks: int, parts: int) -> None:
    places, local = expert_places(experts, ranks, parts), places_per_rank(experts, ranks, parts)
    assert any(places[i + 1] - places[i] > 1 for i in range(experts - 1)) or experts == 6
    rows = torch.randint(0, 4, (ranks, experts), generator=torch.Generator().manual_seed(0))

    def run(rank: int) -> tuple[Tensor, Tensor]:
        offsets = rows[rank].cumsum(0).to(torch.int32)
        counts = dialect.exchange_counts(offsets, ranks=ranks, local_experts=local, role="exchange", parts=parts)
        return counts, dialect.overflow(counts, experts=experts, capacity=2, parts=parts)

    share = -(-experts // ranks)
    for rank, (counts, over) in enumerate(simulate(MeshPlan(fsdp=ranks, ep=ranks), run)):
        expected = torch.zeros(2, ranks, local, dtype=torch.int64)
        for expert in range(experts):
            expected[0, expert // share, places[expert]] = rows[rank, expert]
            if expert // share == rank:
                expected[1, :, places[expert]] = rows[:, expert]
        assert torch.equal(counts, expected)
        assert torch.equal(over, (rows[rank] - 2).clamp_min(0))


def test_ranks_without_experts_get_nothing() -> None:
    cases = [[1, 2, 3, 1, 2]] * 4  # two experts on each rank: the last one has none
    found = on_ranks(cases, lambda rank, rows, counts: dialect.exchange(rows, counts, role=ROLE))
    assert [len(rows) for rows in found] == [12, 16, 8, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rows_keep_their_dtype(dtype: torch.dtype) -> None:
    def run(rank: int, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        half = rows.to(dtype)
        received = dialect.exchange(half, counts, role=ROLE)
        padded = dialect.exchange_padded(half, counts, capacity=9, role=ROLE)
        assert padded[: len(received)].equal(received)
        return received, dialect.exchange_back(received, counts, len(half), role=ROLE)

    for (received, back), wanted in zip(on_ranks(CASES[0], run), received_by_hand(CASES[0]), strict=True):
        assert received.dtype == back.dtype == dtype
        assert received.double().equal(wanted)


def test_rows_that_do_not_fit_the_counts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"exchange: 7 rows, the counts say 8"):
        on_ranks(CASES[0], lambda rank, rows, counts: dialect.exchange(rows[1:], counts, role=ROLE))
    with pytest.raises(ValueError, match=r"exchange_back: 9 rows, the counts say"):
        on_ranks(CASES[0], lambda rank, rows, counts: dialect.exchange_back(rows.new_ones(9, 3), counts, 8, role=ROLE))


# one rank: a real group


def samples(group: str) -> dict[str, tuple[Any, ...]]:
    """Arguments of every op of the file, differentiable ones in float64."""
    offsets = torch.tensor([2, 2, 5, 9], dtype=torch.int32)
    counts = dialect.exchange_counts(offsets, ranks=1, local_experts=4, role=group)
    rows = wave(torch.Size((9, 3)), 0).requires_grad_()
    padded = wave(torch.Size((12, 3)), 1).requires_grad_()
    return {
        "exchange_counts": (offsets, 1, 4, group),
        "local_offsets": (counts, 0),
        "overflow": (counts, 4, 2),
        "exchange": (rows, counts, group),
        "exchange_back": (rows, counts, 9, group),
        "exchange_padded": (rows, counts, 3, group),
        "exchange_padded_back": (padded, counts, 9, 3, group),
    }


def test_contract(group: str) -> None:
    for name, args in samples(group).items():
        definition = DEFINITIONS[name]
        torch.library.opcheck(definition.op, args)
        assert not definition.recompute, name
        assert definition.flops_of(args, {}) == 0
        if any(isinstance(value, Tensor) and value.requires_grad for value in args):
            check_gradients(definition.op, args)


def test_wrong_number_of_experts_is_refused() -> None:
    with FakeTensorMode(), pytest.raises(ValueError, match=r"9 experts are not 4 on 2 ranks"):
        dialect.exchange_counts(torch.empty(9, dtype=torch.int32), ranks=2, local_experts=4, role=ROLE)


def test_how_many_rows_arrive_is_data_and_costs_count_those_sent() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()):
        counts = torch.empty(2, 2, 4, dtype=torch.int64)
        received = dialect.exchange(torch.empty(24, 8), counts, role=ROLE)
        assert isinstance(received.shape[0], torch.SymInt)
        assert not received.shape[0].node.has_hint()
        assert nbytes(received) == 24 * 8 * 4
        assert nbytes(torch.cat((received, received), 1)) == 2 * 24 * 8 * 4
        assert dialect.exchange_back(received, counts, 24, role=ROLE).shape == (24, 8)
        assert dialect.exchange_padded(torch.empty(24, 8), counts, capacity=5, role=ROLE).shape == (40, 8)
