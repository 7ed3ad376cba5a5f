"""Derivatives of pointwise expressions, in reverse from the result, and ops written in others."""

from __future__ import annotations

from collections.abc import Sequence

from moec.compiler.expression_ops import OPS, where
from moec.compiler.expression_terms import Operand, Term, made, number, ordered, variable

GRAD = "grad"
"""The input of a derivative that is the gradient of the result."""


def derivative(inputs: Sequence[str], result: Term) -> list[Term]:
    """The result in ops without expansion, and for each input GRAD times the derivative by it."""
    (result,) = expanded([result])
    adjoints: dict[Term, Term] = {result: variable(GRAD)}
    for term in reversed(ordered([result])):
        grad, partials = adjoints.get(term), OPS[term.op].partials if term.args else None
        if grad is None or partials is None:
            continue
        for argument, partial in zip(term.args, partials(*term.args, term), strict=True):
            share = _times(grad, partial)
            if share.op == "number" and share.value == 0.0:
                continue
            adjoints[argument] = adjoints[argument] + share if argument in adjoints else share
    return [result, *(adjoints.get(variable(name), number(0.0)) for name in inputs)]


def expanded(results: Sequence[Term]) -> list[Term]:
    """The same terms in ops that have no expansion."""
    done: dict[Term, Term] = {}
    for term in ordered(results):
        args = tuple(done[argument] for argument in term.args)
        expansion = OPS[term.op].expansion if term.args else None
        if expansion is not None:
            (done[term],) = expanded([expansion(*args)])
        else:
            done[term] = made(term.op, *args) if term.args else term
    return [done[term] for term in results]


def _times(grad: Term, partial: Operand) -> Term:
    """grad * partial; a mask chooses, so that a gradient it stops is 0 even where grad is not finite."""
    if isinstance(partial, Term) and partial.op == "where":
        condition, one, other = partial.args
        if {one.op, other.op} == {"number"} and 0.0 in (one.value, other.value):
            return where(condition, grad * one, grad * other)
    return grad * partial
