"""The collectives that an artefact lists are those that its step runs: kinds, groups, order, bytes on the wire."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

import moec
from moec.compiler.collectives import group_of
from moec.models.build import build
from moec.placing import UnconnectedStep
from moec.rank_checks import joined_batches
from moec.rank_files import read_buckets, read_collectives
from moec.rank_report import rank_bytes
from moec.runtime.collective import Call, record_collectives
from moec.runtime.sharded_state import ShardedState
from moec.simulated import SimulatedRanks, split_rows
from moec.traffic import traffic
from tests.moec.small_models import SMALL_K3
from tests.ranks.models import model_of, plan_of

KINDS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
PLAN = plan_of(4, 2, packing=True)


@pytest.fixture(scope="module")
def simulated() -> SimulatedRanks:
    return cast(UnconnectedStep, moec.compile(model_of("k3-tiny"), PLAN)).simulate_ranks()


@pytest.fixture(scope="module")
def calls(simulated: SimulatedRanks) -> list[list[Call]]:
    """Of one forward and backward, by rank, without the small ones of the runtime."""
    rows = split_rows(joined_batches(model_of("k3-tiny"), PLAN, 1, 0)[0], PLAN)

    def run(rank: int) -> list[Call]:
        simulated.steps[rank].loss(rows[rank])  # the ranks have met
        with record_collectives() as found:
            simulated.steps[rank].gradients(rows[rank])
        return [call for call in found if call.role != "control"]

    return simulated.run(run)


def test_every_rank_runs_the_listed_collectives_in_order(simulated: SimulatedRanks, calls: list[list[Call]]) -> None:
    listed = [(c.kind, c.role, c.dtype) for c in read_collectives(simulated.origin.folder)]
    assert len(listed) > 50
    for found in calls:
        assert [(KINDS[c.op], c.role, str(c.dtype).removeprefix("torch.")) for c in found] == listed


def test_bytes_of_each_rank_on_the_wire_are_those_of_the_formula(
    simulated: SimulatedRanks, calls: list[list[Call]]
) -> None:
    """Of what is gathered and reduced; how many rows a rank exchanges is data, see below."""
    listed = read_collectives(simulated.origin.folder)
    for rank, found in enumerate(calls):
        for one, call in zip(listed, found, strict=True):
            if one.kind != "all_to_all":
                group = group_of(PLAN.mesh, one.role, rank)
                assert one.wire_bytes(PLAN.mesh) == call.sent_bytes(len(group), group.index(rank)), one


@pytest.mark.parametrize(
    "mesh",
    [{}, {"gather": "keep", "reduce_dtype": "bfloat16"}, {"capacity": 2.0, "overflow": "drop"}],
    ids=["usual", "kept and half", "capacity"],
)
def test_bytes_of_a_step_on_the_wire_are_those_of_the_formula(mesh: dict[str, Any]) -> None:
    """To the byte, also of exchanges, whose rows are known from the choices of the routers; two microbatches."""
    plan = replace(PLAN, mesh=replace(PLAN.mesh, **mesh), accumulation=2)
    model = build(SMALL_K3).train()
    step = cast(UnconnectedStep, moec.compile(model, plan))
    found = traffic(step.simulate_ranks(), joined_batches(model, plan, 1, 0)[0])
    assert {(one.kind, one.role) for one in found} == {
        *(("all_gather", "gather"), ("all_gather", "expert_gather"), ("all_to_all", "exchange")),
        *(("reduce_scatter", "scatter"), ("reduce_scatter", "expert_scatter")),
    }
    assert [one.counted for one in found] == [one.formula for one in found]
    assert all(one.counted for one in found)


def test_rows_that_are_sent_and_not_routed_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(SMALL_K3).train()
    ranks = cast(UnconnectedStep, moec.compile(model, PLAN)).simulate_ranks()
    sent = Call.sent_bytes
    monkeypatch.setattr(Call, "sent_bytes", lambda call, *where: sent(call, *where) + (call.dtype is torch.float32))
    found = traffic(ranks, joined_batches(model, PLAN, 1, 0)[0])
    wrong = {one.kind for one in found if one.counted != one.formula}
    assert wrong == {"reduce_scatter", "all_to_all"}, "weights are gathered as bytes"


def test_the_table_of_a_rank_is_what_its_state_holds(simulated: SimulatedRanks) -> None:
    folder = simulated.origin.folder
    table = rank_bytes(read_buckets(folder), read_collectives(folder), PLAN)
    for step in simulated.steps:
        state = cast(ShardedState, step.state)
        assert table.weights == sum(flat.nbytes for flat in state.flats.values())
        moments = sum(t.nbytes for t in (*state.exp_avg.values(), *state.exp_avg_sq.values()))
        assert 0.97 * table.moments <= moments <= table.moments, "the table counts padding"
    assert table.masters == 0
    assert table.gathered >= max(b.layout.gathered_nbytes for b in read_buckets(folder).values())
