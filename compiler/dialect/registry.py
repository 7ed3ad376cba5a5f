"""The table of dialect ops: what each op is, costs, and may be done with it.

Each file of this folder defines the ops of one family in the same form:

1. a plain PyTorch reference (any device, float64-able), no side effects;
2. `torch.library.custom_op("moec::NAME", mutates_args=())` around it, and `NAME_backward`, an op too;
3. `register_fake` for both, `register_autograd` for the forward;
4. `define(Definition(...))`, which puts both into the table below.

Costs are formulas in the names that `shapes` gives to the dimensions of the tensor arguments, parsed by sympy, so
that a log can print them and a planner can evaluate them for any size. "..." in a shape stands for all leading
dimensions; their product is called N.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from moec.compiler._torch_compat import OpOverload

Recompute = bool


@dataclass(frozen=True)
class Definition:
    """One op of the dialect.

    name: the op's name after `moec::`.
    op, backward: the overloads; `backward` is None for ops without a gradient.
    shapes: argument name -> names of its dimensions, e.g. {"q": "B T H K"}; optional arguments may be absent in a call.
        Also those of a result that the backward takes, for dimensions that no argument of it has.
    flops: floating point operations as a sympy expression of the dimension names and of number arguments (bool: 0, 1).
    backward_flops: the same for the backward op, in the names of the forward's shapes, and need_NAME, which is 1 where
        the gradient of NAME is asked for and else 0.
    only_for: forward argument -> the gradients that alone read it in backward.
    for_backward: optional forward arguments that the forward does not read: autograd hands them to the backward.
    recompute: whether a partition may run the op again in backward (never for routing decisions).
    source: paper or section that states the formula.
    """

    name: str
    op: OpOverload
    shapes: Mapping[str, str]
    flops: str
    backward: OpOverload | None = None
    backward_flops: str = "0"
    only_for: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    for_backward: tuple[str, ...] = ()
    recompute: Recompute = True
    source: str = ""
    summary: str = field(default="", compare=False)

    def flops_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> sympy.Expr:
        """FLOPs of one call; sizes come from the (fake) tensor arguments, symbolic ones stay symbols."""
        return _evaluate(self.flops, self.bind(args, kwargs))

    def backward_flops_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> sympy.Expr:
        """FLOPs of the backward that belongs to one forward call with these arguments; need_NAME=0 leaves one out.

        A dimension that only an argument which is not given has counts 0: nothing is made of its size.
        """
        assert self.backward is not None
        names = (result.name.removeprefix("grad_") for result in self.backward._schema.returns)
        sizes = {name: sympy.Integer(0) for dimensions in self.shapes.values() for name in dimensions.split()}
        sizes |= {f"need_{name}": sympy.Integer(1) for name in names}
        return _evaluate(self.backward_flops, sizes | self.bind(args, kwargs))

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, sympy.Expr]:
        """Dimension names -> sizes for one call; a size that disagrees with an earlier one raises ValueError."""
        arguments = self.op._schema.arguments
        defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
        given = defaults | dict(zip((argument.name for argument in arguments), args, strict=False)) | dict(kwargs)
        sizes: dict[str, sympy.Expr] = {
            name: sympy.sympify(int(value) if isinstance(value, bool) else value)
            for name, value in given.items()
            if isinstance(value, int | float)
        }
        for name, dimensions in self.shapes.items():
            value = given.get(name)
            if isinstance(value, list | tuple):
                sizes[f"len_{name}"] = sympy.Integer(len(value))
                value = value[0] if value else None
            if isinstance(value, torch.Tensor):
                _bind_shape(self.name, name, dimensions.split(), value.shape, sizes)
        return sizes


DEFINITIONS: dict[str, Definition] = {}
_BY_OP: dict[OpOverload, Definition] = {}
BODIES: dict[OpOverload, Callable[..., Any]] = {}
"""Op -> the plain PyTorch function that it runs, for what has to look inside; called with the op's arguments."""


def define(definition: Definition) -> Definition:
    """Put an op into the table; the name must be new."""
    if definition.name in DEFINITIONS:
        raise ValueError(f"moec::{definition.name} is defined twice; was a folder imported bare, without `moec.`?")
    DEFINITIONS[definition.name] = definition
    _BY_OP[definition.op] = definition
    if definition.backward is not None:
        _BY_OP[definition.backward] = definition
    return definition


def lookup(target: object) -> Definition | None:
    """The definition whose forward or backward op `target` is, or None for anything outside the dialect."""
    return _BY_OP.get(target) if isinstance(target, OpOverload) else None


def nbytes(value: Any) -> int:
    """Bytes of all tensors in a nested value, by their logical sizes (symbolic sizes by their hints)."""
    if isinstance(value, torch.Tensor):
        return math.prod(size_hint(size) for size in value.shape) * value.element_size()
    if isinstance(value, list | tuple):
        return sum(nbytes(item) for item in value)
    return 0


def size_hint(size: int | torch.SymInt) -> int:
    """A size as a number: a symbolic one by its hint, or by what is expected of data (`expect_size`), 1 else.

    Never adds a guard, as int() would.
    """
    if isinstance(size, int):
        return size
    if size.node.has_hint():
        return int(size.node.hint)
    value = size.node.expr.subs(_EXPECTED.get(size.node.shape_env, {}))
    return int(value) if value.is_number else 1


def expect_size(size: Any, like: int | torch.SymInt) -> None:
    """Let costs count `size`, a symbol whose value is data, as a number of `like`."""
    _EXPECTED.setdefault(size.node.shape_env, {})[size.node.expr] = size_hint(like)


# By the shape environment that a symbol belongs to.
_EXPECTED: weakref.WeakKeyDictionary[Any, dict[sympy.Expr, int]] = weakref.WeakKeyDictionary()


def _bind_shape(op: str, argument: str, names: list[str], shape: Sequence[Any], sizes: dict[str, sympy.Expr]) -> None:
    sizes_of_argument = [_expression(size) for size in shape]
    if names and names[0] == "...":
        tail = len(names) - 1
        leading, sizes_of_argument = (
            sizes_of_argument[: len(sizes_of_argument) - tail],
            sizes_of_argument[len(sizes_of_argument) - tail :],
        )
        names, sizes_of_argument = ["N", *names[1:]], [sympy.Mul(*leading), *sizes_of_argument]
    if len(names) != len(sizes_of_argument):
        raise ValueError(f"moec::{op}: {argument} has shape {tuple(shape)}, expected dimensions {' '.join(names)}")
    for name, size in zip(names, sizes_of_argument, strict=True):
        if name == "_":
            continue
        if sizes.setdefault(name, size) != size:
            raise ValueError(f"moec::{op}: {argument} has {name}={size}, another argument has {name}={sizes[name]}")


def _expression(size: Any) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


def _evaluate(formula: str, sizes: Mapping[str, sympy.Expr]) -> sympy.Expr:
    expression, names, numbers = _parsed(formula)
    missing = sorted(set(names) - set(sizes))
    if missing:
        raise ValueError(f"the cost formula {formula!r} needs {', '.join(missing)}, which the call does not give")
    values = [sizes[name] for name in names]
    if all(value.is_number for value in values):
        value = numbers(*(int(v) if v.is_Integer else float(v) for v in values))
        return sympy.Integer(int(value)) if value == int(value) else sympy.Float(value)
    return expression.subs(dict(zip(map(sympy.Symbol, names), values, strict=True)))


@functools.cache
def _parsed(formula: str) -> tuple[sympy.Expr, tuple[str, ...], Callable[..., float]]:
    """The expression, the names in it, and a plain function of their numbers: a log asks for costs very often."""
    expression = sympy.parse_expr(formula, local_dict=_SYMBOLS)
    names = tuple(sorted(str(symbol) for symbol in expression.free_symbols))
    return expression, names, sympy.lambdify([sympy.Symbol(name) for name in names], expression, modules="math")


# Names that sympy would otherwise read as its own functions or constants.
_SYMBOLS = {name: sympy.Symbol(name) for name in ("N", "S", "E", "I", "Q", "O", "C")}
