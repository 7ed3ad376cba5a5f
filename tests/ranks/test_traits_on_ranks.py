"""Models with one odd trait each on two simulated ranks: the gradients of one rank, or a refusal by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest

import moec
from moec.compiler.errors import UnsupportedModelError
from moec.compiler.plan import MeshPlan
from moec.placing import UnconnectedStep
from tests.moec.test_traits import TRAITS, Trait
from tests.spine import batch_for, distance

# Their forward writes buffers, of which every rank would have another value.
WRITING = {
    "a_running_mean",
    "writes_that_nothing_reads",
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
TRIED = [make for make in TRAITS if make.__name__ not in WRITING | NOT_ADDITIVE]


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
def test_buffers_that_ranks_would_write_apart_are_refused(make: Callable[[], Trait]) -> None:
    given = make()
    with pytest.raises(UnsupportedModelError, match="the forward writes the buffer"):
        moec.compile(given.model, replace(given.plan, mesh=MeshPlan(fsdp=2)))


def test_every_exception_is_there() -> None:
    assert {make.__name__ for make in TRAITS} >= WRITING | NOT_ADDITIVE
