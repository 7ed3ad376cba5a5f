"""The graphs of every stage, and those before and after each pass for several ranks, give the numbers of the program.

A pass with an error planted into it is found by its name and the weights that the error reaches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx, nn

import moec
from moec.compiler.errors import ArtifactError
from moec.compiler.placement import JointProgram
from moec.distance import relative_error
from moec.models.build import build
from moec.passes.prefetch_gathers import PrefetchGathers
from moec.passes.shard_experts import ShardExperts
from moec.passes.shard_parameters import ShardParameters
from moec.placing import UnconnectedStep
from moec.rank_checks import joined_batches
from moec.simulated import SimulatedRanks
from moec.stage_ranks import LEFT_OUT, simulate_without
from tests.moec.small_models import SMALL_K3
from tests.ranks.models import plan_of

pytestmark = pytest.mark.slow
PASSES = ("shard_experts", "shard_parameters", "prefetch_gathers")
BOUND = 1e-5
CONFIG = replace(SMALL_K3, layers=3, dense_layers=1, full_attention_layers=(3,))

c10d, ops = torch.ops._c10d_functional, torch.ops.moec


def model() -> nn.Module:
    torch.manual_seed(0)
    return build(CONFIG).train()


def step_of(fsdp: int = 2, ep: int = 2, **mesh: Any) -> UnconnectedStep:
    return cast(UnconnectedStep, moec.compile(model(), plan_of(fsdp, ep, length=24, packing=True, **mesh)))


def batch_of(step: UnconnectedStep, steps: int = 1) -> list[dict[str, Tensor]]:
    return joined_batches(step.model, step.plan, steps, 0)


def moved(before: SimulatedRanks, after: SimulatedRanks, batch: dict[str, Tensor]) -> list[str]:
    """Names of the losses and gradients that differ."""
    one, two = ({**ranks.loss(batch), **ranks.gradients(batch)} for ranks in (before, after))
    assert one.keys() == two.keys()
    assert any(float(value.abs().max()) > 0 for value in one.values())
    return [name for name, value in one.items() if not relative_error(two[name], value) <= BOUND]


def moved_by_pass(step: UnconnectedStep) -> dict[str, list[str]]:
    """Pass -> what differs between the graphs before it and those after it, in the order of the passes."""
    batch = batch_of(step)[0]
    graphs = [simulate_without(step, PASSES[count:]) for count in range(len(PASSES) + 1)]
    return {name: moved(before, after, batch) for name, (before, after) in zip(PASSES, pairwise(graphs), strict=True)}


@pytest.mark.parametrize("stage", LEFT_OUT)
def test_graphs_of_a_stage_train_as_the_program_does(stage: str) -> None:
    step = step_of()
    program, graphs = step.simulate_ranks(2), step.simulate_ranks(2, stage=stage)
    for batch in batch_of(step, steps=2):
        one, two = program(batch), graphs(batch)
        assert relative_error(two.loss, one.loss) <= 1e-6
        assert relative_error(two.gradient_norm, one.gradient_norm) <= BOUND
        weights, found = program.weights(), graphs.weights()
        assert all(relative_error(found[name], value) <= 1e-4 for name, value in weights.items())
    assert any(not torch.equal(value, weights[name]) for name, value in step_of().simulate_ranks().weights().items())


@pytest.mark.parametrize(("fsdp", "ep"), [(2, 2), (4, 2)])
def test_numbers_stay_in_each_pass(fsdp: int, ep: int) -> None:
    assert moved_by_pass(step_of(fsdp, ep)) == {name: [] for name in PASSES}


def test_an_unknown_stage_is_named() -> None:
    with pytest.raises(ArtifactError, match="no stage 'fusd' to simulate"):
        step_of().simulate_ranks(2, stage="fusd")


# planted errors


def halve_what_returns(unit: Any) -> None:
    for node in unit.graph.find_nodes(op="call_function", target=ops.exchange_back.default):
        with unit.graph.inserting_after(node):
            half = unit.graph.call_function(torch.ops.aten.mul.Tensor, (node, 0.5))
        half.meta = dict(node.meta)
        node.replace_all_uses_with(half)
        half.args = (node, 0.5)


def take_the_largest(program: JointProgram) -> None:
    for node in program.outer.graph.find_nodes(op="call_function", target=c10d.reduce_scatter_tensor.default):
        if node.meta["bucket"] == "layers.1.feed_forward":
            node.args = (node.args[0], "max", *node.args[2:])


def wait_for_another_layer(program: JointProgram) -> None:
    gathers = program.outer.graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default)
    shards: dict[str, fx.Node] = {node.meta["bucket"]: node.args[0] for node in gathers}
    backward = [node for node in gathers if node.meta["bucket"] == "layers.0.attention"][-1]
    backward.args = (shards["layers.1.attention"], *backward.args[1:])


PLANTED: dict[str, tuple[type, Callable[[Any], None], Callable[[str], bool]]] = {
    "shard_experts": (ShardExperts, halve_what_returns, lambda name: True),
    "shard_parameters": (ShardParameters, take_the_largest, lambda name: name.startswith("layers.1.feed_forward.")),
    "prefetch_gathers": (
        PrefetchGathers,
        wait_for_another_layer,
        lambda name: name[:18] in ("layers.0.attention", "embed.weight"),
    ),
}


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_with_an_error_is_the_one_that_moves_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of()  # before the error is there
    kind, plant, reached = PLANTED[name]
    run = kind.run  # type: ignore[attr-defined]

    def wrong(self: Any, subject: Any, context: Any) -> Any:
        report = run(self, subject, context)
        plant(subject)
        return report

    monkeypatch.setattr(kind, "run", wrong)
    found = moved_by_pass(step)
    assert [other for other, names in found.items() if names] == [name]
    assert all(reached(weight) for weight in found[name]), found[name]
