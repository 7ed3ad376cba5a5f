"""C30: one gradient norm over dense and expert shards, and one factor on every rank, whatever the mesh."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

import moec
from moec.compiler.errors import NonFiniteError
from moec.compiler.plan import MeshPlan, OptimizerPlan, Plan
from moec.eager import EagerStep
from moec.placing import UnconnectedStep
from moec.runtime.groups import connect
from moec.runtime.sharded_state import ShardedState
from moec.runtime.whole import whole_weights
from moec.simulated import split_rows
from tests.runtime.processes import run_ranks

from ..spine import distance
from .ranks import LENGTH, ROWS
from .test_c11_empty_ranks import ALL, batch
from .test_c18_hot_expert import model

MESHES = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]
BOUNDS = [0.05, 100.0]
"""Below and above the norm, which is about 1."""
RATE = 1e-2


def plan_of(fsdp: int, ep: int, bound: float) -> Plan:
    optimizer = OptimizerPlan(lr=RATE, eps=1e-2, clip_norm=bound, schedule="constant")
    return Plan(batch=ROWS // fsdp, length=LENGTH, mesh=MeshPlan(fsdp=fsdp, ep=ep), optimizer=optimizer)


def one_rank(bound: float) -> tuple[float, dict[str, Tensor]]:
    """Norm and weights of three eager steps; with its eps AdamW's update depends on the size of a gradient."""
    step = EagerStep(model(), plan_of(1, 1, bound))
    for seed in range(3):
        norm = step.update(step.gradients(batch(ALL, seed))[1], RATE)
    return float(norm), {name: weight.detach() for name, weight in step.parameters.items()}


def assert_like(found: tuple[float, dict[str, Tensor]], wanted: tuple[float, dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    for name, weight in wanted[1].items():
        assert distance(found[1][name], weight) <= 1e-5, name


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(("fsdp", "ep"), MESHES)
def test_c30_norm_and_factor_are_those_of_one_rank(fsdp: int, ep: int, bound: float) -> None:
    step, norms = moec.compile(model(), plan_of(fsdp, ep, bound)), []
    if fsdp == 1:
        norms = [float(step(batch(ALL, seed), lr=RATE).gradient_norm) for seed in range(3)]
        found: dict[str, Tensor] = {name: weight.detach() for name, weight in step.state.weights.items()}
    else:
        many = cast(UnconnectedStep, step).simulate_ranks()
        for seed in range(3):
            rows = split_rows(batch(ALL, seed), step.plan)
            each = many.run(lambda rank, rows=rows: float(many.steps[rank](rows[rank], lr=RATE).gradient_norm))  # type: ignore[misc]
            assert set(each) == {each[0]}, "ranks would clip by different factors"
            norms.append(each[0])
        found = many.weights()
    wanted = one_rank(bound)
    assert (wanted[0] > bound) == (bound == BOUNDS[0])
    assert_like((norms[-1], found), wanted)


def test_c30_a_norm_of_one_ranks_shards_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moec.runtime.optimizer.summed", lambda value: value)
    many = cast(UnconnectedStep, moec.compile(model(), plan_of(2, 2, BOUNDS[0]))).simulate_ranks()
    for seed in range(3):
        result = many(batch(ALL, seed), lr=RATE)
    with pytest.raises(AssertionError):
        assert_like((float(result.gradient_norm), many.weights()), one_rank(BOUNDS[0]))


@pytest.mark.parametrize("mesh", [(2, 2), (4, 2)])
def test_c30_one_expert_that_is_not_a_number_stops_all_before_the_update(
    mesh: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy: no rank updates, and all name the weight."""
    many = cast(UnconnectedStep, moec.compile(model(), plan_of(*mesh, BOUNDS[0]))).simulate_ranks()
    before = many.weights()
    _spoil_last_expert(monkeypatch)
    rows = split_rows(batch(ALL), many.plan)

    def attempt(rank: int) -> str:
        with pytest.raises(NonFiniteError) as caught:
            many.steps[rank](rows[rank], lr=RATE)
        return str(caught.value)

    texts = many.run(attempt)
    assert all("layers.0.up" in text for text in texts)
    assert all(torch.equal(weight, before[name]) for name, weight in many.weights().items())


def _spoil_last_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the last expert, on the rank that holds it, becomes nan before the update."""
    import moec.runtime.optimizer as optimizer

    clip = optimizer.clip_gradients

    def spoiled(state: Any, max_norm: float | None) -> Tensor:
        part = cast(ShardedState, state)
        if part.rank == part.world - 1:
            part.gradients["layers.0.up"][-1].view(-1)[0] = float("nan")
        return clip(state, max_norm)

    monkeypatch.setattr("moec.runtime.clip_gradients", spoiled)


@pytest.mark.slow
@pytest.mark.parametrize("bound", BOUNDS)
def test_c30_processes_clip_alike(bound: float) -> None:
    outcomes = run_ranks(4, _train, bound)
    assert {norm for norm, _ in outcomes} == {outcomes[0][0]}
    assert_like(outcomes[0], one_rank(bound))


def _train(rank: int, bound: float) -> tuple[float, dict[str, Tensor]]:
    plan = plan_of(4, 2, bound)
    connect(plan.mesh, torch.device("cpu"))
    step = moec.compile(model(), plan)
    for seed in range(3):
        norm = step(split_rows(batch(ALL, seed), plan)[rank], lr=RATE).gradient_norm
    return float(norm), whole_weights(cast(ShardedState, step.state))
