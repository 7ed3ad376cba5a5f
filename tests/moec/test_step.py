"""The step's own checks: batches that cannot be right, losses that are not finite, batches without a valid label."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moec
from moec.compiler.errors import BatchError, NonFiniteError
from moec.compiler.plan import OptimizerPlan, Plan
from moec.runtime.batch import BatchRules

from ..spine import (
    PLAN,
    VOCABULARY,
    WIDTH,
    Language,
    Layer,
    assert_equal_gradients,
    batch_for,
    distance,
    eager,
    seeded,
    small_k3,
)

PACKED = Plan(batch=2, length=6, packing=True)
ACCUMULATED = Plan(batch=2, length=6, accumulation=2)
DYNAMIC = Plan(batch=2, length=6, dynamic="length", min_length=3)


def good(plan: Plan, **changes: Any) -> dict[str, Tensor]:
    batch = batch_for(plan)
    if plan.packing:
        batch["document_ids"] = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 2]])
        batch["labels"] = batch["input_ids"].clone()
        batch["labels"][:, 0] = -100
        batch["labels"][:, 1:][batch["document_ids"].diff() != 0] = -100
    return batch | changes


def refused(plan: Plan, batch: dict[str, Any], says: str) -> BatchError:
    with pytest.raises(BatchError) as caught:
        BatchRules(plan, vocabulary=VOCABULARY).checked(batch)
    assert says in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    "plan", [PLAN, PACKED, ACCUMULATED, DYNAMIC], ids=["plain", "packed", "accumulated", "dynamic"]
)
def test_good_batches_pass_in_one_shape(plan: Plan) -> None:
    found = BatchRules(plan, vocabulary=VOCABULARY).checked(good(plan))
    assert {value.shape for value in found.values()} == {(plan.accumulation, 2, 6)}
    assert ("document_ids" in found) == plan.packing


@pytest.mark.parametrize(
    ("shape", "plan"),
    [
        ((2, 7), PLAN),
        ((3, 6), PLAN),
        ((6,), PLAN),
        ((2, 2, 6), PLAN),
        ((2, 6), ACCUMULATED),
        ((2, 2), DYNAMIC),
        ((2, 7), DYNAMIC),
    ],
)
def test_a_wrong_shape_names_the_compiled_one(shape: tuple[int, ...], plan: Plan) -> None:
    ids = torch.zeros(shape, dtype=torch.int64)
    error = refused(plan, {"input_ids": ids, "labels": ids}, f"input_ids has shape {list(shape)}")
    length = "3..6" if plan.dynamic else "6"
    assert f"compiled for [{plan.accumulation}, 2, {length}]" in error.what
    assert error.where == "plan.accumulation, plan.batch, plan.length"
    if plan.dynamic:
        bound = "shortest that the graph takes is 3" if shape[1] < 3 else "longest that the graph takes is 6"
        assert error.why.startswith(f"its length is {shape[1]}, the {bound}")
    else:
        assert error.why == ""


def test_tensors_of_different_shapes_are_refused() -> None:
    batch = good(DYNAMIC, labels=torch.zeros(2, 5, dtype=torch.int64))
    refused(DYNAMIC, batch, "the tensors of a batch have different shapes")


@pytest.mark.parametrize("name", ["input_ids", "labels"])
def test_a_wrong_dtype_or_a_missing_tensor_is_refused(name: str) -> None:
    batch = good(PLAN)
    refused(PLAN, batch | {name: batch[name].int()}, f"{name} has dtype torch.int32")
    refused(PLAN, {key: value for key, value in batch.items() if key != name}, f"the batch has no {name}")


def test_unknown_tensors_are_refused() -> None:
    refused(
        PLAN, good(PLAN) | {"attention_mask": torch.ones(2, 6)}, "holds attention_mask, which the step does not take"
    )
    refused(PLAN, good(PLAN) | {"document_ids": torch.zeros(2, 6)}, "the plan says packing: false")
    refused(PLAN, good(PLAN) | {"image_features": torch.zeros(1, 8)}, "the plan has no image tokens")


@pytest.mark.parametrize(
    ("name", "value"),
    [("input_ids", VOCABULARY), ("input_ids", -1), ("labels", VOCABULARY), ("labels", -1), ("labels", -101)],
)
def test_values_out_of_range_are_named_with_their_place(name: str, value: int) -> None:
    batch = good(PLAN)
    batch[name] = batch[name].clone()
    batch[name][1, 4] = value
    error = refused(PLAN, batch, f"{name} holds {value} at [0, 1, 4] (1 such values)")
    assert f"[0, {VOCABULARY})" in error.why


def test_document_ids_that_decrease_are_refused() -> None:
    ids = torch.tensor([[0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0]])
    refused(PACKED, good(PACKED, document_ids=ids), "document ids never decrease along a row")


def test_the_first_token_of_a_document_must_be_ignored() -> None:
    """Nothing of its own document predicts it; training on it teaches across documents."""
    batch = good(PACKED)
    batch["labels"][0, 3] = 5
    refused(PACKED, batch, "the first token of a document must have label -100")


def test_an_unknown_vocabulary_leaves_values_unchecked() -> None:
    batch = good(PLAN, input_ids=torch.full((2, 6), 10**6))
    BatchRules(PLAN).checked(batch)


@pytest.fixture(scope="module")
def model() -> Any:
    return seeded(Language, Layer(), Layer(), Layer())


@pytest.fixture(scope="module")
def compiled(model: nn.Module) -> moec.CompiledStep:
    return moec.compile(model, Plan(batch=2, length=6, optimizer=OptimizerPlan(lr=0.0, schedule="constant")))


def test_a_refused_batch_changes_nothing(compiled: moec.CompiledStep) -> None:
    with pytest.raises(BatchError):
        compiled(torch.zeros(2, 7, dtype=torch.int64), torch.zeros(2, 7, dtype=torch.int64))
    assert (compiled.state.step, compiled.state.gradients) == (0, {})


def test_tensors_and_a_mapping_are_the_same_batch(compiled: moec.CompiledStep) -> None:
    batch = batch_for(PLAN)
    one, two = compiled(batch), compiled(batch["input_ids"], batch["labels"])
    assert torch.equal(one.loss, two.loss)
    assert torch.equal(one.gradient_norm, two.gradient_norm)
    assert (one.tokens, one.metrics["lr"]) == (12, 0.0)


def test_no_valid_label_gives_zero_and_a_warning(compiled: moec.CompiledStep) -> None:
    batch = batch_for(PLAN)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    with pytest.warns(UserWarning, match="no label of this batch is valid"):
        result = compiled(batch)
    assert (float(result.loss), float(result.gradient_norm)) == (0.0, 0.0)
    assert all(not grad.any() for grad in compiled.gradients(batch).values())


def test_a_microbatch_without_labels_counts_for_nothing() -> None:
    model = seeded(Language, Layer(), Layer())
    step = moec.compile(model, ACCUMULATED)
    batch = batch_for(ACCUMULATED)
    batch["labels"][1] = -100
    loss, gradients = eager(model, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert distance(step.loss(batch)["lm_loss"], loss) <= 1e-6
        assert_equal_gradients(step.gradients(batch), gradients)


@contextmanager
def spoiled(*weights: Tensor) -> Iterator[None]:
    """The weights may be changed within the context, and are as before on exit."""
    before = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        yield
        for weight, value in zip(weights, before, strict=True):
            weight.copy_(value)


@pytest.mark.parametrize(
    ("layer", "value", "kind"), [(1, float("nan"), "nan"), (2, 3e38, "infinity"), (0, -3e38, "infinity")]
)
def test_a_loss_that_is_not_finite_names_the_step_and_the_layer(
    model: Any, compiled: moec.CompiledStep, layer: int, value: float, kind: str
) -> None:
    """Before any weight changes; the step goes on once the cause is gone."""
    part, steps = model.layers[layer], compiled.state.step
    with spoiled(part.down.weight, part.up.weight):
        part.down.weight.zero_()[:, 0] = value
        part.up.weight.mul_(1000)
        with pytest.raises(NonFiniteError) as caught:
            compiled(batch_for(PLAN))
    assert f"step {steps + 1}: the global gradient norm is nan; no weight was changed" in caught.value.what
    assert f"layers.{layer} is the first layer whose output holds {kind}" in caught.value.where
    assert compiled.state.step == steps
    compiled(batch_for(PLAN))


def test_a_weight_outside_the_layers_that_is_not_finite_is_named(model: Any, compiled: moec.CompiledStep) -> None:
    with spoiled(model.head.weight):
        model.head.weight[3, 2] = float("nan")
        with pytest.raises(NonFiniteError) as caught:
            compiled(batch_for(PLAN))
    assert "the weight head.weight is not finite" in caught.value.where


def test_a_run_of_steps_lowers_the_loss() -> None:
    """The reference itself must move, or an equality test says little."""
    model = seeded(Language, Layer(), Layer())
    plan = Plan(batch=2, length=6, optimizer=OptimizerPlan(lr=3e-2, schedule="constant"))
    step = moec.compile(model, plan)
    losses = [float(step(batch_for(plan)).loss) for _ in range(20)]
    assert losses[-1] < 0.9 * losses[0]
    assert model.embed.weight.shape == (VOCABULARY, WIDTH)


@pytest.mark.parametrize("make", [small_k3, lambda: seeded(Language, Layer(), Layer())], ids=["k3", "any module"])
def test_a_loss_in_float64_is_the_mean_in_float64(make: Callable[..., Any]) -> None:
    """One over the number of tokens is no float32 number."""
    model = make().double()
    batch = batch_for(PLAN, seed=3)
    labels = batch["labels"].clone()
    labels[:, 1:] = batch["input_ids"][:, 1:]
    labels[0, 1:4] = -100  # 7 are left
    with torch.no_grad():
        found = model(batch["input_ids"], labels)
        wanted = found.lm_loss if hasattr(found, "lm_loss") else found
    loss = moec.compile(model, PLAN).loss({**batch, "labels": labels})["lm_loss"]
    assert loss.dtype == torch.float64
    assert distance(loss, wanted) < 1e-14
