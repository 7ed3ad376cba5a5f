"""What an attention mask says, read from the operators that build it.

The mask of a query q and a key k is evaluated symbolically. Numbers are `a * q + b * k + c` or an element of a table
[B, T]; truth values are conjunctions of facts:

    q - k >= c,  q - k <= c       from comparisons of positions, tril and triu
    ids[q] == ids[k]              from comparisons of table elements
    table[k] <= table[q]          position ids that are data

Everything is followed through broadcasts by the dimensions that q and k run along, counted from the right.
`understand` turns the facts into what `moec::attention` takes, or says why it cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from moec.compiler.graph import tensor_meta
from moec.compiler.pattern import CASTS, COPIES, Match, Targets, aten, bound_args, describe, dim, items, match, op, var


@dataclass(frozen=True)
class Mask:
    """causal: keys after the query are hidden. window: with w > 0, keys q - w and before are. documents: ids [B, T]."""

    causal: bool
    window: int = 0
    documents: fx.Node | None = None


@dataclass(frozen=True)
class Linear:
    """sum of slope * coordinate over `slopes` (dimension from the right -> slope), plus `constant`."""

    slopes: tuple[tuple[int, int], ...]
    constant: float


@dataclass(frozen=True)
class Lookup:
    """table[b, t], with b running along dimension `batch` and t along dimension `along`."""

    table: fx.Node
    batch: int
    along: int


@dataclass(frozen=True)
class Fact:
    """kind "at least" / "at most": coordinate(query) - coordinate(key) against `bound`; "same" / "ordered": of table.

    "same": table[query] == table[key]; "ordered": table[key] <= table[query].
    """

    kind: str
    query: int
    key: int
    bound: float = 0
    table: fx.Node | None = None
    batch: int = 0


@dataclass(frozen=True)
class Truth:
    """The conjunction of `facts`, or its negation."""

    facts: frozenset[Fact]
    negated: bool = False


@dataclass(frozen=True)
class Additive:
    """0 where `visible`, minus infinity (or the lowest number) elsewhere."""

    visible: Truth


Value = Linear | Lookup | Truth | Additive
Known = dict[fx.Node, "Value | NotUnderstood"]


Rule = Callable[[fx.Node, Known], Value | None]


class NotUnderstood(Exception):
    """The text says which part of a mask has an unknown meaning."""


def understand(node: fx.Node | None, *, hides: bool = False, batch: int = -4) -> Mask:
    """The meaning of a mask: truth values (True = visible, or hidden if `hides`), or numbers added to the scores.

    batch: the dimension that the batch runs along, counted from the right.
    Raises NotUnderstood unless it is provably a causal mask, with or without window and documents.
    """
    if node is None:
        return Mask(causal=False)
    value = evaluate(node, {})
    truth = value.visible if isinstance(value, Additive) else value
    if not isinstance(truth, Truth):
        raise NotUnderstood(f"{describe(node)} is not a mask")
    if hides and not isinstance(value, Additive):
        truth = _negation(truth)
    truth = _positive(truth)
    if truth.negated:
        raise NotUnderstood(f"{describe(node)} hides what it should show")
    return _mask(node, truth.facts, batch)


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


def _mask(node: fx.Node, facts: frozenset[Fact], batch: int) -> Mask:
    causal, window, documents, ordered = False, 0, None, None
    for fact in facts:
        if (fact.query, fact.key) != (-2, -1):
            raise NotUnderstood(f"{describe(node)} does not have queries and keys in its last two dimensions")
        if fact.kind == "at least" and fact.bound == 0:
            causal = True
        elif fact.kind == "at most" and fact.bound >= 0 and not window:
            window = int(fact.bound) + 1
        elif fact.kind == "same" and documents is None:
            documents = fact
        elif fact.kind == "ordered" and ordered is None:
            ordered = fact
        else:
            raise NotUnderstood(f"the mask {describe(node)} is not provably causal")
    if ordered is not None:
        # Position ids that rise by one within what `documents` calls one document order it as the index does.
        if documents is None or not _counts_restarts(documents.table, ordered.table):
            raise NotUnderstood("the mask compares position ids, which are data, so it is not provably causal")
        causal = True
    if not causal:
        raise NotUnderstood(f"the mask {describe(node)} is not provably causal")
    if documents is None or documents.table is None:
        return Mask(causal, window)
    tensor = tensor_meta(documents.table)
    if not _in_order(documents.table):
        raise NotUnderstood(f"the documents {describe(documents.table)} are not provably consecutive")
    if documents.batch != batch and (tensor is None or tensor.shape[0] != 1):
        raise NotUnderstood(f"{describe(node)} does not have the batch in its first dimension")
    return Mask(causal, window, documents.table)


def _in_order(table: fx.Node) -> bool:
    """Whether ids cannot fall along the row: inputs are document ids by contract, a running count of flags rises."""
    if table.op == "placeholder":
        return True
    found = match(op(aten("cumsum.default"), var("flags"), dim(-1)), table, exclusive=False)
    flags = tensor_meta(found["flags"]) if isinstance(found, Match) else None
    return flags is not None and flags.dtype == torch.bool


def _counts_restarts(ids: fx.Node | None, positions: fx.Node | None) -> bool:
    """Whether ids = cumsum(diff(positions) != 1): they stay the same exactly while positions rise by one."""
    if ids is None or positions is None:
        return False
    jump = op(aten("ne.Scalar"), op(aten("diff.default"), var("positions"), 1, -1, var("before")), 1)
    found = match(op(aten("cumsum.default"), jump, -1), ids, exclusive=False)
    return isinstance(found, Match) and found["positions"] is positions


# Values


def _leaf(node: fx.Node) -> Value:
    if not _is_table(node):
        raise NotUnderstood(f"{describe(node)} has an unknown meaning for the mask")
    return Lookup(node, -2, -1)


def _is_table(node: fx.Node) -> bool:
    tensor = tensor_meta(node)
    whole = tensor is not None and not tensor.is_floating_point() and tensor.dtype != torch.bool
    return whole and tensor is not None and tensor.dim() == 2


def _constant(number: float) -> Linear:
    return Linear((), number)


def _moved(value: Value, where: Callable[[int], int]) -> Value:
    """The value with every dimension d renamed to where(d)."""
    match value:
        case Linear():
            return Linear(tuple(sorted((where(d), slope) for d, slope in value.slopes)), value.constant)
        case Lookup():
            return Lookup(value.table, where(value.batch), where(value.along))
        case Truth():
            facts = (replace(f, query=where(f.query), key=where(f.key), batch=where(f.batch)) for f in value.facts)
            return Truth(frozenset(map(_ordered, facts)), value.negated)
        case Additive():
            visible = _moved(value.visible, where)
            assert isinstance(visible, Truth)
            return Additive(visible)


def _ordered(fact: Fact) -> Fact:
    """The same fact with the query in the left one of the two dimensions, where it can be said so."""
    if fact.query < fact.key or fact.kind == "ordered":
        return fact
    turned = replace(fact, query=fact.key, key=fact.query, bound=-fact.bound)
    return replace(turned, kind={"at least": "at most", "at most": "at least"}.get(fact.kind, fact.kind))


def _negation(truth: Truth) -> Truth:
    """not truth; a single comparison turns into its opposite."""
    if len(truth.facts) == 1 and not truth.negated:
        (fact,) = truth.facts
        if fact.kind == "at least":
            return Truth(frozenset({replace(fact, kind="at most", bound=fact.bound - 1)}))
        if fact.kind == "at most":
            return Truth(frozenset({replace(fact, kind="at least", bound=fact.bound + 1)}))
    return Truth(truth.facts, not truth.negated)


def _positive(truth: Truth) -> Truth:
    return _negation(Truth(truth.facts)) if truth.negated and len(truth.facts) == 1 else truth


def _both(first: Value, second: Value) -> Truth | None:
    if not isinstance(first, Truth) or not isinstance(second, Truth):
        return None
    first, second = _positive(first), _positive(second)
    return None if first.negated or second.negated else Truth(first.facts | second.facts)


def _difference(first: Value, second: Value, sign: int = -1) -> Linear | None:
    if not isinstance(first, Linear) or not isinstance(second, Linear):
        return None
    slopes = dict(first.slopes)
    for d, slope in second.slopes:
        slopes[d] = slopes.get(d, 0) + sign * slope
    kept = tuple(sorted((d, slope) for d, slope in slopes.items() if slope))
    return Linear(kept, first.constant + sign * second.constant)


def _at_least_zero(value: Linear) -> Truth | None:
    """value >= 0 as a fact about q - k, q in the dimension left of k."""
    if not value.constant.is_integer():
        return None
    if not value.slopes:
        return Truth(frozenset(), negated=value.constant < 0)
    dims = [d for d, _ in value.slopes]
    slopes = [slope for _, slope in value.slopes]
    if slopes == [1, -1]:  # q - k + c >= 0
        return Truth(frozenset({Fact("at least", dims[0], dims[1], -value.constant)}))
    if slopes == [-1, 1]:  # k - q + c >= 0
        return Truth(frozenset({Fact("at most", dims[0], dims[1], value.constant)}))
    return None


# One rule per op: the value of the node, or None when the op is used in an unknown way


def _through(node: fx.Node, known: Known) -> Value:
    return evaluate(node.args[0], known)


def _arange(node: fx.Node, known: Known) -> Value | None:
    names = {argument.name: value for argument, value in zip(node.target._schema.arguments, bound_args(node))}  # type: ignore[union-attr]  # noqa: B905
    if names.get("step", 1) != 1:
        return None
    return Linear(((-1, 1),), float(names.get("start", 0)))


def _filled(number: Callable[[fx.Node], Any]) -> Rule:
    def rule(node: fx.Node, known: Known) -> Value | None:
        value = number(node)
        tensor = tensor_meta(node)
        if tensor is not None and tensor.dtype == torch.bool:
            return Truth(frozenset(), negated=not value)
        return None if isinstance(value, fx.Node) else _constant(float(value))

    return rule


def _unsqueeze(node: fx.Node, known: Known) -> Value:
    rank = _rank(node)
    right = rank - 1 - (node.args[1] % rank)  # type: ignore[operator]  # dimensions to the right of the new one
    return _moved(evaluate(node.args[0], known), lambda d: d if -d <= right else d - 1)


def _squeeze(node: fx.Node, known: Known) -> Value | None:
    rank = _rank(node.args[0])
    if len(node.args) < 2 or not isinstance(node.args[1], int) or rank == _rank(node):
        return None
    right = rank - 1 - (node.args[1] % rank)
    return _moved(evaluate(node.args[0], known), lambda d: d if -d <= right else d + 1)


def _select(node: fx.Node, known: Known) -> Value | None:
    """Selection along a dimension that the value does not depend on."""
    rank = _rank(node.args[0])
    value, gone = evaluate(node.args[0], known), (node.args[1] % rank) - rank  # type: ignore[operator]
    return None if gone in _dims(value) else _moved(value, lambda d: d if d > gone else d + 1)


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
    return _moved(value, places.__getitem__) if _dims(value) <= set(places) else None


def _slice(node: fx.Node, known: Known) -> Value | None:
    _, _, start, _, step = bound_args(node)
    return evaluate(node.args[0], known) if start in (None, 0) and step == 1 else None


def _transpose(node: fx.Node, known: Known) -> Value:
    rank = _rank(node)
    first, second = (int(value) % rank - rank for value in node.args[1:3])  # type: ignore[arg-type]
    swapped = {first: second, second: first}
    return _moved(evaluate(node.args[0], known), lambda d: swapped.get(d, d))


def _arithmetic(sign: int) -> Rule:
    def rule(node: fx.Node, known: Known) -> Value | None:
        return _difference(evaluate(node.args[0], known), evaluate(node.args[1], known), sign)

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
        gap = _difference(high, low)
        return None if gap is None else _at_least_zero(Linear(gap.slopes, gap.constant - strict))

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
    return _negation(value) if isinstance(value, Truth) else None


def _and(node: fx.Node, known: Known) -> Value | None:
    return _both(evaluate(node.args[0], known), evaluate(node.args[1], known))


def _or(node: fx.Node, known: Known) -> Value | None:
    a, b = evaluate(node.args[0], known), evaluate(node.args[1], known)
    if not isinstance(a, Truth) or not isinstance(b, Truth):
        return None
    visible = _both(_negation(a), _negation(b))
    return None if visible is None else _negation(visible)


def _triangle(lower: bool) -> Rule:
    """tril and triu of a constant matrix."""

    def rule(node: fx.Node, known: Known) -> Value | None:
        filled, diagonal = evaluate(node.args[0], known), bound_args(node)[1]
        kept = Truth(frozenset({Fact("at least" if lower else "at most", -2, -1, -diagonal)}))
        if isinstance(filled, Truth) and filled == Truth(frozenset()):
            return kept
        if isinstance(filled, Linear) and not filled.slopes and _lowest(node, filled.constant):
            return Additive(_negation(kept))
        return kept if filled == _constant(1.0) else None

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
        return Additive(_negation(condition))
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
    return _moved(evaluate(found["table"], known), places.__getitem__)


def _dims(value: Value) -> set[int]:
    match value:
        case Linear():
            return {d for d, _ in value.slopes}
        case Lookup():
            return {value.batch, value.along}
        case Truth():
            return {d for f in value.facts for d in ((f.query, f.key, f.batch) if f.table else (f.query, f.key))}
        case Additive():
            return _dims(value.visible)


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
