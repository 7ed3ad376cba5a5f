"""Real process groups by role: the same results as simulated ranks, and every way in which they cannot be built."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moec.compiler.collectives import ROLES
from moec.compiler.errors import RankError
from moec.compiler.plan import MeshPlan
from moec.runtime import differences, groups
from moec.runtime.collective import record_collectives
from moec.runtime.groups import connect, disconnect, use
from moec.runtime.ranks import Ranks
from moec.runtime.simulate import simulate
from tests.runtime.outcomes import run_ranks, values

CPU = torch.device("cpu")
f = torch.ops._c10d_functional
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.uint8,
    torch.int64,
    torch.int32,
    torch.bool,
)


def test_coordinates_and_groups_of_a_rank() -> None:
    found = [Ranks(MeshPlan(fsdp=6, ep=3), rank) for rank in range(6)]
    assert [(r.ep_index, r.edp_index) for r in found] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    assert [r.members("exchange") for r in found] == [(0, 1, 2)] * 3 + [(3, 4, 5)] * 3
    assert [r.members("expert_gather") for r in found] == [(0, 3), (1, 4), (2, 5)] * 2
    assert {r.members("control") for r in found} == {(0, 1, 2, 3, 4, 5)}
    assert [r.is_first for r in found] == [True] + [False] * 5
    assert Ranks().world == 1


def everything(ranks: Ranks) -> tuple[list[Tensor], list[str]]:
    """Every op on every role and dtype with random values, and uneven exchanges with empty parts."""
    generator = torch.Generator().manual_seed(ranks.rank)
    results, launched = [], []
    with record_collectives() as calls:
        for role in ROLES:
            members = ranks.members(role)
            size, index = len(members), members.index(ranks.rank)
            for dtype in DTYPES:
                x = torch.randint(0, 9, (2 * size, 3), generator=generator).to(dtype)
                launched += [f.all_gather_into_tensor(x, size, role), f.broadcast(x, size - 1, role)]
                sends = [[(a + 2 * b + len(role)) % 3 for b in range(size)] for a in range(size)]
                send, receive = sends[index], [row[index] for row in sends]
                rows = torch.randint(0, 9, (sum(send), 2), generator=generator).to(dtype)
                launched.append(f.all_to_all_single(rows, receive, send, role))
                if dtype != torch.bool:
                    launched += [f.reduce_scatter_tensor(x, "sum", size, role), f.all_reduce(x, "max", role)]
        results = [f.wait_tensor(result) for result in launched]
    return results, [str(call) for call in calls]


def real(rank: int, mesh: MeshPlan) -> tuple[list[Tensor], list[str]]:
    ranks = connect(mesh, CPU)
    assert ranks == Ranks(mesh, rank)
    return everything(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MeshPlan(fsdp=2, ep=2), MeshPlan(fsdp=4, ep=2)])
def test_real_groups_move_what_simulated_ones_do(mesh: MeshPlan) -> None:
    simulated = simulate(mesh, lambda rank: everything(Ranks(mesh, rank)))
    for (found, calls), (expected, expected_calls) in zip(
        values(run_ranks(mesh.world, real, mesh)), simulated, strict=True
    ):
        assert calls == expected_calls
        for got, wanted, call in zip(found, expected, calls, strict=True):
            assert torch.equal(got, wanted), call


def sizes_after_reconnecting(rank: int) -> list[Any]:
    found: list[Any] = []
    for mesh in (MeshPlan(fsdp=4, ep=2), MeshPlan(fsdp=4, ep=4), MeshPlan(fsdp=4)):
        connect(mesh, CPU)
        own = torch.tensor([float(rank)])
        found.append([f.wait_tensor(f.all_reduce(own, "sum", role)).item() for role in ("exchange", "expert_gather")])
    for mesh in (MeshPlan(fsdp=4, ep=2), MeshPlan(fsdp=8, ep=2), MeshPlan(fsdp=4, ep=4)):
        use(mesh)
        found.append([f.wait_tensor(f.all_reduce(own, "sum", role)).item() for role in ("exchange", "expert_gather")])
    disconnect()
    try:
        f.all_reduce(own, "sum", "exchange")
    except RuntimeError as error:
        found.append(str(error))
    return found


@pytest.mark.slow
def test_a_process_connects_again_with_another_mesh() -> None:
    outcomes = values(run_ranks(4, sizes_after_reconnecting))
    assert outcomes[1][:3] == [[1.0, 4.0], [6.0, 1.0], [1.0, 6.0]]
    assert outcomes[2][:3] == [[5.0, 2.0], [6.0, 2.0], [2.0, 6.0]]
    for outcome in outcomes:
        assert outcome[3:6] == [outcome[0], outcome[0], outcome[1]]
    assert "exchange" in outcomes[0][6]


def test_one_rank_needs_no_process_group() -> None:
    assert connect(MeshPlan(), CPU) == Ranks()


def test_a_mesh_without_launched_ranks() -> None:
    with pytest.raises(RankError, match="has 2 ranks, and this process is alone") as caught:
        connect(MeshPlan(fsdp=2), CPU)
    assert "torchrun --nproc-per-node 2" in str(caught.value)


def mismatched(rank: int, case: str) -> None:
    mesh, seconds = MeshPlan(fsdp=2, ep=2), 30.0
    if case == "world":
        mesh = MeshPlan(fsdp=4)
    elif rank == 1 and case == "mesh":
        mesh = dataclasses.replace(mesh, ep=1)
    elif rank == 1 and case == "version":
        newer = differences.versions()[0], "torch 9.9"
        groups.versions = lambda: newer
    elif case == "absent":
        seconds = 2.0
        if rank == 1:
            return
    elif rank == 1 and case == "build":
        seconds, original = 3.0, dist.new_group

        def broken(*args: Any, **kwargs: Any) -> Any:
            if "exchange" in kwargs["group_desc"]:
                raise RuntimeError("no route to host")
            return original(*args, **kwargs)

        dist.new_group = broken
    elif case == "build":
        seconds = 3.0
    connect(mesh, CPU, build_seconds=seconds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("world", "the plan's mesh has 4 ranks, 2 were started"),
        ("mesh", "mesh differs between ranks 0 and 1 in line 2: 'ep: 2' on rank 0, 'ep: 1' on rank 1"),
        ("version", "versions differs between ranks 0 and 1 in line 2: 'torch"),
        ("absent", "rank 1 of 2 did not arrive within 2 s"),
        ("build", "exchange: no route to host"),
    ],
)
def test_ranks_that_cannot_be_connected(case: str, expected: str) -> None:
    outcomes = run_ranks(2, mismatched, case, seconds=60)
    for rank, outcome in enumerate(outcomes):
        if case == "absent" and rank == 1:
            continue
        assert outcome.error.startswith(("RankError: ", "AgreedError: "))
        assert expected in outcome.error
        assert outcome.seconds < 30
