"""The symbolic value of every operator that masks are built of: one rule per op, in the table at the end."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from moec.compiler._torch_compat import OpOverload
from moec.compiler.graph import tensor_meta
from moec.compiler.matching import Match, match
from moec.compiler.nodes import CASTS, COPIES, Targets, aten, bound_args, describe
from moec.compiler.pattern import items, op, var
from moec.passes.mask_values import (
    Additive,
    Fact,
    Linear,
    Lookup,
    Truth,
    Value,
    at_least_zero,
    both,
    constant,
    difference,
    dims_of,
    moved,
    negation,
)


class NotUnderstood(Exception):
    """The text says which part of a mask has an unknown meaning."""


Known = dict[fx.Node, "Value | NotUnderstood"]
Rule = Callable[[fx.Node, Known], Value | None]


def evaluate(node: Any, known: Known) -> Value:
    """The symbolic value of a node or constant; raises NotUnderstood."""
    if not isinstance(node, fx.Node):
        return Linear((), float(node))
    if node not in known:
        try:
            rule = _RULES.get(node.target) if node.op == "call_function" else None
            found = rule(node, known) if rule is not None else None
            known[node] = found if found is not None else _leaf(node)
        except NotUnderstood as reason:
            known[node] = _leaf(node) if _is_table(node) else reason
    value = known[node]
    if isinstance(value, NotUnderstood):
        raise value
    return value


def _leaf(node: fx.Node) -> Value:
    if not _is_table(node):
        raise NotUnderstood(f"{describe(node)} has an unknown meaning for the mask")
    return Lookup(node, -2, -1)


def _is_table(node: fx.Node) -> bool:
    tensor = tensor_meta(node)
    whole = tensor is not None and not tensor.is_floating_point() and tensor.dtype != torch.bool
    return whole and tensor is not None and tensor.dim() == 2


# One rule per op: the value of the node, or None when the op is used in an unknown way


def _through(node: fx.Node, known: Known) -> Value:
    return evaluate(node.args[0], known)


def _arange(node: fx.Node, known: Known) -> Value | None:
    assert isinstance(node.target, OpOverload)
    names = dict(zip((argument.name for argument in node.target._schema.arguments), bound_args(node), strict=True))
    if names.get("step", 1) != 1:
        return None
    return Linear(((-1, 1),), float(names.get("start", 0)))


def _filled(number: Callable[[fx.Node], Any]) -> Rule:
    def rule(node: fx.Node, known: Known) -> Value | None:
        value = number(node)
        tensor = tensor_meta(node)
        if tensor is not None and tensor.dtype == torch.bool:
            return Truth(frozenset(), negated=not value)
        return None if isinstance(value, fx.Node) else constant(float(value))

    return rule


def _unsqueeze(node: fx.Node, known: Known) -> Value:
    rank = _rank(node)
    right = rank - 1 - (node.args[1] % rank)  # type: ignore[operator]  # dimensions to the right of the new one
    return moved(evaluate(node.args[0], known), lambda d: d if -d <= right else d - 1)


def _squeeze(node: fx.Node, known: Known) -> Value | None:
    rank = _rank(node.args[0])
    if len(node.args) < 2 or not isinstance(node.args[1], int) or rank == _rank(node):
        return None
    right = rank - 1 - (node.args[1] % rank)
    return moved(evaluate(node.args[0], known), lambda d: d if -d <= right else d + 1)


def _select(node: fx.Node, known: Known) -> Value | None:
    """Selection along a dimension that the value does not depend on."""
    rank = _rank(node.args[0])
    value, gone = evaluate(node.args[0], known), (node.args[1] % rank) - rank  # type: ignore[operator]
    return None if gone in dims_of(value) else moved(value, lambda d: d if d > gone else d + 1)


def _reshape(node: fx.Node, known: Known) -> Value | None:
    """Reshapes that only add or remove dimensions of size one."""
    before, after = tensor_meta(node.args[0]), tensor_meta(node)  # type: ignore[arg-type]
    if before is None or after is None:
        return None
    old = [d for d in range(-before.dim(), 0) if before.shape[d] != 1]
    new = [d for d in range(-after.dim(), 0) if after.shape[d] != 1]
    if [before.shape[d] for d in old] != [after.shape[d] for d in new]:
        return None
    places = dict(zip(old, new, strict=True))
    value = evaluate(node.args[0], known)
    return moved(value, places.__getitem__) if dims_of(value) <= set(places) else None


def _slice(node: fx.Node, known: Known) -> Value | None:
    _, _, start, _, step = bound_args(node)
    return evaluate(node.args[0], known) if start in (None, 0) and step == 1 else None


def _transpose(node: fx.Node, known: Known) -> Value:
    rank = _rank(node)
    first, second = (int(value) % rank - rank for value in node.args[1:3])  # type: ignore[arg-type]
    swapped = {first: second, second: first}
    return moved(evaluate(node.args[0], known), lambda d: swapped.get(d, d))


def _arithmetic(sign: int) -> Rule:
    def rule(node: fx.Node, known: Known) -> Value | None:
        return difference(evaluate(node.args[0], known), evaluate(node.args[1], known), sign)

    return rule


def _compare(greater: bool, strict: bool) -> Rule:
    """first >= second, or the mirrored and strict forms; all values are whole numbers."""

    def rule(node: fx.Node, known: Known) -> Value | None:
        low, high = evaluate(node.args[1], known), evaluate(node.args[0], known)
        if not greater:
            low, high = high, low
        if isinstance(low, Lookup) and isinstance(high, Lookup):
            if strict or low.table is not high.table or low.batch != high.batch:
                return None
            return Truth(frozenset({Fact("ordered", high.along, low.along, table=low.table, batch=low.batch)}))
        gap = difference(high, low)
        return None if gap is None else at_least_zero(Linear(gap.slopes, gap.constant - strict))

    return rule


def _equal(negated: bool) -> Rule:
    def rule(node: fx.Node, known: Known) -> Value | None:
        a, b = evaluate(node.args[0], known), evaluate(node.args[1], known)
        if not isinstance(a, Lookup) or not isinstance(b, Lookup) or a.table is not b.table or a.batch != b.batch:
            return None
        query, key = sorted((a.along, b.along))
        return Truth(frozenset({Fact("same", query, key, table=a.table, batch=a.batch)}), negated)

    return rule


def _not(node: fx.Node, known: Known) -> Value | None:
    value = evaluate(node.args[0], known)
    return negation(value) if isinstance(value, Truth) else None


def _and(node: fx.Node, known: Known) -> Value | None:
    return both(evaluate(node.args[0], known), evaluate(node.args[1], known))


def _or(node: fx.Node, known: Known) -> Value | None:
    a, b = evaluate(node.args[0], known), evaluate(node.args[1], known)
    if not isinstance(a, Truth) or not isinstance(b, Truth):
        return None
    visible = both(negation(a), negation(b))
    return None if visible is None else negation(visible)


def _triangle(lower: bool) -> Rule:
    """tril and triu of a constant matrix."""

    def rule(node: fx.Node, known: Known) -> Value | None:
        filled, diagonal = evaluate(node.args[0], known), bound_args(node)[1]
        kept = Truth(frozenset({Fact("at least" if lower else "at most", -2, -1, -diagonal)}))
        if isinstance(filled, Truth) and filled == Truth(frozenset()):
            return kept
        if isinstance(filled, Linear) and not filled.slopes and _lowest(node, filled.constant):
            return Additive(negation(kept))
        return kept if filled == constant(1.0) else None

    return rule


def _where(node: fx.Node, known: Known) -> Value | None:
    condition = evaluate(node.args[0], known)
    values = [evaluate(argument, known) for argument in node.args[1:3]]
    return _choice(node, condition, values[0], values[1])


def _masked_fill(node: fx.Node, known: Known) -> Value | None:
    return _choice(node, evaluate(node.args[1], known), evaluate(node.args[2], known), evaluate(node.args[0], known))


def _choice(node: fx.Node, condition: Value, chosen: Value, other: Value) -> Value | None:
    """`chosen` where the condition holds, `other` elsewhere: an additive mask when one is 0 and one the lowest."""
    if not isinstance(condition, Truth) or not isinstance(chosen, Linear) or not isinstance(other, Linear):
        return None
    if chosen.slopes or other.slopes:
        return None
    if chosen.constant == 0 and _lowest(node, other.constant):
        return Additive(condition)
    if other.constant == 0 and _lowest(node, chosen.constant):
        return Additive(negation(condition))
    return None


def _index(node: fx.Node, known: Known) -> Value | None:
    """table[b, t] with b and t broadcast indices."""
    found = match(op(aten("index.Tensor"), var("table", strip=False), items(var("b"), var("t"))), node, exclusive=False)
    if not isinstance(found, Match):
        return None
    places: dict[int, int] = {}
    for place, name in ((-2, "b"), (-1, "t")):
        index = evaluate(found[name], known)
        if not isinstance(index, Linear) or index.constant or [slope for _, slope in index.slopes] != [1]:
            return None
        places[place] = index.slopes[0][0]
    return moved(evaluate(found["table"], known), places.__getitem__)


def _lowest(node: fx.Node, number: float) -> bool:
    """Whether adding the number to any score hides it: minus infinity or the lowest of the dtype."""
    tensor = tensor_meta(node)
    lowest = torch.finfo(tensor.dtype).min if tensor is not None and tensor.is_floating_point() else -math.inf
    return number <= lowest


def _rank(node: object) -> int:
    tensor = tensor_meta(node) if isinstance(node, fx.Node) else None
    if tensor is None:
        raise NotUnderstood(f"the rank of {node} is not known")
    return tensor.dim()


def _table(*rows: tuple[Targets, Rule]) -> dict[Any, Rule]:
    return {target: rule for targets, rule in rows for target in targets}


_RULES: dict[Any, Rule] = _table(
    (CASTS | COPIES | aten("expand.default", "expand_as.default", "detach.default"), _through),
    (aten("arange.default", "arange.start", "arange.start_step"), _arange),
    (aten("ones.default", "new_ones.default", "ones_like.default"), _filled(lambda node: 1)),
    (aten("zeros.default", "new_zeros.default", "zeros_like.default"), _filled(lambda node: 0)),
    (aten("full.default", "full_like.default"), _filled(lambda node: node.args[1])),
    (aten("new_full.default"), _filled(lambda node: node.args[2])),
    (aten("scalar_tensor.default"), _filled(lambda node: node.args[0])),
    (aten("unsqueeze.default"), _unsqueeze),
    (aten("squeeze.dim"), _squeeze),
    (aten("select.int"), _select),
    (aten("reshape.default", "view.default"), _reshape),
    (aten("slice.Tensor"), _slice),
    (aten("transpose.int"), _transpose),
    (aten("add.Tensor"), _arithmetic(1)),
    (aten("sub.Tensor"), _arithmetic(-1)),
    (aten("ge.Tensor", "ge.Scalar"), _compare(greater=True, strict=False)),
    (aten("gt.Tensor", "gt.Scalar"), _compare(greater=True, strict=True)),
    (aten("le.Tensor", "le.Scalar"), _compare(greater=False, strict=False)),
    (aten("lt.Tensor", "lt.Scalar"), _compare(greater=False, strict=True)),
    (aten("eq.Tensor"), _equal(negated=False)),
    (aten("ne.Tensor"), _equal(negated=True)),
    (aten("bitwise_not.default", "logical_not.default"), _not),
    (aten("__and__.Tensor", "bitwise_and.Tensor", "logical_and.default"), _and),
    (aten("__or__.Tensor", "bitwise_or.Tensor", "logical_or.default"), _or),
    (aten("tril.default"), _triangle(lower=True)),
    (aten("triu.default"), _triangle(lower=False)),
    (aten("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar"), _where),
    (aten("masked_fill.Scalar"), _masked_fill),
    (aten("index.Tensor"), _index),
)
