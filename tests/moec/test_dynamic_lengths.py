"""`dynamic: length`: every length that a plan names works, and where one graph does not take all, it is said which."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moec
from moec.compiler.errors import ArtifactError, BatchError, CaptureError
from moec.compiler.plan import OptimizerPlan, Plan

from ..spine import WIDTH, Language, Layer, batch_for, distance, eager, seeded, small_k3


def plan_of(shortest: int | None, longest: int, **options: Any) -> Plan:
    return Plan(batch=2, length=longest, dynamic="length", min_length=shortest, check=True, **options)


class Pooled(nn.Module):
    """A convolution without padding: no shorter sequence than its width fits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.conv(hidden.transpose(1, 2)).mean(-1)[:, None]


class Branching(Layer):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * (1.0 if hidden.shape[1] < 8 else 2.0)


class Fourth(Layer):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + hidden[:, 3:4]


class Fixed(Layer):
    """Adds a value to each of 24 places."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(24, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + (self.places if hidden.shape[1] == 24 else 0)


class InFours(Layer):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + hidden.unflatten(1, (-1, 4)).mean((1, 2))[:, None]


class Doubled(Layer):
    """Its backward is another one for long sequences, which shows after capture alone."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(by_length(hidden))


@torch.library.custom_op("moec_tests::by_length", mutates_args=())
def by_length(x: Tensor) -> Tensor:
    return x * 2


@by_length.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _backward(context: Any, grad: Tensor) -> Tensor:
    return grad * 2 if grad.shape[1] > 10 else grad + grad


by_length.register_autograd(_backward)


@pytest.mark.parametrize(
    ("layers", "shortest", "reason"),
    [
        ((Layer,), 3, "the model was traced with length >= 3"),
        ((Pooled, Pooled), 5, "layer layers.0 was traced with length - 3 != 1"),
        ((Branching, Branching), 8, "layer layers.0 was traced with length >= 8"),
        ((Fourth, Fourth), 4, "layer layers.0 was traced with length >= 4"),
        pytest.param(
            (Fourth, Fourth, Branching, Branching),
            8,
            "layer layers.2 was traced with length >= 8",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["shift", "convolution", "branch", "slice", "several"],
)
def test_the_shortest_length_is_found_and_works(layers: tuple[Any, ...], shortest: int, reason: str) -> None:
    def make() -> Any:
        return seeded(Language, *(kind() for kind in layers))

    with pytest.raises(CaptureError) as caught:
        moec.compile(make(), plan_of(2, 24))
    error = caught.value
    assert error.what == f"one graph does not take every length from 2 to 24: it takes lengths from {shortest} to 24"
    assert (error.where, reason in error.why) == ("plan.min_length", True)
    assert error.hint.startswith(f"set min_length: {shortest}, or ")
    step = equal_at(make(), plan_of(None, 24), (shortest, shortest + 1, 23, 24))
    assert step.plan == plan_of(shortest, 24)


def test_conditions_that_only_backward_makes_are_found() -> None:
    with pytest.raises(CaptureError) as caught:
        moec.compile(seeded(Language, Doubled(), Doubled()), plan_of(3, 24))
    assert caught.value.what == "one graph does not take every length from 3 to 24: it takes lengths from 11 to 24"
    assert caught.value.why == "the backward of layer was traced with length >= 11"
    step = equal_at(seeded(Language, Doubled(), Doubled()), plan_of(None, 24), (11, 24))
    assert step.plan.min_length == 11


def test_an_open_shortest_length_is_that_of_the_artefact(tmp_path: Path) -> None:
    model, plan = seeded(Language, Layer(), Layer()), Plan(batch=2, length=24, dynamic="length")
    folder = moec.compile(model, plan).save(tmp_path / "saved")
    assert moec.load(folder, model, plan=plan).plan.min_length == 3
    with pytest.raises(ArtifactError, match=r"plan\.min_length"):
        moec.load(folder, model, plan=replace(plan, min_length=4))


def test_a_model_with_an_open_shortest_length_is_verified() -> None:
    plan = Plan(batch=2, length=8, dynamic="length", optimizer=OptimizerPlan(lr=1e-2))
    report = moec.verify(seeded(Language, Layer(), Layer()), plan, steps=2)
    assert report.equal, str(report)


def equal_at(model: Any, plan: Plan, lengths: tuple[int, ...]) -> moec.CompiledStep:
    step = moec.compile(model, plan)
    plan = step.plan
    for length in lengths:
        batch = batch_for(plan, seed=length, length=length)
        batch["labels"][:, 1] = batch["input_ids"][:, 1]  # so that there is one in the shortest
        loss, gradients = eager(copy.deepcopy(model), batch)
        assert distance(step.loss(batch)["lm_loss"], loss) <= 1e-6, length
        found = step.gradients(batch)
        for name, wanted in gradients.items():
            assert wanted is None or distance(found[name], wanted) <= 1e-5, (length, name)
    assert f"one graph for every length from {plan.min_length} to {plan.length}, backward included" in step.log.notes
    return step


def test_a_step_says_which_lengths_it_takes() -> None:
    step = moec.compile(seeded(Language, Layer(), Layer()), plan_of(3, 9))
    for length, says in ((2, "the shortest that the graph takes is 3"), (10, "the longest that the graph takes is 9")):
        with pytest.raises(BatchError, match=f"its length is {length}, {says}"):
            step(batch_for(step.plan, length=length))
    assert "one graph for every length from 3 to 9" in str(step.log)


def test_a_layer_of_one_length_is_named() -> None:
    with pytest.raises(CaptureError) as caught:
        moec.compile(seeded(Language, Fixed(), Fixed()), plan_of(3, 24))
    assert "it takes length 24 alone" in caught.value.what
    assert caught.value.hint == "compile with a fixed length (dynamic: null)"


def test_a_model_that_takes_multiples_alone_is_named() -> None:
    with pytest.raises(CaptureError) as caught:
        moec.compile(seeded(Language, InFours(), InFours()), plan_of(4, 24))
    assert caught.value.what == "the model runs at length 24, and not at length 13"
    assert "unflatten" in caught.value.why


KINDS: dict[str, Callable[[], Any]] = {
    "mla": lambda: small_k3(layers=2, full_attention_layers=(1, 2)),
    "dsa": lambda: small_k3(layers=1, full_attention_layers=(1,), full_attention="dsa"),  # top 4
    "kda": lambda: small_k3(layers=2, full_attention_layers=()),  # chunks of 16, convolutions of 4
}


class Loss(nn.Module):
    """The loss alone, for the eager reference."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids, labels).loss


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_lengths_at_the_borders_of_our_layers(kind: str) -> None:
    """Around the width of the convolution, the choice of sparse attention, and the chunk of the recurrence."""
    model, plan = KINDS[kind](), plan_of(2, 33)
    step = moec.compile(model, plan)
    for length in (2, 3, 4, 5, 15, 16, 17, 32, 33):
        batch = batch_for(plan, seed=length, length=length)
        batch["labels"][:, 1] = batch["input_ids"][:, 1]
        loss, gradients = eager(Loss(copy.deepcopy(model)), batch)
        found = step.loss(batch)
        objective = sum(found.values()) - found.get("objective", 0)
        assert distance(objective, loss) <= 1e-6, (length, found)
        computed, present = step.gradients(batch), {n: g for n, g in gradients.items() if g is not None}
        largest = max(float(gradient.norm()) for gradient in present.values())
        for name, wanted in present.items():
            error = float((computed[name.removeprefix("model.")] - wanted).norm())
            # A gradient that cancels, as that of a softmax over one key, is as large as the rounding of the others.
            assert error <= 1e-5 * max(float(wanted.norm()), 1e-2 * largest), (length, name)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_fixed_lengths(length: int) -> None:
    model = small_k3()
    plan = Plan(batch=2, length=length, check=True)
    batch = batch_for(plan)
    if length == 1:
        with pytest.warns(UserWarning, match="no label of this batch is valid"):
            result = moec.compile(model, plan)(batch)
        assert float(result.loss) == 0
        return
    batch["labels"] = batch["input_ids"].clone()
    reference = eager(Loss(copy.deepcopy(model)), batch)[0]
    assert distance(moec.compile(model, plan).loss(batch)["lm_loss"], reference) <= 1e-6
