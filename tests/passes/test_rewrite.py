"""The edit of one match: metadata, where it goes, dtypes, and writes in between."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import nn

from moec.compiler.graph import module_path
from moec.compiler.matching import Failure, Match
from moec.compiler.nodes import aten
from moec.compiler.pass_manager import Report
from moec.compiler.pattern import anything, item, op, var
from moec.passes.normalize import Normalize
from moec.passes.rewrite import Finder, Refused, Rewriter, Rule, Sign, apply_rules

from .support import Call, apply, graph_text, reasons, unit_of

MUL = aten("mul.Tensor")


def _square(found: Match, rewriter: Rewriter) -> str:
    rewriter.replace(found.root, rewriter.call(torch.ops.aten.square.default, found["x"]))
    return "square"


SQUARE = Rule("square", op(MUL, var("x"), var("x")), _square)


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x + 1) * 2


def test_replacement_has_value_name_and_module() -> None:
    unit, report = unit_of(Outer(), torch.randn(2, 3)), Report()
    apply_rules(unit, [SQUARE], report)
    (node,) = unit.graph.find_nodes(op="call_function", target=torch.ops.aten.square.default)
    assert node.name == "square"
    assert node.meta["val"].shape == (2, 3)
    assert module_path(node) == "inner"
    assert [(m.path, m.what) for m in report.matches] == [("inner", "square")]


def test_a_match_over_several_modules_belongs_to_the_one_that_holds_them() -> None:
    def double(found: Match, rewriter: Rewriter) -> str:
        rewriter.replace(found.root, rewriter.call(torch.ops.aten.relu.default, found["x"]))
        return "double"

    unit, report = unit_of(Outer(), torch.randn(2, 3)), Report()
    apply_rules(unit, [Rule("double", op(MUL, op(MUL, var("x"), anything()), 2), double)], report)
    assert report.matches[0].path == ""


def test_matches_are_reported_in_graph_order_and_dead_code_is_gone() -> None:
    unit, report = unit_of(Call(lambda x: (x * x).sin() * (x * x).sin()), torch.randn(3)), Report()
    apply_rules(unit, [SQUARE], report)
    assert [str(node.target) for node in unit.graph.nodes if node.op == "call_function"].count("aten.mul.Tensor") == 1
    assert len(report.matches) == 2


def test_refused_rewrites_leave_no_trace() -> None:
    def refuse(found: Match, rewriter: Rewriter) -> str:
        rewriter.call(torch.ops.aten.square.default, found["x"])
        raise Refused("not today")

    unit, report = unit_of(Call(lambda x: x * x), torch.randn(3)), Report()
    before = str(unit.graph)
    sign = Sign("square", op(MUL, anything(), anything()), "never seen")
    apply_rules(unit, [Rule("square", SQUARE.pattern, refuse)], report, [sign])
    assert str(unit.graph) == before
    assert reasons(report) == ["square: not today"]


def test_a_sign_without_any_attempt_gives_its_own_reason() -> None:
    unit, report = unit_of(Call(lambda x: x * 2), torch.randn(3)), Report()
    apply_rules(unit, [], report, [Sign("square", op(MUL, anything(), anything()), "the factors differ")])
    assert reasons(report) == ["square: the factors differ"]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (torch.ops.aten.abs.default, ""),
        (torch.ops.aten.argmax.default, "the result is float32, the op would give int64"),
        (torch.ops.aten.sum.default, "the result has shape [3], the op would give []"),
    ],
)
def test_shape_and_dtype_must_fit(given: object, reason: str) -> None:
    def rewrite(found: Match, rewriter: Rewriter) -> str:
        rewriter.replace(found.root, rewriter.call(given, found["x"]))
        return "replaced"

    unit, report = unit_of(Call(lambda x: x * 2), torch.randn(3)), Report()
    apply_rules(unit, [Rule("r", op(MUL, var("x"), 2), rewrite)], report, [Sign("r", op(MUL, var("x"), 2), "")])
    assert reasons(report) == ([f"r: {reason}"] if reason else [])


def test_a_wider_result_is_rounded_once() -> None:
    def rewrite(found: Match, rewriter: Rewriter) -> str:
        wide = rewriter.call(torch.ops.aten.to.dtype, found["x"], torch.float32)
        rewriter.replace(found.root, wide)
        return "widened"

    unit, report = unit_of(Call(lambda x: x * 2), torch.randn(3, dtype=torch.bfloat16)), Report()
    apply_rules(unit, [Rule("r", op(MUL, var("x"), 2), rewrite)], report)
    casts = [node.args[1] for node in unit.graph.nodes if str(node.target) == "aten.to.dtype"]
    assert casts == [torch.float32, torch.bfloat16]


def _two_results(found: Match, rewriter: Rewriter) -> str:
    others = [user for user in found["pair"].users if user.args[1] == 1]
    rewriter.after_inputs([found["x"], found["y"]], [found.root, *others])
    values, indices = rewriter.results(torch.ops.aten.sort.default, found["x"], count=2)
    rewriter.replace(found.root, values)
    for other in others:
        rewriter.replace(other, indices)
    return "sorted"


def _sorted_downwards(found: Match, rewriter: Rewriter) -> str:
    others = [user for user in found["pair"].users if user.args[1] == 1]
    rewriter.after_inputs([found["x"], found["y"]], [found.root, *others])
    values, indices = rewriter.results(torch.ops.aten.sort.default, found["x"], -1, True, count=2)
    rewriter.replace(found.root, rewriter.call(torch.ops.aten.mul.Tensor, values, found["y"]))
    for other in others:
        rewriter.replace(other, indices)
    return "sorted"


_PAIR = op(aten("topk.default"), var("x"), 3, anything(), anything(), anything(), name="pair", shared=True)
SORTED = Rule("sorted", op(MUL, item(_PAIR, 0), var("y")), _sorted_downwards)
TWO = Rule("two", op(MUL, item(_PAIR, 0), var("y")), _two_results)


def test_several_results_go_in_front_of_their_first_use() -> None:
    def early(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        values, indices = x.topk(3)
        used = indices + 1
        return values * y + used

    unit, report = unit_of(Call(early), torch.randn(3), torch.randn(3)), Report()
    apply_rules(unit, [TWO], report)
    unit.graph.lint()
    order = [str(node.target) for node in unit.graph.nodes if node.op == "call_function"]
    assert order.index("aten.sort.default") < order.index("aten.add.Tensor")


def test_several_results_are_refused_when_an_input_comes_later() -> None:
    def late(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        values, indices = x.topk(3)
        return values * (indices + 1).sin().mul(y)

    unit, report = unit_of(Call(late), torch.randn(3), torch.randn(3)), Report()
    apply_rules(unit, [TWO], report, [Sign("two", op(aten("topk.default"), *[anything()] * 5), "")])
    assert "is used before" in reasons(report)[0]


def test_several_results_do_not_move_before_a_write() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x.sin()
        z[0].mul_(-5)
        values, indices = z.topk(3)
        return values * y + indices

    x, y = torch.tensor([0.5, 0.2, 0.1]), torch.ones(3)
    unit, report = unit_of(Call(function), x, y), Report()
    apply([Normalize()], unit)
    apply_rules(unit, [SORTED], report)
    unit.module.recompile()
    assert report.matches
    assert torch.equal(unit.module(x, y)[0].sort().values, function(x, y).sort().values)


def _written_between(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    wide = y * 3
    y[0].mul_(2)
    return wide * y


def _written_before(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    y[0].mul_(2)
    return y * 3 * y


@pytest.mark.parametrize(("function", "rewritten"), [(_written_between, False), (_written_before, True)])
def test_no_rewrite_across_a_write(function: Callable[[torch.Tensor], torch.Tensor], rewritten: bool) -> None:
    def triple_square(found: Match, rewriter: Rewriter) -> str:
        square = rewriter.call(torch.ops.aten.square.default, found["x"])
        rewriter.replace(found.root, rewriter.call(torch.ops.aten.mul.Tensor, square, 3))
        return "triple square"

    x = torch.randn(3, 3)
    unit, report = unit_of(Call(function), x), Report()
    apply([Normalize()], unit)
    pattern = op(MUL, op(MUL, var("x"), 3), var("x"))
    apply_rules(unit, [Rule("r", pattern, triple_square)], report, [Sign("r", pattern, "")])
    unit.module.recompile()
    torch.testing.assert_close(unit.module(x)[0], function(x))
    assert bool(report.matches) == rewritten
    assert rewritten or "is written in place later" in reasons(report)[0]


def test_unknown_values_stay_unknown() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    root = graph.call_function(operator.mul, (x, x))
    graph.output((root,))
    node = Rewriter(graph, [root], root).call(torch.ops.aten.square.default, x)
    assert node.meta["val"] is None


def _two_results(good: bool) -> Finder:
    """topk becomes sort, whose second result is then refused: for another shape, or a dtype that cannot be rounded."""

    def find(root: torch.fx.Node) -> Match | Failure:
        return Match(root, {}, (root,))

    def rewrite(found: Match, rewriter: Rewriter) -> str:
        values, indices = sorted(found.root.users)
        new = rewriter.call(torch.ops.aten.sort.default, found.root.args[0])
        rewriter.replace(values, rewriter.call(operator.getitem, new, 0))
        second = rewriter.call(operator.getitem, new, 1)
        rewriter.replace(indices, second if good else rewriter.call(torch.ops.aten.to.dtype, second, torch.int32))
        return "sorted"

    return Finder("two", aten("topk.default"), find, rewrite)


@pytest.mark.parametrize("good", [True, False])
def test_a_rewrite_is_made_whole_or_not_at_all(good: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        values, indices = x.topk(3)
        return values * 2 + indices

    unit, report = unit_of(Call(function), torch.randn(3)), Report()
    before = graph_text(unit)
    apply_rules(unit, [_two_results(good)], report, [Sign("two", op(aten("topk.default"), *[anything()] * 5), "")])
    unit.graph.lint()
    assert (graph_text(unit) == before) == (not good)
    assert [match.what for match in report.matches] == (["sorted"] if good else [])
    if not good:
        assert reasons(report) == ["two: the result is int64, the op would give int32"]


def test_what_follows_a_rewrite_waits_for_it() -> None:
    seen: list[bool] = []

    def rewrite(found: Match, rewriter: Rewriter) -> str:
        new = rewriter.call(torch.ops.aten.exp.default, found["x"])
        rewriter.then(lambda: seen.append(bool(new.users)))
        rewriter.replace(found.root, new)
        return "exp"

    unit, report = unit_of(Call(lambda x: x.sin()), torch.randn(3)), Report()
    apply_rules(unit, [Rule("exp", op(aten("sin.default"), var("x")), rewrite)], report)
    assert seen == [True]
