"""Losses per row that are only summed become linear_cross_entropy_sum, which makes their gradient in the forward.

    sum(losses * w),  mean(losses * w)                                    tokens = w, with factors of the sum inside
    the same, times or divided by numbers, + sum(lse^2 * u) likewise      z_weights = u: a z-loss

w and u may be anything that does not depend on the losses, and may be missing; u takes no gradient. Losses that are
used in another way as well stay losses per row: their gradient is not one number.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from moec.compiler.graph import Unit, tensor_meta
from moec.compiler.matching import Failure, Match
from moec.compiler.nodes import aten, bound_args, describe, looked_through, used_outside
from moec.compiler.pass_manager import Report
from moec.passes.parts import RESHAPES
from moec.passes.recognize_norm import DIV, MUL
from moec.passes.rewrite import Finder, Refused, Rewriter, apply_rules

_ADD = aten("add.Tensor")
_SUMS, _MEANS = aten("sum.default", "sum.dim_IntList"), aten("mean.default", "mean.dim")
_POW, _SQUARE = aten("pow.Tensor_Scalar"), aten("square.default")
_PER_ROW = torch.ops.moec.linear_cross_entropy.default
_LOSSES, _LSE = 0, 1


@dataclass(frozen=True)
class _Term:
    """A sum over rows of losses (or of lse^2) times `weights` of rows, times `factors`, over `divisors`."""

    op: fx.Node
    result: int
    nodes: tuple[fx.Node, ...]
    weights: tuple[fx.Node, ...] = ()
    factors: tuple[Any, ...] = ()
    divisors: tuple[Any, ...] = ()


def fold_sums(unit: Unit, trainable: set[fx.Node], report: Report) -> None:
    """Rewrite the graph; matches go to the report."""

    def rewrite(found: Match, rewriter: Rewriter) -> str:
        return _rewrite(found, rewriter, trainable)

    apply_rules(unit, [Finder("linear_cross_entropy_sum", _ADD | _SUMS | _MEANS, _find, rewrite)], report)


def _find(root: fx.Node) -> Match | Failure:
    terms = _terms(root)
    if terms is None:
        return Failure()
    nodes = dict.fromkeys((root, *(node for term in terms for node in term.nodes), terms[0].op))
    results = [node for node in terms[0].op.users if node.target is operator.getitem]
    outside = used_outside((node for node in (*nodes, *results) if node is not root), {*nodes})
    if outside is not None:
        return Failure(tuple(nodes), lambda: f"{describe(outside)} is used in another way too")
    return Match(root, {"terms": terms}, tuple(nodes))


def _terms(root: fx.Node) -> list[_Term] | None:
    """The losses' term, and that of lse^2 if there is one."""
    if root.target not in _ADD:
        term = _summed(root)
        return [term] if term is not None and term.result == _LOSSES else None
    left, right, alpha = bound_args(root)
    found = [_scaled(value) if isinstance(value, fx.Node) else None for value in (left, right)]
    if alpha != 1 or found[0] is None or found[1] is None or found[0].op is not found[1].op:
        return None
    first, second = sorted((term for term in found if term is not None), key=lambda term: term.result)
    return [first, second] if (first.result, second.result) == (_LOSSES, _LSE) else None


def _scaled(node: fx.Node) -> _Term | None:
    """A sum, times and over numbers and scalars."""
    if not _is_scalar(node):
        return None
    below = looked_through(node)
    if below is not None:
        return _with(_scaled(below), node)
    if node.target in MUL:
        for one, other in _both_ways(node):
            term = _scaled(one) if isinstance(one, fx.Node) and _is_scalar(other) else None
            if term is not None:
                return _with(term, node, factors=(*term.factors, other))
    elif node.target in DIV:
        one, other = node.args[:2]
        term = _scaled(one) if isinstance(one, fx.Node) and _is_scalar(other) else None
        if term is not None:
            return _with(term, node, divisors=(*term.divisors, other))
    return _summed(node)


def _summed(node: fx.Node) -> _Term | None:
    if node.target not in _SUMS | _MEANS or not _is_scalar(node) or not isinstance(node.args[0], fx.Node):
        return None
    term = _weighted(node.args[0])
    if term is None or node.target in _SUMS:
        return _with(term, node)
    tensor = tensor_meta(node.args[0])
    if tensor is None or not isinstance(tensor.numel(), int):
        return None
    return _with(term, node, divisors=(tensor.numel(),))


def _weighted(node: fx.Node) -> _Term | None:
    """Losses or squares of lse, reshaped, times weights of the same shape."""
    term = _base(node)
    if term is not None:
        return term
    below = looked_through(node) or (node.args[0] if node.target in RESHAPES else None)
    if isinstance(below, fx.Node):
        return _with(_weighted(below), node)
    if node.target in MUL:
        for one, other in _both_ways(node):
            term = _weighted(one) if isinstance(one, fx.Node) else None
            if term is None:
                continue
            if not isinstance(other, fx.Node):
                return _with(term, node, factors=(*term.factors, other))
            if _shape(other) == _shape(one):
                return _with(term, node, weights=(*term.weights, other))
    return None


def _base(node: fx.Node) -> _Term | None:
    squared = _squared(node)
    source = node if squared is None else squared
    nodes = [node] if squared is None else [node, source]
    while source.target in RESHAPES or looked_through(source) is not None:
        source = source.args[0]  # type: ignore[assignment]
        nodes.append(source)
    if source.target is not operator.getitem or source.args[0].target is not _PER_ROW:  # type: ignore[union-attr]
        return None
    result = source.args[1]
    if result != (_LOSSES if squared is None else _LSE):
        return None
    return _Term(source.args[0], int(result), tuple(nodes))  # type: ignore[arg-type]


def _squared(node: fx.Node) -> fx.Node | None:
    if node.target in _SQUARE or (node.target in _POW and node.args[1] == 2):
        return node.args[0]  # type: ignore[return-value]
    return node.args[0] if node.target in MUL and node.args[0] is node.args[1] else None  # type: ignore[return-value]


def _with(term: _Term | None, node: fx.Node, **changes: Any) -> _Term | None:
    return None if term is None else replace(term, nodes=(*term.nodes, node), **changes)


def _both_ways(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    yield node.args[0], node.args[1]
    yield node.args[1], node.args[0]


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, fx.Node) or _shape(value) == ()


def _shape(node: fx.Node) -> tuple[Any, ...] | None:
    tensor = tensor_meta(node)
    return None if tensor is None else tuple(tensor.shape)


def _rewrite(found: Match, rewriter: Rewriter, trainable: set[fx.Node]) -> str:
    terms: list[_Term] = found["terms"]
    hidden, weight, labels, bias, *options = bound_args(terms[0].op)
    tensor = tensor_meta(hidden)
    assert tensor is not None
    if any(value in trainable for term in terms[1:] for value in (*term.weights, *term.factors, *term.divisors)):
        raise Refused("the weights of its z-loss want a gradient")
    ignored = options[1]
    valid = rewriter.call(torch.ops.aten.ne.Scalar, labels, ignored)
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    tokens = _row_weights(terms[0], rewriter, rewriter.call(torch.ops.aten.to.dtype, valid, dtype))
    ones = None
    if len(terms) > 1:
        ones = rewriter.call(torch.ops.aten.ones_like.default, tokens)
        ones = _row_weights(terms[1], rewriter, ones)
    wanted = (hidden in trainable, weight in trainable or bias in trainable)
    (total,) = rewriter.results(
        torch.ops.moec.linear_cross_entropy_sum.default,
        *(hidden, weight, labels, tokens, ones, bias, *options, *wanted, tensor.dtype),
        count=1,
    )
    rewriter.replace(found.root, total)
    return f"losses per row, summed{', with a z-loss' if ones is not None else ''}: gradients in the forward"


def _row_weights(term: _Term, rewriter: Rewriter, start: fx.Node) -> fx.Node:
    """[N]: `start` times everything that the term multiplies its rows with."""
    value = start
    for weight in term.weights:
        flat = weight if len(_shape(weight) or ()) == 1 else rewriter.call(torch.ops.aten.reshape.default, weight, [-1])
        value = rewriter.call(torch.ops.aten.mul.Tensor, value, flat)
    for factor in term.factors:
        value = rewriter.call(torch.ops.aten.mul.Tensor, value, factor)
    for divisor in term.divisors:
        value = rewriter.call(torch.ops.aten.div.Tensor, value, divisor)
    return value
