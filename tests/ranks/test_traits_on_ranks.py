"""Models with one odd trait each on two simulated ranks: the gradients of one rank, or a refusal by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor, nn

import moec
from moec.compiler.errors import UnsupportedModelError
from moec.compiler.plan import MeshPlan, Plan
from moec.placing import UnconnectedStep
from moec.simulated import split_rows
from tests.moec.test_traits import TRAITS, Trait, writes_that_nothing_reads
from tests.spine import WIDTH, Language, Layer, batch_for, distance, eager, seeded

# Their forward writes buffers, of which every rank has another value.
WRITING = {
    "a_running_mean",
    "one_buffer_written_by_every_layer",
    "one_buffer_written_in_every_microbatch",
    "a_buffer_that_other_layers_read",
    "a_buffer_that_other_layers_read_and_run_again",
    "a_layers_buffer_written_outside_of_it",
    "a_buffer_given_to_layers_as_an_argument",
    "a_buffer_with_two_names_in_a_layer",
    "a_batch_norm_outside_that_layers_read",
    "buffers_written_in_another_order_than_declared",
    "batch_norm",
    "a_counter_outside_the_layers",
    "gradients_on_inside_of_no_grad",
    "autocast_switched_off",
}
# Their loss is no sum over tokens, so it depends on which rows make a microbatch.
NOT_ADDITIVE = {"a_forward_that_writes_into_its_batch", "results_that_nobody_uses"}
# Its forward counts rows in a buffer of integers, which have no mean.
COUNTING = {"writes_that_nothing_reads"}
TRIED = [make for make in TRAITS if make.__name__ not in WRITING | COUNTING | NOT_ADDITIVE]


@pytest.mark.parametrize("make", TRIED, ids=lambda make: make.__name__)
def test_two_ranks_have_the_gradients_of_one(make: Callable[[], Trait]) -> None:
    given, again = make(), make()
    joined = replace(given.plan, batch=2 * given.plan.batch)
    batch = batch_for(joined, length=given.length)
    one = moec.compile(given.model, joined)
    plan = replace(given.plan, mesh=MeshPlan(fsdp=2), check=True)
    many = cast(UnconnectedStep, moec.compile(again.model, plan)).simulate_ranks()
    wanted, found = one.gradients(batch), many.gradients(batch)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert distance(found[name], gradient) <= given.gradient_bound, name
    result = many(batch)
    assert distance(result.loss, one(batch).loss) <= max(given.loss_bound, 1e-6)
    for name, weight in many.weights().items():
        assert distance(weight, one.state.weights[name]) <= 1e-4, name


@pytest.mark.parametrize("make", [t for t in TRAITS if t.__name__ in WRITING], ids=lambda make: make.__name__)
def test_buffers_that_ranks_write_are_their_mean(make: Callable[[], Trait]) -> None:
    """Each of two eager models reads the rows of one rank: gradients add up, and buffers are means."""
    given, replicas = make(), [make().model for _ in range(2)]
    plan = replace(given.plan, mesh=MeshPlan(fsdp=2), check=True)
    batch = batch_for(replace(given.plan, batch=2 * given.plan.batch), length=given.length)
    parts = split_rows(batch, plan)
    results = [eager(model, part) for model, part in zip(replicas, parts, strict=True)]
    valid = [int((part["labels"][..., 1:] != -100).sum()) for part in parts]
    shares = [count / sum(valid) for count in valid]
    step = cast(UnconnectedStep, moec.compile(given.model, plan))
    many = step.simulate_ranks()
    found = many.gradients(batch)
    for name, gradient in results[0][1].items():
        other = results[1][1][name]
        if gradient is not None and other is not None:
            wanted = shares[0] * gradient + shares[1] * other
            assert distance(found[name], wanted) <= given.gradient_bound, name
    result = many(batch)
    loss = shares[0] * results[0][0] + shares[1] * results[1][0]
    assert distance(result.loss, loss) <= 1e-6
    for rank in many.steps:
        for name, buffer in rank.state.buffers.items():
            one, two = (model.get_buffer(name) for model in replicas)
            wanted = (one + two) / 2 if one.is_floating_point() else one
            assert distance(buffer, wanted) <= 1e-6, name
            assert torch.equal(buffer, many.steps[0].state.buffers[name])
    assert any(not torch.equal(a, b) for a, b in zip(replicas[0].buffers(), make().model.buffers(), strict=True))


def test_counts_of_rows_are_refused_before_the_update() -> None:
    given = writes_that_nothing_reads()
    plan = replace(given.plan, mesh=MeshPlan(fsdp=2))
    many = cast(UnconnectedStep, moec.compile(given.model, plan)).simulate_ranks()
    batch, before = batch_for(replace(plan, batch=2 * plan.batch)), many.weights()
    with pytest.raises(UnsupportedModelError, match=r"ranks 0 and 1 wrote different values to the buffer .*signs"):
        many(batch)
    assert all(torch.equal(weight, before[name]) for name, weight in many.weights().items())
    assert all(not rank.state.buffers["layers.0.calls"].any() and rank.state.step == 0 for rank in many.steps)


def test_a_weight_that_a_forward_writes_is_refused() -> None:
    class Shrinking(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.rate = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

        def forward(self, hidden: Tensor) -> Tensor:
            self.rate.mul_(0.5)
            return super().forward(hidden * self.rate)

    with pytest.raises(UnsupportedModelError, match=r"the forward writes the weight layers\.0\.rate"):
        moec.compile(seeded(Language, Shrinking(), Shrinking()), Plan(batch=2, length=6, mesh=MeshPlan(fsdp=2)))


def test_every_exception_is_there() -> None:
    assert {make.__name__ for make in TRAITS} >= WRITING | COUNTING | NOT_ADDITIVE
