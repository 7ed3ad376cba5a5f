"""Terms of pointwise expressions: what ops on inputs and numbers are while an expression is built.

Equal terms are one object, so that what is shared is computed once. Constants are folded, and so is what adds 0 or
multiplies by 1. The ops and their rules are in `expression_ops.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any


class Term:
    """One op on other terms. `value`: the number of a "number", the name of an "input"."""

    __slots__ = ("__weakref__", "args", "op", "value")

    def __init__(self, op: str, args: tuple[Term, ...], value: float | str | None) -> None:
        self.op, self.args, self.value = op, args, value

    def __add__(self, other: Operand) -> Term:
        return made("add", self, other)

    def __radd__(self, other: Operand) -> Term:
        return made("add", other, self)

    def __sub__(self, other: Operand) -> Term:
        return made("sub", self, other)

    def __rsub__(self, other: Operand) -> Term:
        return made("sub", other, self)

    def __mul__(self, other: Operand) -> Term:
        return made("mul", self, other)

    def __rmul__(self, other: Operand) -> Term:
        return made("mul", other, self)

    def __truediv__(self, other: Operand) -> Term:
        return made("div", self, other)

    def __rtruediv__(self, other: Operand) -> Term:
        return made("div", other, self)

    def __neg__(self) -> Term:
        return made("neg", self)


Operand = Term | float


def variable(name: str) -> Term:
    """An input by its name."""
    return _term("input", (), name)


def number(value: float) -> Term:
    """A constant."""
    return _term("number", (), float(value))


def made(op: str, *args: Operand) -> Term:
    """The term of an op on terms and numbers, in its simplest form. Whether there is such an op is not looked at."""
    terms = tuple(arg if isinstance(arg, Term) else number(arg) for arg in args)
    simpler = _simpler(op, terms)
    return simpler if simpler is not None else _term(op, terms, None)


def ordered(results: Iterable[Term]) -> list[Term]:
    """All terms that the results need, each after its arguments."""
    found: dict[Term, None] = {}
    stack = [(term, False) for term in reversed(list(results))]
    while stack:
        term, ready = stack.pop()
        if ready:
            found[term] = None
        elif term not in found:
            stack.append((term, True))
            stack += [(argument, False) for argument in reversed(term.args)]
    return list(found)


_TERMS: weakref.WeakValueDictionary[tuple[Any, ...], Term] = weakref.WeakValueDictionary()


def _term(op: str, args: tuple[Term, ...], value: float | str | None) -> Term:
    key = (op, value, args)
    known = _TERMS.get(key)
    if known is None:
        known = _TERMS[key] = Term(op, args, value)
    return known


def _simpler(op: str, terms: tuple[Term, ...]) -> Term | None:
    numbers = [term.value if term.op == "number" else None for term in terms]
    if op == "where":
        return terms[1] if terms[1] is terms[2] else None
    if None not in numbers and op in _FOLDED:
        return number(_FOLDED[op](*numbers))
    match op, numbers:
        case ("add", [0.0, None]) | ("mul", [1.0, None]):
            return terms[1]
        case ("add" | "sub", [None, 0.0]) | ("mul" | "div", [None, 1.0]):
            return terms[0]
        case ("mul", [0.0, None] | [None, 0.0]) | ("div", [0.0, None]):
            return number(0.0)
        case ("mul", [-1.0, None]) | ("sub", [0.0, None]):
            return -terms[1]
        case ("mul", [None, -1.0]):
            return -terms[0]
        case ("neg", [None]) if terms[0].op == "neg":
            return terms[0].args[0]
        case ("mul", [float(factor), None]) if terms[1].op == "where":
            return _scaled(terms[1], factor)
    return None


def _scaled(choice: Term, factor: float) -> Term | None:
    """A number times a choice between numbers."""
    condition, one, other = choice.args
    if one.op != "number" or other.op != "number":
        return None
    return made("where", condition, factor * one, factor * other)


_FOLDED: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
}
