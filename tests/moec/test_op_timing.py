"""Times of ops: measured call by call in a step's own graphs, kept in a file, and taken by the cost model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import fx

import moec
from moec.compiler.cost import node_cost
from moec.compiler.errors import PlanError
from moec.compiler.hardware import hardware
from moec.compiler.op_times import OpTimes, call_key
from moec.compiler.plan import CachePlan, Plan
from moec.driver import build
from moec.random_batch import random_batches
from tests.spine import small_k3

PLAN = Plan(batch=2, length=64)


@pytest.fixture(scope="module")
def times() -> OpTimes:
    model = small_k3()
    before = {path: weight.clone() for path, weight in model.named_parameters()}
    found = moec.measure_ops(model, PLAN, next(random_batches(PLAN, 16, 0)), runs=1)
    assert all(torch.equal(weight, before[path]) for path, weight in model.named_parameters())
    return found


def ops_of(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]


def test_every_op_of_a_step_has_a_time(times: OpTimes) -> None:
    found = build(small_k3(), PLAN)
    parts = [section.parts for section in found.sections]
    nodes = [node for part in parts for graph in (part.forward, part.backward) for node in ops_of(graph)]
    assert len(nodes) > 100
    assert {call_key(node) for node in nodes} <= set(times.seconds)
    assert set(times.host) == set(times.seconds)
    assert all(seconds > 0 for seconds in times.seconds.values())


def test_the_cost_of_a_call_that_was_measured_is_its_time() -> None:
    def product(rows: int) -> fx.Node:
        graph = fx.Graph()
        operands = [graph.placeholder("x"), graph.placeholder("w")]
        for node, shape in zip(operands, ((rows, 8), (8, 4)), strict=True):
            node.meta["val"] = torch.empty(shape, device="meta")
        call = graph.call_function(torch.ops.aten.mm.default, tuple(operands))
        call.meta["val"] = torch.empty(rows, 4, device="meta")
        return call

    assert call_key(product(3)) == "aten.mm.default(float32[3, 8], float32[8, 4])"
    device = dataclasses.replace(hardware(), times={call_key(product(3)): 7.0})
    assert node_cost(product(3), device).seconds == 7.0
    assert node_cost(product(5), device).seconds == node_cost(product(5), hardware()).seconds < 1e-3


def test_a_plan_with_times_is_timed_by_them(times: OpTimes, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    dataclasses.replace(times, seconds=dict.fromkeys(times.seconds, 1.0)).write(path)
    assert OpTimes.read(path).host == times.host
    step = moec.compile(small_k3(), dataclasses.replace(PLAN, cache=CachePlan(times=str(path))))
    assert sum(sum(pair) for pair in step.log.times.values()) > 100  # seconds: one for each op that is no view


def test_a_file_that_holds_none_is_refused(tmp_path: Path) -> None:
    plan = dataclasses.replace(PLAN, cache=CachePlan(times=str(tmp_path / "none.json")))
    with pytest.raises(PlanError, match=r"holds no times of ops") as caught:
        moec.compile(small_k3(), plan)
    assert "measure_ops" in caught.value.hint
