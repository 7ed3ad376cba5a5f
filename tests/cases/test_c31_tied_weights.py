"""C31: a tied embedding and head stay one weight with one gradient and one set of moments, through save and load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import moec
from moec.compiler.plan import MeshPlan, OptimizerPlan, Plan
from moec.placing import UnconnectedStep
from moec.runtime.checkpoint import load_checkpoint, save_checkpoint
from moec.simulated import SimulatedRanks

from ..spine import Language, Layer, batch_for, distance, eager, seeded
from .planting import plant

PLAN = Plan(batch=2, length=6, optimizer=OptimizerPlan(lr=1e-2, schedule="constant"))


def materialised(tied: bool) -> Any:
    """Built on the meta device, then given memory and values: a tie has to be made again, as loaders do."""
    with torch.device("meta"):
        model = Language(Layer(), Layer(), tied=tied)
    model.to_empty(device="cpu")
    if tied:
        model.head.weight = model.embed.weight
    return seeded(lambda: model)


def train(step: moec.CompiledStep, start: int, steps: int = 3) -> list[float]:
    return [float(step(batch_for(PLAN, seed)).loss) for seed in range(start, start + steps)]


@pytest.mark.parametrize("tied", [True, False])
def test_c31_one_gradient_and_one_state(tied: bool) -> None:
    model = materialised(tied)
    assert_one_gradient_and_one_state(model, moec.compile(model, PLAN), tied)


def assert_one_gradient_and_one_state(model: Any, step: moec.CompiledStep, tied: bool) -> None:
    _, gradients = eager(model, batch_for(PLAN))
    found = step.gradients(batch_for(PLAN))
    assert ("head.weight" in found) != tied
    assert distance(found["embed.weight"], gradients["embed.weight"]) <= 1e-5  # type: ignore[arg-type]
    train(step, 0)
    assert ("head.weight" in step.state.exp_avg) != tied
    assert (model.head.weight is model.embed.weight) == tied
    assert (step.state.weights["head.weight"] is step.state.weights["embed.weight"]) == tied


def lose_a_use(monkeypatch: pytest.MonkeyPatch, step: moec.CompiledStep) -> None:
    """The gradient of the weight as an embedding is lost: the head's alone remains."""

    def nothing(plain: Any) -> Any:
        return SimpleNamespace(default=lambda *args: torch.zeros_like(plain.default(*args)))

    plant(monkeypatch, step, "aten", embedding_dense_backward=nothing)


def test_c31_a_gradient_of_one_use_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = materialised(True)
    step = moec.compile(model, PLAN)
    lose_a_use(monkeypatch, step)
    with pytest.raises(AssertionError):
        assert_one_gradient_and_one_state(model, step, True)


def test_c31_the_sum_of_both_uses_is_what_counts() -> None:
    """Half of the gradient, as when the two are split, is another one."""
    tied, untied = materialised(True), materialised(False)
    with torch.no_grad():
        untied.load_state_dict(tied.state_dict())
    whole = moec.compile(tied, PLAN).gradients(batch_for(PLAN))["embed.weight"]
    parts = moec.compile(untied, PLAN).gradients(batch_for(PLAN))
    assert distance(parts["embed.weight"] + parts["head.weight"], whole) <= 1e-5
    assert distance(parts["embed.weight"], whole) > 1e-2


@pytest.mark.parametrize("tied", [True, False])
def test_c31_a_resumed_run_is_bit_equal(tied: bool, tmp_path: Path) -> None:
    first = moec.compile(materialised(tied), PLAN)
    train(first, 0)
    path = save_checkpoint(tmp_path, first.state, fingerprint=first.fingerprint)
    wanted = train(first, 3)
    model = materialised(tied)
    nn.init.zeros_(model.embed.weight)
    resumed = moec.compile(model, PLAN)
    load_checkpoint(path, resumed.state, fingerprint=resumed.fingerprint)
    assert resumed.state.step == 3
    assert (model.head.weight is model.embed.weight) == tied
    assert train(resumed, 3) == wanted


JOINED = replace(PLAN, batch=2 * PLAN.batch)


def two_ranks(tied: bool) -> SimulatedRanks:
    two = moec.compile(materialised(tied), replace(PLAN, mesh=MeshPlan(fsdp=2)))
    return cast(UnconnectedStep, two).simulate_ranks()


def assert_sharded_once(many: SimulatedRanks, tied: bool) -> None:
    """Three steps of two ranks are those of one rank with the rows of both."""
    one = moec.compile(materialised(tied), JOINED)
    assert ("head.weight" in many.gradients(batch_for(JOINED))) != tied
    for seed in range(3):
        assert distance(many(batch_for(JOINED, seed)).loss, one(batch_for(JOINED, seed)).loss) <= 1e-6
    for rank in many.steps:
        assert ("head.weight" in rank.state.exp_avg) != tied
        assert (rank.state.weights["head.weight"] is rank.state.weights["embed.weight"]) == tied
    for name, weight in many.weights().items():
        assert distance(weight, one.state.weights[name]) <= 1e-5, name


@pytest.mark.parametrize("tied", [True, False])
def test_c31_on_ranks_a_tied_weight_is_sharded_once(tied: bool) -> None:
    assert_sharded_once(two_ranks(tied), tied)


def test_c31_on_ranks_a_gradient_of_one_use_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    many = two_ranks(True)
    lose_a_use(monkeypatch, many.origin)
    with pytest.raises(AssertionError):
        assert_sharded_once(many, True)


def test_c31_an_artefact_keeps_the_tie(tmp_path: Path) -> None:
    step = moec.compile(materialised(True), PLAN)
    train(step, 0)
    loaded = moec.load(step.save(tmp_path / "step", weights=True))
    assert loaded.state.weights["head.weight"] is loaded.state.weights["embed.weight"]
    assert torch.equal(loaded.state.weights["embed.weight"], step.state.weights["embed.weight"])
