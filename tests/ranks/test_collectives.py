"""The collectives that an artefact lists are those that its step runs: kinds, groups, order, bytes on the wire."""

from __future__ import annotations

from typing import cast

import pytest

import moec
from moec.compiler.collectives import group_of
from moec.placing import UnconnectedStep
from moec.rank_checks import joined_batches
from moec.rank_files import read_buckets, read_collectives
from moec.rank_report import rank_bytes
from moec.runtime.collective import Call, record_collectives
from moec.runtime.sharded_state import ShardedState
from moec.simulated import SimulatedRanks, split_rows
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


def test_bytes_on_the_wire_are_those_of_the_formula(simulated: SimulatedRanks, calls: list[list[Call]]) -> None:
    """Exact for what is gathered and reduced; how many rows are exchanged is data, and on average an even share."""
    listed = read_collectives(simulated.origin.folder)
    ranks = {role: len(group_of(PLAN.mesh, role, 0)) for role in ("gather", "scatter", "expert_gather", "exchange")}
    ranks["expert_scatter"] = ranks["expert_gather"]
    for found in calls:
        for one, call in zip(listed, found, strict=True):
            if one.kind != "all_to_all":
                assert one.wire_bytes(PLAN.mesh) == call.sent_bytes(ranks[one.role], 0), one
    moved = sum(
        call.sent_bytes(ranks["exchange"], rank % PLAN.mesh.ep)
        for rank, found in enumerate(calls)
        for call in found
        if call.op == "all_to_all_single"
    )
    expected = PLAN.mesh.world * sum(c.wire_bytes(PLAN.mesh) for c in listed if c.kind == "all_to_all")
    assert moved == pytest.approx(expected, rel=0.25)


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
