"""Pointwise expressions as values: built from a graph, read and written as text, evaluated, differentiated.

The activation of an expert is data for the kernels around it: its text is an argument of the op, printers turn it into
the source of a kernel (`codegen/triton/epilogue.py`), and its derivative follows from rules.

    gate, up: (t := clamp_max(gate, 7.0)) * sigmoid(1.702 * t) * (clamp_min(clamp_max(up, 7.0), -7.0) + 1.0)

`expression_terms.py` has the terms it is made of, `expression_ops.py` the ops, `expression_text.py` the text,
`expression_derivative.py` the derivative.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moec.compiler import expression_derivative, expression_text
from moec.compiler.expression_derivative import GRAD
from moec.compiler.expression_ops import OPS, call
from moec.compiler.expression_terms import Term, ordered, variable


@functools.cache
def parse(text: str) -> Expression:
    """The expression of a text; raises ValueError with the part that is not understood."""
    return Expression(*expression_text.read(text))


@dataclass(frozen=True)
class Expression:
    """results: terms over the inputs, which are in the order of the arguments."""

    inputs: tuple[str, ...]
    results: tuple[Term, ...]

    @property
    def text(self) -> str:
        """One line; `parse` reads it back."""
        return expression_text.written(self.inputs, self.results)

    def __call__(self, *values: Tensor) -> tuple[Tensor, ...]:
        """The results on tensors, in their dtype."""
        return _evaluate(self, values)

    def derivative(self) -> Expression:
        """Inputs and `grad` -> the first result's value, and for each input grad times the derivative by it."""
        assert GRAD not in self.inputs
        (result,) = self.results
        results = expression_derivative.derivative(self.inputs, result)
        return Expression((*self.inputs, GRAD), tuple(results))

    def renamed(self, names: Mapping[str, str]) -> Expression:
        """The same with other names for its inputs; `names` has a new one for each that the results read."""
        done: dict[Term, Term] = {}
        for term in ordered(self.results):
            if term.op == "input":
                done[term] = variable(names[str(term.value)])
            else:
                done[term] = call(term.op, *(done[a] for a in term.args)) if term.args else term
        return Expression(self.inputs, tuple(done[term] for term in self.results))

    def expanded(self) -> Expression:
        """The same in ops that have no expansion."""
        return Expression(self.inputs, tuple(expression_derivative.expanded(self.results)))


def _evaluate(expression: Expression, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    like = values[0]
    found: dict[Term, Any] = dict(zip(map(variable, expression.inputs), values, strict=True))
    for term in ordered(expression.results):
        if term.op == "number":
            found[term] = term.value
        elif term.args:
            args = [found[argument] for argument in term.args]
            if term.op in _OF_TENSORS:
                args = [a if isinstance(a, Tensor) else like.new_full((), a) for a in args]
            found[term] = OPS[term.op].torch(*args)
    return tuple(_of_its_own(term, found[term], like) for term in expression.results)


def _of_its_own(term: Term, value: Any, like: Tensor) -> Tensor:
    """A result as a tensor that is no input."""
    if not isinstance(value, Tensor):
        return like.new_full(like.shape, value)
    return value.clone() if term.op == "input" else value


_OF_TENSORS = {"where", "minimum", "maximum", "sub", "div", "add", "mul"}
