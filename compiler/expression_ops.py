"""The ops of pointwise expressions, a row of `OPS` each: evaluation, derivative, how they are written.

What has an `expansion` is differentiated, and printed for kernels, as that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moec.compiler.expression_terms import Operand, Term, made, number

Partials = Callable[..., Sequence[Operand]]


def call(op: str, *args: Operand) -> Term:
    """An op of the table on terms and numbers; raises KeyError for an unknown op, ValueError for a wrong count."""
    if len(args) != OPS[op].arity:
        raise ValueError(f"{op} takes {OPS[op].arity} values, got {len(args)}")
    return made(op, *args)


def where(condition: Term, one: Operand, other: Operand) -> Term:
    """`one` where the condition holds, else `other`."""
    return call("where", condition, one, other)


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
