"""Reading pointwise operators of a graph back as one expression over the parts of a product.

From a value towards the inputs, each operator is one row of `TERMS`, until the walk arrives at the product: at the
whole of it, or at equal parts of its last dimension, one after the other or interleaved. Casts between floating point
types are left out, since a kernel computes in float32 and rounds once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

import moec.compiler.dialect  # noqa: F401  (registers torch.ops.moec)
from moec.compiler.expression import Expression
from moec.compiler.expression_ops import call, power, where
from moec.compiler.expression_terms import Term, variable
from moec.compiler.graph import tensor_meta
from moec.compiler.nodes import CASTS, COPIES, aten, bound_args, describe, source_of
from moec.passes.parts import Part, part_of
from moec.passes.rewrite import Refused

_OPS = torch.ops.moec


@dataclass(frozen=True)
class Pointwise:
    """expression: over the parts of `product` in order. inner: the nodes between product and value, the value too."""

    product: fx.Node
    expression: Expression
    interleaved: bool
    inner: tuple[fx.Node, ...]


def read_pointwise(value: fx.Node, products: Collection[Any]) -> Pointwise:
    """What computes `value` from a call of one of `products`; raises Refused, with the node that is in the way."""
    reader = _Reader(products)
    result = reader.read(value)
    if reader.product is None:
        raise Refused(f"{describe(value)} comes from no product")
    names = reader.names()
    expression = Expression(names, (result,)).renamed({str(index): name for index, name in enumerate(names)})
    return Pointwise(reader.product, expression, reader.interleaved, tuple(reader.inner))


@dataclass
class _Reader:
    products: Collection[Any]
    product: fx.Node | None = None
    layout: tuple[int, bool] | None = None
    inner: dict[fx.Node, None] = field(default_factory=dict)
    roles: dict[int, str] = field(default_factory=dict)
    _terms: dict[fx.Node, Term] = field(default_factory=dict)

    @property
    def interleaved(self) -> bool:
        return self.layout is not None and self.layout[1]

    def names(self) -> tuple[str, ...]:
        """Of the inputs: their roles in a gated MLP where those are known."""
        count = 1 if self.layout is None else self.layout[0]
        names = tuple(self.roles.get(index, "x" if count == 1 else f"x{index}") for index in range(count))
        return names if len(set(names)) == count else tuple(f"x{index}" for index in range(count))

    def read(self, value: fx.Node) -> Term:
        """The term of a value over inputs that are named by their number."""
        stack = [value]
        while stack:
            node = stack[-1]
            if node in self._terms:
                stack.pop()
                continue
            if self._is_input(node):
                self._terms[node] = self._input(node)
                continue
            missing = [source for source in self._sources(node) if source not in self._terms]
            stack += reversed(missing)
            if not missing:
                self.inner[node] = None
                self._terms[node] = self._term(node)
        return self._terms[value]

    def _is_input(self, node: fx.Node) -> bool:
        return node.target in self.products or part_of(node) is not None

    def _input(self, node: fx.Node) -> Term:
        part, source = None, node
        while source.target not in self.products:
            self.inner[source] = None
            if source.target in CASTS | COPIES:
                source = source_of(source)
                continue
            found = part_of(source)
            if found is None or part is not None:
                raise Refused(f"{describe(node)} is no part of a product")
            part, source = found, self._between(source, found)
        if self.product is not None and self.product is not source:
            raise Refused(f"{describe(node)} is of another product than {describe(self.product)}")
        self.product = source
        index, layout = _place(node, part)
        if self.layout not in (None, layout):
            raise Refused(f"{describe(node)} cuts the product in another way than the parts before")
        self.layout = layout
        return variable(str(index))

    def _between(self, node: fx.Node, part: Part) -> fx.Node:
        """The value that a part is taken of; a split stands between it and its results."""
        source = source_of(node)
        if source is not part.source:
            self.inner[source] = None
        return part.source

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        known = node.op == "call_function" and (node.target in TERMS or node.target in CASTS | COPIES)
        if not known:
            raise Refused(f"{describe(node)} is not known to be pointwise, or is no part of a product")
        return node.all_input_nodes

    def _term(self, node: fx.Node) -> Term:
        if node.target in CASTS | COPIES:
            return self._cast(node)
        arguments = [self._terms[value] if isinstance(value, fx.Node) else value for value in bound_args(node)]
        if node.target is _OPS.gated_mlp_act.default:
            for role, term in zip(("gate", "up"), arguments, strict=False):
                if term.op == "input":
                    self.roles[int(str(term.value))] = role
        term = TERMS[node.target](*arguments)
        if term is None:
            raise Refused(f"{describe(node)} has arguments that no expression knows")
        return term

    def _cast(self, node: fx.Node) -> Term:
        term, before, after = self._terms[source_of(node)], tensor_meta(source_of(node)), tensor_meta(node)
        if before is None or after is None or not after.is_floating_point():
            raise Refused(f"{describe(node)} makes whole numbers")
        return where(term, 1.0, 0.0) if before.dtype == torch.bool else term


def _place(node: fx.Node, part: Part | None) -> tuple[int, tuple[int, bool]]:
    """Which part of a row this is, of how many, and whether they are interleaved."""
    if part is None:
        return 0, (1, False)
    count = part.size // part.length if part.length else 0
    last = part.dim == part.source.meta["val"].dim() - 1
    if last and count * part.length == part.size:
        if part.step == 1 and part.start % part.length == 0:
            return part.start // part.length, (count, False)
        if part.step == count and part.start < count:
            return part.start, (count, True)
    raise Refused(f"{describe(node)} is not one of several equal parts of a row")


# The table

Rule = Callable[..., Term | None]


def _named(name: str) -> Rule:
    return lambda *terms: call(name, *terms)


def _clamp(x: Term, low: Any = None, high: Any = None) -> Term | None:
    if not all(isinstance(bound, int | float | None) for bound in (low, high)):
        return None
    x = x if high is None else call("clamp_max", x, high)
    return x if low is None else call("clamp_min", x, low)


def _hardtanh(x: Term, low: float, high: float) -> Term:
    # Unlike that of a clamp, its gradient is 0 at the bounds.
    return where(call("le", x, low), low, where(call("ge", x, high), high, x))


def _softplus(x: Term, beta: float, threshold: float) -> Term | None:
    return call("softplus", x) if beta == 1 and threshold >= 20 else None


def _elu(x: Term, alpha: float, scale: float, input_scale: float) -> Term:
    below = scale * alpha * call("expm1", call("clamp_max", x * input_scale, 0.0))
    return where(call("gt", x, 0.0), scale * x, below)


def _gelu(x: Term, approximate: str) -> Term | None:
    name = {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate)
    return None if name is None else call(name, x)


def _situ(gate: Term, up: Term, a: float, b: float) -> Term:
    return call("tanh", gate / a) * a * call("sigmoid", gate) * (call("tanh", up / b) * b)


def _clamped_swiglu(gate: Term, up: Term, a: float, b: float) -> Term:
    gate, up = call("clamp_max", gate, b), call("clamp_min", call("clamp_max", up, b), -b)
    return gate * call("sigmoid", a * gate) * (up + 1.0)


def _squared_relu(gate: Term, up: Term, a: float, b: float) -> Term:
    positive = call("relu", gate)
    return positive * positive * up


GATED: dict[str, Callable[[Term, Term, float, float], Term]] = {
    "silu": lambda gate, up, a, b: call("silu", gate) * up,
    "gelu": lambda gate, up, a, b: call("gelu", gate) * up,
    "gelu_tanh": lambda gate, up, a, b: call("gelu_tanh", gate) * up,
    "relu2": _squared_relu,
    "situ": _situ,
    "clamped_swiglu": _clamped_swiglu,
}
"""The kinds of `moec::gated_mlp_act`."""

_SAME_NAME = (
    "neg", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid", "erf", "abs", "relu",
    "silu", "mish", "minimum", "maximum",
)  # fmt: skip
_COMPARISONS = [
    (f"{name}.{kind}", name) for name in ("lt", "le", "gt", "ge", "eq", "ne") for kind in ("Tensor", "Scalar")
]
_ROWS: dict[str, Rule] = {
    **{f"{name}.default": _named(name) for name in _SAME_NAME},
    **{overload: _named(name) for overload, name in _COMPARISONS},
    "add.Tensor": lambda a, b, alpha: a + b * alpha,
    "add.Scalar": lambda a, b, alpha: a + b * alpha,
    "sub.Tensor": lambda a, b, alpha: a - b * alpha,
    "sub.Scalar": lambda a, b, alpha: a - b * alpha,
    "rsub.Scalar": lambda a, b, alpha: b - a * alpha,
    "mul.Tensor": lambda a, b: a * b,
    "mul.Scalar": lambda a, b: a * b,
    "div.Tensor": lambda a, b: a / b,
    "div.Scalar": lambda a, b: a / b,
    "reciprocal.default": lambda x: 1.0 / x,
    "square.default": lambda x: x * x,
    "pow.Tensor_Scalar": power,
    "clamp.default": _clamp,
    "clamp_min.default": lambda x, low: _clamp(x, low),
    "clamp_max.default": lambda x, high: _clamp(x, None, high),
    "hardtanh.default": _hardtanh,
    "relu6.default": lambda x: _hardtanh(x, 0.0, 6.0),
    "leaky_relu.default": lambda x, slope: where(call("gt", x, 0.0), x, x * slope),
    "elu.default": _elu,
    "softplus.default": _softplus,
    "log_sigmoid.default": lambda x: -call("softplus", -x),
    "gelu.default": _gelu,
    "where.self": where,
    "masked_fill.Scalar": lambda x, mask, value: where(mask, value, x),
}
TERMS: dict[Any, Rule] = {overload: rule for name, rule in _ROWS.items() for overload in aten(name)}
TERMS[_OPS.gated_mlp_act.default] = lambda gate, up, kind, a, b: GATED[kind](gate, up, a, b)
TERMS[_OPS.sigmoid_gate.default] = lambda x, gate: x * call("sigmoid", gate)
"""Operator -> the term of its result from the terms and numbers of its arguments, None where those have no form."""
