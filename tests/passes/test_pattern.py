"""The matcher: argument binding, commutation, captures, casts, sharing, and what a failure says."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from moec.compiler.matching import Failure, Match, explain, match
from moec.compiler.nodes import aten
from moec.compiler.pattern import Pattern, anything, cast, dim, item, items, number, op, root_targets, value, var

from .support import Call, unit_of

MUL, ADD = aten("mul.Tensor"), aten("add.Tensor")


def _last(function: object, *args: torch.Tensor) -> fx.Node:
    """The node whose value `function` returns."""
    unit = unit_of(Call(function), *args)  # type: ignore[arg-type]
    for node in unit.graph.nodes:
        if "_assert_tensor_metadata" in str(node.target):
            unit.graph.erase_node(node)
    (results,) = unit.graph.output_node().args
    return results[0]  # type: ignore[index,return-value]


def _found(pattern: Pattern, function: object, *args: torch.Tensor) -> Match:
    found = match(pattern, _last(function, *args))
    assert isinstance(found, Match), found.reason
    return found


def _reason(pattern: Pattern, function: object, *args: torch.Tensor) -> str:
    found = match(pattern, _last(function, *args))
    assert isinstance(found, Failure)
    return found.reason


X, Y = torch.randn(2, 3), torch.randn(2, 3)


def test_positional_keyword_and_default_arguments_are_the_same() -> None:
    pattern = op(aten("mean.dim"), var("x"), dim(-1), True)
    for function in (lambda x: x.mean(-1, True), lambda x: x.mean(dim=[1], keepdim=True)):
        assert _found(pattern, function, X)["x"].op == "placeholder"


def test_an_argument_not_mentioned_has_its_default() -> None:
    pattern = op(ADD, var("x"), var("y"))
    _found(pattern, lambda x, y: x + y, X, Y)
    assert "has 2 instead of 1" in _reason(pattern, lambda x, y: torch.add(x, y, alpha=2), X, Y)


def test_commutes_only_where_it_says_so() -> None:
    relu = op(aten("relu.default"), anything())
    assert isinstance(match(op(MUL, relu, var("y"), commutes=True), _last(lambda x, y: y * x.relu(), X, Y)), Match)
    assert isinstance(match(op(MUL, relu, var("y")), _last(lambda x, y: y * x.relu(), X, Y)), Failure)


def test_a_name_stands_for_one_node() -> None:
    square = op(MUL, var("x"), var("x"))
    _found(square, lambda x, y: x * x, X, Y)
    assert "instead of" in _reason(square, lambda x, y: x * y, X, Y)


def test_a_name_stands_for_one_number() -> None:
    pattern = op(MUL, op(aten("div.Tensor"), var("x"), number("a")), number("a"))
    assert _found(pattern, lambda x: (x / 3.0) * 3.0, X)["a"] == 3.0
    assert "has 4.0 instead of a number" in _reason(pattern, lambda x: (x / 3.0) * 4.0, X)


def test_alternatives_in_order() -> None:
    pattern = op(MUL, op(aten("relu.default"), var("x"), name="relu") | var("x"), 2)
    assert "relu" in _found(pattern, lambda x: x.relu() * 2, X)
    assert "relu" not in _found(pattern, lambda x: x.sin() * 2, X)
    assert root_targets(op(ADD, 1, 2) | op(MUL, 1, 2)) == ADD | MUL


def test_lists_items_and_constants() -> None:
    pattern = op(aten("cat.default"), items(item(op(aten("chunk.default"), var("x"), 2, value("dim")), 0), var("y")))
    found = _found(pattern, lambda x, y: torch.cat([x.chunk(2, dim=-1)[0], y]), X[:, :2], X[:, :1])
    assert found["dim"] == -1
    assert "not 2 items" in _reason(pattern, lambda x, y: torch.cat([x, y, y]), X, Y)


def test_lossless_casts_are_looked_through() -> None:
    half = X.to(torch.bfloat16)
    found = _found(op(MUL, var("x"), 2), lambda x: x.float().contiguous() * 2, half)
    assert found["x"].op == "placeholder"
    raw = _found(op(MUL, var("x", strip=False), 2), lambda x: x.float() * 2, half)
    assert raw["x"].op == "call_function"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_casts_are_not(dtype: torch.dtype) -> None:
    relu = op(MUL, op(aten("relu.default"), var("x")), 2)
    assert "expected aten.relu.default, found to" in _reason(relu, lambda x: x.relu().to(dtype) * 2, X)
    rounded = op(MUL, cast(op(aten("relu.default"), var("x")), "rounded"), 2)
    assert _found(rounded, lambda x: x.relu().to(dtype) * 2, X)["rounded"].args[1] == dtype
    assert "rounded" not in _found(rounded, lambda x: x.relu() * 2, X)


def test_inner_values_must_not_be_used_elsewhere() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.relu()
        return y * 2, y + 1

    relu = op(aten("relu.default"), var("x"), name="relu")
    root = _last(function, X)
    assert "relu (aten.relu.default" in (reason := match(op(MUL, relu, 2), root).reason)  # type: ignore[union-attr]
    assert reason.endswith("is used outside the pattern too")
    assert isinstance(match(op(MUL, relu, 2), root, outputs=("relu",)), Match)
    assert isinstance(match(op(MUL, relu, 2), root, exclusive=False), Match)
    shared = op(aten("relu.default"), var("x"), shared=True)
    assert isinstance(match(op(MUL, shared, 2), root), Match)


def test_conditions_give_the_reason() -> None:
    pattern = op(MUL, op(aten("relu.default"), var("x"), where=lambda node: "too hot"), 2)
    assert _reason(pattern, lambda x: x.relu() * 2, X) == "too hot"
    assert _reason(op(MUL, var("x", where=lambda node: "too cold"), 2), lambda x: x * 2, X) == "too cold"


def test_explain_names_the_furthest_point() -> None:
    root = _last(lambda x: x.sin().relu() * 2, X)
    text = explain(op(MUL, op(aten("relu.default"), op(aten("cos.default"), var("x"))), 2), root)
    assert "expected aten.cos.default, found sin (aten.sin.default" in text
    assert "matched so far: mul, relu" in text
    assert "matches, with" in explain(op(MUL, var("x"), 2), root)


def test_every_name_must_exist() -> None:
    with pytest.raises(AttributeError):
        aten("mul.Tenser")
