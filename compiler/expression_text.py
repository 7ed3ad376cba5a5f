"""Pointwise expressions as text, written and read: the rest of a Python `lambda`.

    gate, up: (t := clamp_max(gate, 7.0)) * sigmoid(1.702 * t) * (clamp_min(clamp_max(up, 7.0), -7.0) + 1.0)

A value that is used twice is named where it is used first.
"""

from __future__ import annotations

import ast
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence

from moec.compiler.expression_ops import OPS, call
from moec.compiler.expression_terms import Term, number, ordered, variable


def written(inputs: Sequence[str], results: Sequence[Term]) -> str:
    """One line; `read` reads it back."""
    return f"{', '.join(inputs)}: {', '.join(_texts(inputs, results))}"


def read(text: str) -> tuple[tuple[str, ...], tuple[Term, ...]]:
    """Inputs and results of a text; raises ValueError with the part that is not understood."""
    names, colon, body = text.partition(":")
    try:
        parsed = ast.parse(f"lambda {names}: ({body.strip()},)", mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{text!r} is no expression: {error.msg}") from None
    if not colon or not isinstance(parsed, ast.Lambda) or not isinstance(parsed.body, ast.Tuple):
        raise ValueError(f"{text!r} is no expression, expected 'inputs: value'")
    inputs = tuple(argument.arg for argument in parsed.args.args)
    known: dict[str, Term] = {name: variable(name) for name in inputs}
    return inputs, tuple(_read(result, known) for result in parsed.body.elts)


def _texts(inputs: Sequence[str], results: Sequence[Term]) -> list[str]:
    uses = Counter(argument for term in ordered(results) for argument in term.args)
    names: dict[Term, str] = {}
    taken = set(inputs) | set(OPS) | {"inf"}

    def text(term: Term, binds: int) -> str:
        if term in names:
            return names[term]
        written, own = _written(term, text)
        if uses[term] > 1 and term.args:
            names[term] = next(name for name in map("t{}".format, itertools.count()) if name not in taken)
            taken.add(names[term])
            return f"({names[term]} := {written})"
        return f"({written})" if own < binds else written

    return [text(term, 0) for term in results]


_ATOM = 9


def _written(term: Term, text: Callable[[Term, int], str]) -> tuple[str, int]:
    """The text of a term and how tightly it binds."""
    if not term.args:
        negative = term.op == "number" and str(term.value).startswith("-")
        return str(term.value), OPS["neg"].binds if negative else _ATOM
    op = OPS[term.op]
    if op.symbol and op.arity == 2:
        # The right side of what is not associative gets parentheses, the left side of a comparison too.
        left = text(term.args[0], op.binds + (op.binds == OPS["lt"].binds))
        return f"{left} {op.symbol} {text(term.args[1], op.binds + 1)}", op.binds
    if op.symbol:
        return f"{op.symbol}{text(term.args[0], op.binds)}", op.binds
    return f"{term.op}({', '.join(text(argument, 0) for argument in term.args)})", _ATOM


_BINARY = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div"}
_COMPARED = {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne"}


def _read(node: ast.expr, known: dict[str, Term]) -> Term:
    match node:
        case ast.Constant(value=(int() | float()) as value):
            return number(value)
        case ast.Name(id=name) if name in known:
            return known[name]
        case ast.Name(id="inf"):
            return number(math.inf)
        case ast.NamedExpr(target=ast.Name(id=name), value=value):
            known[name] = _read(value, known)
            return known[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return call("neg", _read(operand, known))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _BINARY:
            one = _read(left, known)
            return call(_BINARY[type(operation)], one, _read(right, known))
        case ast.Compare(left=left, ops=[operation], comparators=[right]):
            one = _read(left, known)
            return call(_COMPARED[type(operation)], one, _read(right, known))
        case ast.Call(func=ast.Name(id=name), args=args) if name in OPS:
            return call(name, *[_read(argument, known) for argument in args])
    raise ValueError(f"{ast.unparse(node)!r} is no expression over {', '.join(known)} in the ops {', '.join(OPS)}")
