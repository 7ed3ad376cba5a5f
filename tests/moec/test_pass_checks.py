"""The check of every pass on its own names a planted wrong pass and the node where numbers move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import pytest
import torch
from torch import fx

from moec import fused_stage
from moec.compiler.graph import Unit
from moec.compiler.pass_manager import Pass, PassContext, Report
from moec.compiler.plan import Plan
from moec.eager import microbatches
from moec.pass_checks import PassCheck, check_passes
from moec.random_batch import random_batches
from moec.verification import verify

from .small_models import VOCABULARY, SmallModel

PLAN = Plan(batch=2, length=24, packing=True)
aten = torch.ops.aten


class Innocent(Pass):
    """Changes names only: every silu is put in again."""

    name = "innocent"

    def run(self, unit: Unit, context: PassContext) -> Report:
        report = Report()
        for node in unit.graph.find_nodes(op="call_function", target=aten.silu.default):
            _put_behind(unit.graph, node, self.replace)
            report.match(node, "silu")
        return report

    def replace(self, graph: fx.Graph, node: fx.Node) -> fx.Node:
        return _call(graph, node, aten.silu.default, node.args[0])


class Scaled(Innocent):
    """A thousandth too much."""

    name = "scaled"
    changes_numerics = True

    def replace(self, graph: fx.Graph, node: fx.Node) -> fx.Node:
        return _call(graph, node, aten.mul.Tensor, node, 1.001)


class Detached(Innocent):
    """The right value without a gradient."""

    name = "detached"
    changes_numerics = True

    def replace(self, graph: fx.Graph, node: fx.Node) -> fx.Node:
        return _call(graph, node, aten.detach.default, node)


class Rounding(Innocent):
    """Moves the last bits although it promises not to."""

    name = "rounding"

    def replace(self, graph: fx.Graph, node: fx.Node) -> fx.Node:
        return _call(graph, node, aten.div.Tensor, _call(graph, node, aten.mul.Tensor, node, 3.1), 3.1)


class WrongHead(Pass):
    """An error in the outer graph."""

    name = "wrong_head"
    changes_numerics = True

    def run(self, unit: Unit, context: PassContext) -> Report:
        report = Report()
        for node in unit.graph.find_nodes(op="call_function", target=aten.embedding.default):
            _put_behind(unit.graph, node, lambda graph, node: _call(graph, node, aten.mul.Tensor, node, 0.5))
            report.match(node, "embedding")
        return report


def _put_behind(graph: fx.Graph, node: fx.Node, make: Callable[[fx.Graph, fx.Node], fx.Node]) -> None:
    """Let every user of `node` use what `make` makes of it."""
    users = list(node.users)
    with graph.inserting_before(node.next):
        replacement = make(graph, node)
    for user in users:
        user.replace_input_with(node, replacement)


def _call(graph: fx.Graph, like: fx.Node, target: torch._ops.OpOverload, *args: object) -> fx.Node:
    """A call with the metadata of `like`."""
    node = graph.call_function(target, args)  # type: ignore[arg-type]
    node.meta = dict(like.meta)
    return node


class Checks(Protocol):
    def __call__(self, *passes: Pass) -> list[PassCheck]: ...


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Checks:
    def run(*passes: Pass) -> list[PassCheck]:
        monkeypatch.setattr(fused_stage, "SEMANTIC_PASSES", passes)
        torch.manual_seed(0)
        batch = next(random_batches(PLAN, VOCABULARY, seed=0))
        return check_passes(SmallModel(), PLAN, microbatches(batch, torch.float32)[0])

    return run


def _of(found: list[PassCheck], name: str, unit: str) -> PassCheck:
    return next(check for check in found if (check.name, check.unit) == (name, unit))


def test_right_passes_give_the_same_bits(checks: Checks) -> None:
    found = checks(Innocent())
    assert [check.unit for check in found if check.changed] == ["block"]
    assert all(check.equal and check.error == 0.0 for check in found)
    assert _of(found, "innocent", "model").changed is False


def test_a_wrong_value_is_traced_to_the_pass_and_the_node(checks: Checks) -> None:
    found = checks(Innocent(), Scaled(), Rounding())
    wrong = [check for check in found if not check.equal]
    assert [(check.name, check.unit) for check in wrong] == [("scaled", "block")]
    (check,) = wrong
    assert check.output_error == pytest.approx(1e-3, rel=1.0)
    assert "value of %linear_1 = aten.linear in down, computed from the new %mul" in check.where


def test_a_wrong_gradient_is_traced_to_the_node(checks: Checks) -> None:
    check = _of(checks(Detached()), "detached", "block")
    assert check.output_error == 0.0
    assert not check.equal
    assert "gradient of %silu = aten.silu, which goes through the new %detach" in check.where


def test_rounding_passes_but_is_pointed_out(checks: Checks) -> None:
    check = _of(checks(Rounding()), "rounding", "block")
    assert check.equal
    assert 0.0 < check.output_error < 1e-6
    assert check.exact


def test_the_outer_graph_is_checked_with_its_layers_executed(checks: Checks) -> None:
    found = checks(WrongHead())
    assert [check.unit for check in found if not check.equal] == ["model"]
    where = _of(found, "wrong_head", "model").where
    assert where.startswith("value of %region = moec.region in blocks.0, computed from the new %mul")


def test_verify_names_the_first_wrong_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_stage, "SEMANTIC_PASSES", (Innocent(), Scaled(), WrongHead()))
    report = verify(SmallModel(), PLAN, steps=1)
    assert not report.equal
    first = report.first_pass()
    assert first is not None
    assert (first.name, first.unit) == ("scaled", "block")
    text = str(report)
    assert "numbers move in pass scaled on block" in text
    assert "differs" in text
