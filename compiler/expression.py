"""Pointwise expressions as values: built from a graph, read and written as text, evaluated, differentiated.

The activation of an expert is data for the kernels around it: its text is an argument of the op, printers turn it into
the source of a kernel (`codegen/triton/epilogue.py`), and its derivative follows from the rules below.

    gate, up: (t := clamp_max(gate, 7.0)) * sigmoid(1.702 * t) * (clamp_min(clamp_max(up, 7.0), -7.0) + 1.0)

The text is the rest of a Python `lambda`; a value that is used twice is named where it is used first. Equal terms are
one object, so that what is shared is computed once. The ops are the rows of `OPS`; what has an `expansion` is
differentiated, and printed for kernels, as that.
"""

from __future__ import annotations

import ast
import functools
import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

GRAD = "grad"
"""The input of a derivative that is the gradient of the result."""


@dataclass(frozen=True)
class Expression:
    """results: terms over the inputs, which are in the order of the arguments."""

    inputs: tuple[str, ...]
    results: tuple[Term, ...]

    @property
    def text(self) -> str:
        """One line; `parse` reads it back."""
        return f"{', '.join(self.inputs)}: {', '.join(_texts(self))}"

    def __call__(self, *values: Tensor) -> tuple[Tensor, ...]:
        """The results on tensors, in their dtype."""
        return _evaluate(self, values)

    def derivative(self) -> Expression:
        """Inputs and `grad` -> the first result's value, and for each input grad times the derivative by it."""
        assert GRAD not in self.inputs
        return _derivative(self)

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
        return Expression(self.inputs, tuple(_expanded(self.results)))


class Term:
    """One op on other terms. `value`: the number of a "number", the name of an "input"."""

    __slots__ = ("__weakref__", "args", "op", "value")

    def __init__(self, op: str, args: tuple[Term, ...], value: float | str | None) -> None:
        self.op, self.args, self.value = op, args, value

    def __add__(self, other: Operand) -> Term:
        return call("add", self, other)

    def __radd__(self, other: Operand) -> Term:
        return call("add", other, self)

    def __sub__(self, other: Operand) -> Term:
        return call("sub", self, other)

    def __rsub__(self, other: Operand) -> Term:
        return call("sub", other, self)

    def __mul__(self, other: Operand) -> Term:
        return call("mul", self, other)

    def __rmul__(self, other: Operand) -> Term:
        return call("mul", other, self)

    def __truediv__(self, other: Operand) -> Term:
        return call("div", self, other)

    def __rtruediv__(self, other: Operand) -> Term:
        return call("div", other, self)

    def __neg__(self) -> Term:
        return call("neg", self)


Operand = Term | float
Partials = Callable[..., Sequence[Operand]]


def variable(name: str) -> Term:
    """An input by its name."""
    return _term("input", (), name)


def number(value: float) -> Term:
    """A constant."""
    return _term("number", (), float(value))


def call(op: str, *args: Operand) -> Term:
    """An op of the table on terms and numbers; constants are folded, and so is what adds 0 or multiplies by 1."""
    terms = tuple(arg if isinstance(arg, Term) else number(arg) for arg in args)
    if len(terms) != OPS[op].arity:
        raise ValueError(f"{op} takes {OPS[op].arity} values, got {len(terms)}")
    simpler = _simpler(op, terms)
    return simpler if simpler is not None else _term(op, terms, None)


def power(base: Term, exponent: float) -> Term | None:
    """base ** exponent as products and roots, None where it is neither."""
    if exponent < 0:
        inverse = call("rsqrt", base) if exponent == -0.5 else power(base, -exponent)
        return inverse if exponent == -0.5 or inverse is None else 1.0 / inverse
    if exponent == 0.5:
        return call("sqrt", base)
    if exponent != int(exponent) or exponent > 8:
        return None
    return functools.reduce(lambda product, _: product * base, range(int(exponent)), number(1.0))


@functools.cache
def parse(text: str) -> Expression:
    """The expression of a text; raises ValueError with the part that is not understood."""
    names, colon, body = text.partition(":")
    try:
        parsed = ast.parse(f"lambda {names}: ({body.strip()},)", mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{text!r} is no expression: {error.msg}") from None
    if not colon or not isinstance(parsed, ast.Lambda) or not isinstance(parsed.body, ast.Tuple):
        raise ValueError(f"{text!r} is no expression, expected 'inputs: value'")
    inputs = tuple(argument.arg for argument in parsed.args.args)
    known: dict[str, Term] = {name: variable(name) for name in inputs}
    return Expression(inputs, tuple(_read(result, known) for result in parsed.body.elts))


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


# The table


@dataclass(frozen=True)
class Op:
    """One op.

    torch: what evaluates it. partials: (*args, result) -> derivative by each argument. expansion: the same in other
    ops. symbol: how it is written between its arguments, and how tightly it binds.
    """

    arity: int
    torch: Callable[..., Any]
    partials: Partials | None = None
    expansion: Callable[..., Term] | None = None
    symbol: str = ""
    binds: int = 0


def where(condition: Term, one: Operand, other: Operand) -> Term:
    """`one` where the condition holds, else `other`."""
    return call("where", condition, one, other)


def _sign(x: Term) -> Term:
    return where(call("gt", x, 0.0), 1.0, where(call("lt", x, 0.0), -1.0, 0.0))


def _share(one: Term, other: Term, better: str) -> tuple[Term, Term]:
    """Of minimum and maximum, which share the gradient where both are equal, as autograd does."""
    mine = where(call(better, one, other), 1.0, where(call("eq", one, other), 0.5, 0.0))
    return mine, 1.0 - mine


def _gelu(x: Term) -> Term:
    return x * (0.5 * (1.0 + call("erf", x * math.sqrt(0.5))))


def _gelu_tanh(x: Term) -> Term:
    # 0.5 (1 + tanh(u)) is sigmoid(2 u), which has no cancellation for negative u.
    return x * call("sigmoid", x * (2 * math.sqrt(2 / math.pi) * (1.0 + 0.044715 * (x * x))))


def _compare(function: Callable[..., Any], symbol: str) -> Op:
    return Op(2, function, lambda *_: (0.0, 0.0), symbol=symbol, binds=1)


OPS: dict[str, Op] = {
    "add": Op(2, torch.add, lambda a, b, y: (1.0, 1.0), symbol="+", binds=2),
    "sub": Op(2, torch.sub, lambda a, b, y: (1.0, -1.0), symbol="-", binds=2),
    "mul": Op(2, torch.mul, lambda a, b, y: (b, a), symbol="*", binds=3),
    "div": Op(2, torch.div, lambda a, b, y: (1.0 / b, -(y / b)), symbol="/", binds=3),
    "neg": Op(1, torch.neg, lambda x, y: (-1.0,), symbol="-", binds=4),
    "lt": _compare(torch.lt, "<"),
    "le": _compare(torch.le, "<="),
    "gt": _compare(torch.gt, ">"),
    "ge": _compare(torch.ge, ">="),
    "eq": _compare(torch.eq, "=="),
    "ne": _compare(torch.ne, "!="),
    "where": Op(3, torch.where, lambda c, a, b, y: (0.0, where(c, 1.0, 0.0), where(c, 0.0, 1.0))),
    "abs": Op(1, torch.abs, lambda x, y: (_sign(x),)),
    "minimum": Op(2, torch.minimum, lambda a, b, y: _share(a, b, "lt")),
    "maximum": Op(2, torch.maximum, lambda a, b, y: _share(a, b, "gt")),
    "relu": Op(1, torch.relu, lambda x, y: (where(call("gt", x, 0.0), 1.0, 0.0),)),
    "clamp_min": Op(2, torch.clamp_min, lambda x, c, y: (where(call("ge", x, c), 1.0, 0.0), 0.0)),
    "clamp_max": Op(2, torch.clamp_max, lambda x, c, y: (where(call("le", x, c), 1.0, 0.0), 0.0)),
    "exp": Op(1, torch.exp, lambda x, y: (y,)),
    "expm1": Op(1, torch.expm1, lambda x, y: (y + 1.0,)),
    "log": Op(1, torch.log, lambda x, y: (1.0 / x,)),
    "log1p": Op(1, torch.log1p, lambda x, y: (1.0 / (x + 1.0),)),
    "sqrt": Op(1, torch.sqrt, lambda x, y: (0.5 / y,)),
    "rsqrt": Op(1, torch.rsqrt, lambda x, y: (-0.5 * (y / x),)),
    "sin": Op(1, torch.sin, lambda x, y: (call("cos", x),)),
    "cos": Op(1, torch.cos, lambda x, y: (-call("sin", x),)),
    "erf": Op(1, torch.erf, lambda x, y: (2 / math.sqrt(math.pi) * call("exp", -(x * x)),)),
    "sigmoid": Op(1, torch.sigmoid, lambda x, y: (y * (1.0 - y),)),
    "tanh": Op(1, torch.tanh, lambda x, y: (1.0 - y * y,)),
    "softplus": Op(1, torch.nn.functional.softplus, lambda x, y: (call("sigmoid", x),)),
    "silu": Op(1, torch.nn.functional.silu, expansion=lambda x: x * call("sigmoid", x)),
    "gelu": Op(1, torch.nn.functional.gelu, expansion=_gelu),
    "gelu_tanh": Op(1, lambda x: torch.nn.functional.gelu(x, approximate="tanh"), expansion=_gelu_tanh),
    "mish": Op(1, torch.nn.functional.mish, expansion=lambda x: x * call("tanh", call("softplus", x))),
}

# Building

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
    return where(condition, factor * one, factor * other)


_FOLDED: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
}


# Differentiating, expanding, evaluating


def _derivative(expression: Expression) -> Expression:
    (result,) = expression.expanded().results
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
    grads = (adjoints.get(variable(name), number(0.0)) for name in expression.inputs)
    return Expression((*expression.inputs, GRAD), (result, *grads))


def _times(grad: Term, partial: Operand) -> Term:
    """grad * partial; a mask chooses, so that a gradient it stops is 0 even where grad is not finite."""
    if isinstance(partial, Term) and partial.op == "where":
        condition, one, other = partial.args
        if {one.op, other.op} == {"number"} and 0.0 in (one.value, other.value):
            return where(condition, grad * one, grad * other)
    return grad * partial


def _expanded(results: Sequence[Term]) -> list[Term]:
    done: dict[Term, Term] = {}
    for term in ordered(results):
        args = tuple(done[argument] for argument in term.args)
        expansion = OPS[term.op].expansion if term.args else None
        if expansion is not None:
            (done[term],) = _expanded([expansion(*args)])
        else:
            done[term] = call(term.op, *args) if term.args else term
    return [done[term] for term in results]


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

# Text


def _texts(expression: Expression) -> list[str]:
    uses = Counter(argument for term in ordered(expression.results) for argument in term.args)
    names: dict[Term, str] = {}
    taken = set(expression.inputs) | set(OPS) | {"inf"}

    def text(term: Term, binds: int) -> str:
        if term in names:
            return names[term]
        written, own = _written(term, text)
        if uses[term] > 1 and term.args:
            names[term] = next(name for name in map("t{}".format, itertools.count()) if name not in taken)
            taken.add(names[term])
            return f"({names[term]} := {written})"
        return f"({written})" if own < binds else written

    return [text(term, 0) for term in expression.results]


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
