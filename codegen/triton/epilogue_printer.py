"""Pointwise expressions as Triton source: the forward and the backward lines of an `Epilogue`.

1. The derivative follows from the rules of `compiler/expression_ops.py`, and both are written in ops without expansion.
2. `FORMS` rewrites what Triton has not, or what would lose digits: tanh near 0, log1p, expm1, softplus.
3. Each op is a row of `TEXTS`. A value that is used once stands inside of what uses it, another gets a line.

All arithmetic is in float32. What is not a number stays so: a clamp of NaN is NaN.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence

from moec.codegen.triton.epilogue import Epilogue
from moec.compiler.expression import Expression, parse
from moec.compiler.expression_derivative import GRAD
from moec.compiler.expression_ops import OPS, call, where
from moec.compiler.expression_terms import Term, number, ordered

RESULT = "result"
_WIDTH = 100


@functools.cache
def epilogue_of(activation: str) -> Epilogue:
    """The epilogue of an activation's text, such as "gate, up: silu(gate) * up"."""
    expression = parse(activation)
    grads = [f"{GRAD}_{name}" for name in expression.inputs]
    return Epilogue(
        expression.inputs,
        lines(expression.expanded(), [RESULT]),
        lines(expression.derivative(), [RESULT, *grads]),
    )


def lines(expression: Expression, targets: Sequence[str]) -> str:
    """Statements that assign the results to `targets`."""
    results = _supported(expression.results)
    uses = Counter(argument for term in ordered(results) for argument in term.args)
    taken = {*expression.inputs, *targets, "tl"}
    names: dict[Term, str] = {}
    written: list[str] = []

    def text(term: Term, binds: int) -> str:
        if term in names:
            return names[term]
        line, own = _written(term, text)
        if not term.args or (uses[term] == 1 and len(line) < _WIDTH and term not in results):
            return f"({line})" if own < binds else line
        names[term] = _unused(term.op, taken)
        written.append(f"{names[term]} = {line}")
        return names[term]

    for target, result in zip(targets, results, strict=True):
        line = text(result, 0)
        written.append(f"{target} = {line if result.op != 'number' else _constant(line, expression)}")
    return "\n".join(_named(written, targets))


# Forms that Triton does not have


def _tanh(x: Term) -> Term:
    """Odd polynomial below 1/4, where 1 - exp(-2 |x|) would lose digits."""
    square = x * x
    series = number(0.0)
    for coefficient in (62 / 2835, -17 / 315, 2 / 15, -1 / 3):
        series = square * (series + coefficient)
    decay = call("exp", -2.0 * call("abs", x))
    large = (1.0 - decay) / (1.0 + decay)
    return where(call("lt", call("abs", x), 0.25), x + x * series, where(call("lt", x, 0.0), -large, large))


def _log1p(x: Term) -> Term:
    """What the sum rounds off is made up for (Kahan)."""
    total = 1.0 + x
    return where(call("eq", total, 1.0), x, call("log", total) * (x / (total - 1.0)))


def _expm1(x: Term) -> Term:
    total = call("exp", x)
    near = where(call("eq", total, 1.0), x, (total - 1.0) * (x / call("log", total)))
    return where(call("gt", call("abs", x), 0.5), total - 1.0, near)


def _softplus(x: Term) -> Term:
    return call("relu", x) + call("log1p", call("exp", -call("abs", x)))


FORMS: dict[str, Callable[..., Term]] = {
    "tanh": _tanh,
    "log1p": _log1p,
    "expm1": _expm1,
    "softplus": _softplus,
    "relu": lambda x: where(call("lt", x, 0.0), 0.0, x),
    "clamp_min": lambda x, least: where(call("lt", x, least), least, x),
    "clamp_max": lambda x, most: where(call("gt", x, most), most, x),
    # A NaN in either is the result.
    "minimum": lambda a, b: where(call("lt", a, b), a, where(call("eq", a, a), b, a)),
    "maximum": lambda a, b: where(call("gt", a, b), a, where(call("eq", a, a), b, a)),
}


def _supported(results: Sequence[Term]) -> list[Term]:
    done: dict[Term, Term] = {}
    for term in ordered(results):
        args = tuple(done[argument] for argument in term.args)
        if term.op in FORMS:
            (done[term],) = _supported([FORMS[term.op](*args)])
        else:
            done[term] = call(term.op, *args) if term.args else term
    return [done[term] for term in results]


# Text

TEXTS: dict[str, str] = {
    "where": "tl.where({}, {}, {})",
    "abs": "tl.abs({})",
    "exp": "tl.exp({})",
    "log": "tl.log({})",
    "sqrt": "tl.sqrt({})",
    "rsqrt": "tl.rsqrt({})",
    "sin": "tl.sin({})",
    "cos": "tl.cos({})",
    "erf": "tl.erf({})",
    "sigmoid": "tl.sigmoid({})",
}
"""Ops that are functions; those with a symbol are written as Python writes them."""

_ATOM = 9
_COMPARED = OPS["lt"].binds


def _written(term: Term, text: Callable[[Term, int], str]) -> tuple[str, int]:
    """The text of a term and how tightly it binds."""
    if not term.args:
        return _plain(term)
    op = OPS[term.op]
    if op.symbol and op.arity == 2:
        left = text(term.args[0], op.binds + (op.binds == _COMPARED))
        return f"{left} {op.symbol} {text(term.args[1], op.binds + 1)}", op.binds
    if op.symbol:
        return f"{op.symbol}{text(term.args[0], op.binds)}", op.binds
    return TEXTS[term.op].format(*(text(argument, 0) for argument in term.args)), _ATOM


def _plain(term: Term) -> tuple[str, int]:
    if term.op == "number" and not math.isfinite(float(term.value or 0.0)):
        return f'float("{term.value}")', _ATOM
    negative = term.op == "number" and str(term.value).startswith("-")
    return str(term.value), OPS["neg"].binds if negative else _ATOM


def _constant(value: str, expression: Expression) -> str:
    """A result that no input moves still is a tile."""
    return f"tl.zeros_like({expression.inputs[0]}) + {value}"


def _unused(op: str, taken: set[str]) -> str:
    name, count = op, 2
    while name in taken:
        name, count = f"{op}_{count}", count + 1
    taken.add(name)
    return name


def _named(written: list[str], targets: Sequence[str]) -> list[str]:
    """Without a line that only renames the value of the line before it."""
    found: list[str] = []
    for line in written:
        target, _, value = line.partition(" = ")
        before = found[-1].partition(" = ") if found else ("", "", "")
        if target in targets and value == before[0]:
            found[-1] = f"{target} = {before[2]}"
        else:
            found.append(line)
    return found
