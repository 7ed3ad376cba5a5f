"""`moec.verify` is equal for a right step and sees every planted error: a gate has to be able to fail (C37)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import moec
from moec import step_pair, verification
from moec.comparison import Comparison
from moec.compiler.errors import PlanError
from moec.compiler.plan import OptimizerPlan, Plan
from moec.distance import relative_error
from moec.eager import EagerStep
from moec.models.build import build
from moec.random_batch import random_batches
from moec.step import CompiledStep
from moec.verification import Report, verify

from ..spine import small_k3
from .small_models import SMALL_K3, SmallModel

PLAN = Plan(batch=2, length=32, packing=True, accumulation=2, optimizer=OptimizerPlan(lr=3e-3, clip_norm=0.1))
EXPERTS = "layers.1.feed_forward.mlp.experts.down"


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return build(SMALL_K3)


@pytest.fixture(scope="module")
def artifact(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moec.compile(copy.deepcopy(model), PLAN).save(tmp_path_factory.mktemp("artifact") / "step")


Mutation = Callable[[CompiledStep], None]


@pytest.fixture
def verify_mutant(model: nn.Module, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Mutation], Report]:
    """Verify `model` with the compiled step changed by a mutation."""

    def run(mutation: Mutation) -> Report:
        def compiled(copied: nn.Module, plan: Plan) -> CompiledStep:
            step = moec.load(artifact, copied, plan=plan)
            mutation(step)
            return step

        monkeypatch.setattr(step_pair.moec, "compile", compiled)
        monkeypatch.setattr(verification, "check_passes", lambda *_: [])
        return verify(model, PLAN, steps=2)

    return run


def test_a_right_step_is_equal_and_the_model_is_left_alone(
    model: nn.Module, verify_mutant: Callable[[Mutation], Report]
) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = verify_mutant(lambda step: None)
    assert report.equal, str(report)
    assert {c.kind for c in report.comparisons} >= {
        "loss",
        "gradient",
        "gradient norm",
        "parameter",
        "routing counts",
        "buffer",
    }
    assert {c.name for c in report.comparisons if c.kind == "gradient"} == {n for n, _ in model.named_parameters()}
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def _scale_gradient(path: str, factor: float) -> Mutation:
    def mutate(step: CompiledStep) -> None:
        accumulate = step.state.accumulate
        step.state.accumulate = lambda name, g: accumulate(name, g * factor if name == path else g)  # type: ignore[method-assign]

    return mutate


def _swap_experts(step: CompiledStep) -> None:
    weight = step.state.weights[EXPERTS].data
    weight[[0, 1]] = weight[[1, 0]]


def _zero_expert(step: CompiledStep) -> None:
    step.state.weights[EXPERTS].data[2] = 0.0


def _changed_update(change: Callable[[CompiledStep, float], float]) -> Mutation:
    def mutate(step: CompiledStep) -> None:
        update = step.program.update
        step.program.update = lambda state, lr: update(state, change(step, lr))  # type: ignore[attr-defined]

    return mutate


def _forget_balance(step: CompiledStep) -> None:
    step.program.runtime = _WithoutBalance(step.program.runtime)  # type: ignore[attr-defined]


class _WithoutBalance:
    def __init__(self, runtime: object) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> object:
        return (lambda *_: None) if name == "update_balance" else getattr(self._runtime, name)


@pytest.mark.parametrize(
    ("mutation", "kind", "name"),
    [
        (_scale_gradient(EXPERTS, 0.0), "gradient", EXPERTS),
        (_scale_gradient("embed.weight", 2.0), "gradient", "embed.weight"),
        (_scale_gradient("layers.0.attention.mixer.decay.A_log", 1.001), "gradient", "decay.A_log"),
        (_swap_experts, "loss", "lm_loss"),
        (_zero_expert, "loss", "lm_loss"),
        (_changed_update(lambda step, lr: 1.01 * lr), "parameter", "embed.weight"),
        (_forget_balance, "buffer", "correction_bias"),
    ],
    ids=["zeroed", "doubled", "a thousandth", "experts swapped", "expert zeroed", "learning rate", "no balancing"],
)
def test_c37_a_wrong_step_is_seen(
    mutation: Mutation, kind: str, name: str, verify_mutant: Callable[[Mutation], Report]
) -> None:
    report = verify_mutant(mutation)
    assert not report.equal
    first = report.differences()[0]
    assert (first.step, first.kind) == (1, kind)
    assert name in first.name
    assert "not equal" in str(report)


def test_a_gradient_that_should_not_exist_is_a_difference(verify_mutant: Callable[[Mutation], Report]) -> None:
    def invent(step: CompiledStep) -> None:
        clear = step.state.clear_gradients

        def clear_and_add() -> None:
            clear()
            step.state.gradients["layers.0.attention_mix.proj"] = torch.full((32,), 1e-30)

        step.state.clear_gradients = clear_and_add  # type: ignore[method-assign]

    report = verify_mutant(invent)
    assert [c.name for c in report.differences() if c.kind == "gradient"][:1] == ["layers.0.attention_mix.proj"]


def test_c37_a_lost_auxiliary_loss_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the indexers of sparse attention, whose weights have no other loss."""
    torch.manual_seed(0)
    sparse = build(replace(SMALL_K3, full_attention="dsa", indexer_heads=4, indexer_dim=8, indexer_top_k=8))
    real = moec.compile

    def compiled(model: nn.Module, plan: Plan) -> CompiledStep:
        step = real(model, plan)
        for name in step.state.trainable:
            if "indexer" in name:
                _scale_gradient(name, 0.0)(step)
        return step

    monkeypatch.setattr(verification, "check_passes", lambda *_: [])
    assert verify(sparse, PLAN, steps=1).equal
    monkeypatch.setattr(step_pair.moec, "compile", compiled)
    report = verify(sparse, PLAN, steps=1)
    assert {one.kind for one in report.differences()} == {"gradient"}
    assert all("indexer" in one.name for one in report.differences())


def test_c37_a_model_that_does_not_train_is_seen() -> None:
    still = replace(PLAN, optimizer=OptimizerPlan(lr=0.0))
    report = verify(SmallModel(), still)
    assert not report.differences()
    assert not report.equal
    assert "no parameter of the eager model moved" in report.void
    assert "proves nothing" in str(report)


def test_c37_the_reference_loss_falls_while_it_is_compared() -> None:
    fast = replace(PLAN, optimizer=OptimizerPlan(lr=3e-2))
    report = verify(SmallModel(), fast, steps=4)
    assert report.equal, str(report)
    first, last = report.losses[0][1], report.losses[-1][1]
    assert last < 0.9 * first


def test_half_precision_is_measured_against_float32() -> None:
    report = verify(SmallModel().to(torch.bfloat16), PLAN)
    assert report.equal, str(report)
    assert "rounding" in {c.kind for c in report.comparisons}
    gradients = [c for c in report.comparisons if c.kind == "gradient"]
    assert max(c.error for c in gradients) > 1e-4


def test_a_wrong_gradient_shows_in_half_precision_too(monkeypatch: pytest.MonkeyPatch) -> None:
    real = moec.compile

    def compiled(model: nn.Module, plan: Plan) -> CompiledStep:
        step = real(model, plan)
        _scale_gradient("head.weight", 1.1)(step)
        return step

    monkeypatch.setattr(step_pair.moec, "compile", compiled)
    report = verify(SmallModel().to(torch.bfloat16), PLAN)
    assert {c.name for c in report.differences()} == {"head.weight"}
    assert {c.step for c in report.differences()} == {1, 2, 3}


WITH_IMAGES = replace(PLAN, image_tokens=9)


@pytest.fixture(scope="module")
def seeing_model() -> nn.Module:
    torch.manual_seed(0)
    return build(replace(SMALL_K3, image_token=259))


def test_image_features_are_compared(seeing_model: nn.Module) -> None:
    report = verify(seeing_model, WITH_IMAGES, steps=2)
    assert report.equal, str(report)


def test_swapped_image_features_are_not_equal(seeing_model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    real = moec.compile

    def compiled(model: nn.Module, plan: Plan) -> CompiledStep:
        step = real(model, plan)
        forward = step.program.forward
        step.program.forward = lambda state, batch: forward(  # type: ignore[attr-defined]
            state, batch | {"image_features": batch["image_features"].flip(0)}
        )
        return step

    monkeypatch.setattr(step_pair.moec, "compile", compiled)
    monkeypatch.setattr(verification, "check_passes", lambda *_: [])
    report = verify(seeing_model, WITH_IMAGES, steps=1)
    assert [(one.kind, one.name) for one in report.differences()][:1] == [("loss", "lm_loss")]


def test_float64_has_tight_bounds() -> None:
    report = verify(SmallModel().double(), PLAN)
    assert report.equal, str(report)
    assert max(c.bound for c in report.comparisons) < 1e-9


def test_the_compiled_step_is_as_far_from_float64_as_eager() -> None:
    """What it uses up of the bound in float32 is rounding that eager has too; for one gradient the ratio is chance."""
    model, plan = small_k3(), Plan(batch=2, length=32)
    step = moec.compile(copy.deepcopy(model), plan)
    eager = EagerStep(copy.deepcopy(model), plan)
    precise = EagerStep(copy.deepcopy(model).double(), plan)
    ratios: list[float] = []
    for batch in islice(random_batches(plan, model.config.vocab_size, 0), 4):
        found, (_, plain) = step.gradients(batch), eager.gradients(batch)
        exact = {
            name: value for name, value in precise.gradients(batch)[1].items() if value is not None and value.any()
        }
        ratios += [relative_error(found[n], value) / relative_error(plain[n], value) for n, value in exact.items()]
    assert len(ratios) > 150
    assert 0.75 < math.exp(sum(map(math.log, ratios)) / len(ratios)) < 1.33


def test_how_far_eager_is_off_is_said_where_it_was_measured() -> None:
    pair = cast("Any", SimpleNamespace(noise=lambda one: 2e-5 if one.name == "a.1.w" else None))
    near, far = (Comparison("gradient", name, 2, error, 1e-5) for name, error in (("a.1.w", 9e-6), ("b", 1e-6)))
    assert (
        "nearest to its bound is the gradient of a.1.w in step 2: 9.0e-06 of 1.0e-05; eager itself is up to 2.0e-05"
        in (verification._rounding([far, near], pair))
    )
    assert verification._rounding([far], pair) == ""


def test_progress_is_told_what_is_being_done() -> None:
    told: list[str] = []
    verify(SmallModel(), PLAN, steps=2, progress=told.append)
    assert told[0] == "compiling"
    assert told[-2:] == ["step 1 of 2", "step 2 of 2"]
    assert "pass chunk_loss on model" in told


def test_no_steps_are_refused() -> None:
    with pytest.raises(PlanError, match="steps is 0"):
        verify(SmallModel(), PLAN, steps=0)


@pytest.mark.parametrize(
    ("value", "reference", "error"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), 0.0),
        (torch.tensor([3.0]), torch.tensor([2.0]), 0.5),
        (torch.zeros(2), torch.zeros(2), 0.0),
        (torch.tensor([1e-30]), torch.zeros(1), float("inf")),
        (None, None, 0.0),
        (torch.zeros(2), None, float("inf")),
        (None, torch.zeros(2), float("inf")),
        (torch.tensor([float("nan")]), torch.tensor([1.0]), float("inf")),
    ],
)
def test_relative_error(value: Tensor | None, reference: Tensor | None, error: float) -> None:
    assert relative_error(value, reference) == error
