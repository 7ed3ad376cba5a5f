"""Symbolic values of mask expressions, and what can be done with them.

Numbers are `a * q + b * k + c` (`Linear`) or an element of a table [B, T] (`Lookup`); truth values are conjunctions of
facts, or the negation of one (`Truth`); a mask that is added to scores is `Additive`. Dimensions are counted from the
right, so that leading broadcasts change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import fx


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


def constant(number: float) -> Linear:
    """The same number everywhere."""
    return Linear((), number)


def moved(value: Value, where: Callable[[int], int]) -> Value:
    """The value with every dimension d renamed to where(d)."""
    match value:
        case Linear():
            return Linear(tuple(sorted((where(d), slope) for d, slope in value.slopes)), value.constant)
        case Lookup():
            return Lookup(value.table, where(value.batch), where(value.along))
        case Truth():
            return Truth(frozenset(_ordered(_moved_fact(fact, where)) for fact in value.facts), value.negated)
        case Additive():
            visible = moved(value.visible, where)
            assert isinstance(visible, Truth)
            return Additive(visible)


def _moved_fact(fact: Fact, where: Callable[[int], int]) -> Fact:
    batch = fact.batch if fact.table is None else where(fact.batch)
    return replace(fact, query=where(fact.query), key=where(fact.key), batch=batch)


def _ordered(fact: Fact) -> Fact:
    """The same fact with the query in the left one of the two dimensions, where it can be said so."""
    if fact.query < fact.key or fact.kind == "ordered":
        return fact
    turned = replace(fact, query=fact.key, key=fact.query, bound=-fact.bound)
    return replace(turned, kind={"at least": "at most", "at most": "at least"}.get(fact.kind, fact.kind))


def negation(truth: Truth) -> Truth:
    """not truth; a single comparison turns into its opposite."""
    if len(truth.facts) == 1 and not truth.negated:
        (fact,) = truth.facts
        if fact.kind == "at least":
            return Truth(frozenset({replace(fact, kind="at most", bound=fact.bound - 1)}))
        if fact.kind == "at most":
            return Truth(frozenset({replace(fact, kind="at least", bound=fact.bound + 1)}))
    return Truth(truth.facts, not truth.negated)


def positive(truth: Truth) -> Truth:
    """The same truth without a negation, where a single comparison allows it."""
    return negation(Truth(truth.facts)) if truth.negated and len(truth.facts) == 1 else truth


def both(first: Value, second: Value) -> Truth | None:
    """first and second; None unless both are conjunctions."""
    if not isinstance(first, Truth) or not isinstance(second, Truth):
        return None
    first, second = positive(first), positive(second)
    return None if first.negated or second.negated else Truth(first.facts | second.facts)


def difference(first: Value, second: Value, sign: int = -1) -> Linear | None:
    """first + sign * second; None unless both are linear."""
    if not isinstance(first, Linear) or not isinstance(second, Linear):
        return None
    slopes = dict(first.slopes)
    for d, slope in second.slopes:
        slopes[d] = slopes.get(d, 0) + sign * slope
    kept = tuple(sorted((d, slope) for d, slope in slopes.items() if slope))
    return Linear(kept, first.constant + sign * second.constant)


def at_least_zero(value: Linear) -> Truth | None:
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


def dims_of(value: Value) -> set[int]:
    """The dimensions that a value depends on."""
    match value:
        case Linear():
            return {d for d, _ in value.slopes}
        case Lookup():
            return {value.batch, value.along}
        case Truth():
            return {d for f in value.facts for d in ((f.query, f.key, f.batch) if f.table else (f.query, f.key))}
        case Additive():
            return dims_of(value.visible)
