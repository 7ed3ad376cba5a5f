"""Simulated ranks: data of every collective, the caller's settings in threads, every way of not fitting together."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moec.compiler import collectives
from moec.compiler.collectives import ROLES, groups_of, register_composite
from moec.compiler.errors import CollectiveError
from moec.compiler.plan import MeshPlan
from moec.runtime.collective import Call, record_collectives
from moec.runtime.simulate import simulate

f = torch.ops._c10d_functional
TWO, FOUR = MeshPlan(fsdp=2, ep=2), MeshPlan(fsdp=4, ep=2)


def own(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator).to(dtype)


def refusal(mesh: MeshPlan, function: Callable[[int], Any]) -> str:
    """The error's text, which has to be the same on every rank."""
    errors: dict[int, str] = {}

    def run(rank: int) -> None:
        try:
            function(rank)
        except CollectiveError as error:
            errors[rank] = str(error)
            raise

    before = threading.active_count()
    with pytest.raises(CollectiveError) as caught:
        simulate(mesh, run)
    assert len(set(errors.values())) == 1
    assert str(caught.value) in errors.values()
    assert threading.active_count() == before
    return str(caught.value)


@pytest.mark.parametrize("mesh", [MeshPlan(), TWO, FOUR, MeshPlan(fsdp=6, ep=3), MeshPlan(fsdp=4, ep=4)])
def test_groups_of_a_role_hold_every_rank_once(mesh: MeshPlan) -> None:
    for role in ROLES:
        assert sorted(rank for group in groups_of(mesh, role) for rank in group) == list(range(mesh.world))
    assert [len(group) for group in groups_of(mesh, "exchange")] == [mesh.ep] * mesh.edp
    assert [len(group) for group in groups_of(mesh, "expert_gather")] == [mesh.edp] * mesh.ep
    storage = torch.arange(mesh.world).view(mesh.edp, mesh.ep).t()
    assert groups_of(mesh, "expert_scatter") == [tuple(row) for row in storage.tolist()]
    assert groups_of(mesh, "exchange") == [tuple(column) for column in storage.t().tolist()]


def test_an_unknown_role_is_named() -> None:
    with pytest.raises(ValueError, match="'nix' is no role"):
        groups_of(TWO, "nix")


def test_gather_scatter_reduce_broadcast() -> None:
    def run(rank: int) -> list[Tensor]:
        x = own(rank, 4, 3)
        launched = [
            f.all_gather_into_tensor(x, 4, "gather"),
            f.reduce_scatter_tensor(x, "sum", 4, "scatter"),
            f.all_reduce(x, "max", "expert_scatter"),
            f.all_reduce(x, "avg", "control"),
            f.broadcast(x, 1, "exchange"),
        ]
        return [f.wait_tensor(result) for result in launched]

    inputs = [own(rank, 4, 3) for rank in range(4)]
    total = inputs[0] + inputs[1] + inputs[2] + inputs[3]
    results = simulate(FOUR, run)
    for of_one_op in zip(*results, strict=True):
        assert len({result.data_ptr() for result in of_one_op}) == 4
    for rank, (gathered, scattered, largest, average, sent) in enumerate(results):
        assert torch.equal(gathered, torch.cat(inputs))
        assert torch.equal(scattered, total[rank : rank + 1])
        assert torch.equal(largest, torch.maximum(inputs[rank % 2], inputs[rank % 2 + 2]))
        assert torch.equal(average, total / 4)
        assert torch.equal(sent, inputs[1 if rank < 2 else 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_reductions_run_in_rank_order_in_the_dtype(dtype: torch.dtype) -> None:
    values = [own(rank, 1000).mul(100).to(dtype) for rank in range(4)]
    results = simulate(FOUR, lambda rank: f.wait_tensor(f.all_reduce(values[rank], "sum", "control")))
    expected = ((values[0] + values[1]) + values[2]) + values[3]
    assert all(torch.equal(result, expected) for result in results)
    assert len({result.data_ptr() for result in results}) == 4


ROWS = ((0, 3, 1), (2, 0, 0), (0, 0, 0))  # ROWS[a][b]: rows from rank a to rank b


def test_all_to_all_with_uneven_and_empty_splits() -> None:
    def run(rank: int) -> Tensor:
        send, receive = list(ROWS[rank]), [row[rank] for row in ROWS]
        x = own(rank, sum(send), 2)
        there = f.wait_tensor(f.all_to_all_single(x, receive, send, "exchange"))
        back = f.wait_tensor(f.all_to_all_single(there, send, receive, "exchange"))
        assert torch.equal(back, x)
        return there

    first, second, third = simulate(MeshPlan(fsdp=3, ep=3), run)
    x = own(0, 4, 2)
    assert torch.equal(first, own(1, 2, 2))
    assert torch.equal(second, x[:3])
    assert torch.equal(third, x[3:])


def test_a_mesh_of_one_rank() -> None:
    def run(rank: int) -> Tensor:
        x = own(rank, 2)
        x = f.wait_tensor(f.all_to_all_single(x, [2], [2], "exchange"))
        return f.wait_tensor(f.reduce_scatter_tensor(x, "sum", 1, "expert_scatter"))

    assert torch.equal(simulate(MeshPlan(), run)[0], own(0, 2))


class _Sum(torch.autograd.Function):
    """The sum over ranks; every rank's gradient is the sum of all gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return f.wait_tensor(f.all_reduce(x, "sum", "control"))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return f.wait_tensor(f.all_reduce(gradient.contiguous(), "sum", "control"))


def test_backward_communicates_in_the_thread_of_its_rank() -> None:
    def run(rank: int) -> Tensor | None:
        x = own(rank, 2).requires_grad_()
        (_Sum.apply(x) * (1 + rank)).sum().backward()
        return x.grad

    assert [gradient.tolist() for gradient in simulate(TWO, run) if gradient is not None] == [[3.0, 3.0]] * 2


def test_threads_have_the_settings_of_the_caller() -> None:
    def settings(rank: int) -> tuple[Any, ...]:
        linear = torch.nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1))
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.ones(1).dtype, linear.dtype

    assert simulate(TWO, settings) == [(True, False, torch.float32, torch.float32)] * 2
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert simulate(TWO, settings) == [(False, False, torch.float32, torch.bfloat16)] * 2
    with torch.inference_mode():
        assert simulate(TWO, settings) == [(False, True, torch.float32, torch.float32)] * 2
        assert torch.equal(
            simulate(TWO, lambda r: f.wait_tensor(f.all_reduce(own(r, 1), "sum", "control")))[0], own(0, 1) + own(1, 1)
        )
    torch.set_default_dtype(torch.float64)
    try:
        assert simulate(TWO, settings) == [(True, False, torch.float64, torch.float64)] * 2
    finally:
        torch.set_default_dtype(torch.float32)


def test_every_rank_draws_from_generators_of_its_own() -> None:
    def run(rank: int) -> tuple[list[float], list[float]]:
        if rank == 1:
            torch.manual_seed(5)
        drawn, drawn_by_python = [], []
        for _ in range(3):
            drawn.append(torch.rand(()).item())
            drawn_by_python.append(random.random())
            f.wait_tensor(f.all_reduce(torch.ones(1), "sum", "control"))
        return drawn, drawn_by_python

    torch.manual_seed(0)
    random.seed(0)
    first, second, third, _ = simulate(FOUR, run)
    assert first == ([torch.rand(()).item() for _ in range(3)], [random.random() for _ in range(3)])
    assert third == first
    torch.manual_seed(5)
    assert second == ([torch.rand(()).item() for _ in range(3)], first[1])


def test_collectives_inside_a_composite_op_are_simulated_and_recorded() -> None:
    def twice(x: Tensor, role: str, factor: float = 2.0) -> Tensor:
        return f.wait_tensor(f.all_reduce(x * factor, "sum", role))

    library = torch.library.custom_op("moec_test::twice", twice, mutates_args=())
    op = torch.ops.moec_test.twice.default
    register_composite(op, twice)
    try:

        def run(rank: int) -> tuple[Tensor, list[Call]]:
            with record_collectives() as calls:
                return library(own(rank, 3), "control"), calls

        (result, calls), (_, others) = simulate(TWO, run)
        assert torch.equal(result, 2 * own(0, 3) + 2 * own(1, 3))
        assert calls == others == [Call("all_reduce", "control", torch.float32, (3,), reduction="sum")]
        with pytest.raises(ValueError, match="has an implementation"):
            register_composite(op, lambda x, role: x)
    finally:
        del collectives.COMPOSITES[op]


def test_bytes_that_a_rank_sends() -> None:
    def run(rank: int) -> list[int]:
        with record_collectives() as calls:
            f.all_gather_into_tensor(torch.zeros(10, dtype=torch.uint8), 4, "gather")
            f.reduce_scatter_tensor(torch.zeros(8), "sum", 4, "scatter")
            f.all_reduce(torch.zeros(8), "sum", "control")
            f.all_to_all_single(
                torch.zeros(3, 5), [2, 1] if rank % 2 == 0 else [1, 2], [2, 1] if rank % 2 == 0 else [1, 2], "exchange"
            )
            f.broadcast(torch.zeros(2), 1, "exchange")
        sizes = [4, 4, 4, 2, 2]
        return [call.sent_bytes(size, rank % size) for call, size in zip(calls, sizes, strict=True)]

    first, second, *_ = simulate(FOUR, run)
    assert first == [30, 24, 48, 20, 0]
    assert second == [30, 24, 48, 20, 8]


def reduce(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, op: str = "sum", role: str = "control") -> None:
    f.wait_tensor(f.all_reduce(torch.ones(shape, dtype=dtype), op, role))


DIFFERENCES: dict[str, tuple[Callable[[int], Any], tuple[str, ...]]] = {
    "shape": (lambda r: reduce((3 + r,)), ("the shapes differ", "float32 [3]", "float32 [4]")),
    "dtype": (
        lambda r: reduce((3,), torch.float64 if r else torch.float32),
        ("the dtypes differ", "float32 [3]", "float64 [3]"),
    ),
    "reduction": (lambda r: reduce((3,), op="max" if r else "sum"), ("the reductions differ", "(sum)", "(max)")),
    "role": (
        lambda r: reduce((3,), role="gather" if r else "control"),
        ("the roles differ", 'on "gather"', 'on "control"'),
    ),
    "op": (
        lambda r: f.broadcast(torch.ones(2), 0, "control") if r else reduce((2,)),
        ("the ops differ", "all_reduce", "broadcast"),
    ),
    "source": (lambda r: f.broadcast(torch.ones(2), r, "control"), ("the sources differ",)),
    "splits": (
        lambda r: f.all_to_all_single(torch.ones(3), [1, 2], [1, 2], "exchange"),
        ("rank 0 sends 2 rows to rank 1, which expects 1",),
    ),
    "width": (
        lambda r: f.all_to_all_single(torch.ones(2, 3 + r), [1, 1], [1, 1], "exchange"),
        ("the shapes differ", "float32 [2, 3]", "float32 [2, 4]"),
    ),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_a_difference_names_the_collective_and_both_ranks(case: str) -> None:
    function, expected = DIFFERENCES[case]

    def run(rank: int) -> None:
        reduce((1,))
        function(rank)

    text = refusal(TWO, run)
    assert "ranks 0 and 1 do not fit together in collective 1" in text
    for part in expected:
        assert part in text
    assert "test_simulate.py:" in text


def test_a_difference_within_one_group_only() -> None:
    """Ranks 1 and 3 are the second expert group."""
    text = refusal(FOUR, lambda rank: reduce((5 if rank == 3 else 4,), role="expert_scatter"))
    assert "ranks 1 and 3 do not fit together" in text


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "role": (lambda: reduce((2,), role="nix"), "'nix' is no role"),
    "group size": (
        lambda: f.all_gather_into_tensor(torch.ones(2), 3, "gather"),
        "says 3 ranks, a group of gather has 2",
    ),
    "strided": (lambda: f.all_reduce(torch.ones(2, 3).t(), "sum", "control"), "the input is strided"),
    "reduction": (lambda: reduce((2,), op="bxor"), "there is no reduction 'bxor'"),
    "source": (lambda: f.broadcast(torch.ones(2), 2, "control"), "source 2 is outside the group of 2"),
    "no dimension": (lambda: f.all_gather_into_tensor(torch.ones(()), 2, "gather"), "has no dimension"),
    "rows": (lambda: f.reduce_scatter_tensor(torch.ones(3), "sum", 2, "scatter"), "3 rows cannot be scattered over 2"),
    "sum": (lambda: f.all_to_all_single(torch.ones(3), [1, 1], [1, 1], "exchange"), "do not add up to the 3 rows"),
    "splits": (lambda: f.all_to_all_single(torch.ones(3), [3], [3], "exchange"), "1 and 1 split sizes for 2 ranks"),
    "dtype": (lambda: reduce((2,), dtype=torch.int16), "gloo moves no torch.int16; move it as bytes"),
    "in place": (lambda: f.all_reduce_(torch.ones(3), "sum", "control"), "is not simulated"),
    "early": (lambda: f.all_reduce(torch.ones(3), "sum", "control") + 1, "in aten.add.Tensor before wait_tensor"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_is_an_error_on_every_rank(case: str) -> None:
    function, expected = WRONG[case]
    assert expected in refusal(TWO, lambda rank: function())


def test_an_input_that_is_written_before_the_wait() -> None:
    def run(rank: int) -> None:
        buffer = torch.ones(4)
        gathered = f.all_gather_into_tensor(buffer, 2, "gather")
        buffer.view(2, 2).add_(1)
        f.wait_tensor(gathered)

    assert "rank 0 wrote the input of all_gather_into_tensor" in refusal(TWO, run)


def test_views_of_a_result_in_flight_are_no_reads() -> None:
    def run(rank: int) -> Tensor:
        gathered = f.all_gather_into_tensor(torch.ones(2), 2, "gather")
        view = gathered.view(2, 2)
        f.wait_tensor(gathered)
        return view + 1

    assert simulate(TWO, run)[1].tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_a_rank_that_ends_while_others_wait() -> None:
    text = refusal(FOUR, lambda rank: None if rank == 2 else reduce((3,)))
    assert "rank 2 ended after 0 collectives, 3 of 4 ranks wait in collective 0" in text
    assert 'rank 0: all_reduce on "control" of float32 [3]' in text


def test_a_rank_that_raises_while_others_wait() -> None:
    texts = []

    def run(rank: int) -> None:
        reduce((3,))
        if rank == 1:
            raise KeyError("broken")
        try:
            reduce((3,))
        except CollectiveError as error:
            texts.append(str(error))
            raise

    with pytest.raises(KeyError, match="broken") as caught:
        simulate(FOUR, run)
    assert caught.value.__notes__ == ["raised on simulated rank 1 of 4"]
    assert len(texts) == 3
    assert len(set(texts)) == 1
    assert "rank 1 raised KeyError after 1 collectives, 3 of 4 ranks wait in collective 1" in texts[0]


def test_a_rank_that_goes_on_after_a_failure_gets_it_again() -> None:
    def run(rank: int) -> None:
        for _ in range(3):
            with pytest.raises(CollectiveError, match="the shapes differ"):
                reduce((rank + 1,))
        raise ValueError(f"seen by {rank}")

    with pytest.raises(ValueError, match="seen by 0"):
        simulate(TWO, run)


@pytest.mark.parametrize("busy", [False, True])
def test_ctrl_c_ends_every_rank(busy: bool) -> None:
    """busy: rank 1 computes when it comes, while rank 0 waits in a collective."""

    def run(rank: int) -> None:
        if rank == 1:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        while busy and rank == 1:
            torch.ones(10).sum()
        while True:
            reduce((1,))

    before, began = threading.active_count(), time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        simulate(TWO, run)
    assert time.monotonic() - began < 10
    time.sleep(0.1)
    assert threading.active_count() == before
