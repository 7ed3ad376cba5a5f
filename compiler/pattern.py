"""The language of patterns: trees of ops, compared from a result towards its inputs (`matching.py`).

    x, eps = var("x"), number("eps")
    square = op(aten("pow.Tensor_Scalar"), x, 2) | op(aten("mul.Tensor"), x, x)
    inverse = op(aten("rsqrt.default"), op(aten("add.Tensor"), op(aten("mean.dim"), square, dim(-1), True), eps))
    found = match(op(aten("mul.Tensor"), x, inverse, commutes=True), node)

An argument that a pattern does not mention must have its default. A name that occurs twice must be the same node or
the same number both times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from moec.compiler.nodes import CASTS, GETITEM, Targets, describe, rank_of


class Pattern:
    """Base of all patterns; `a | b` tries a, then b."""

    def __or__(self, other: Pattern) -> Pattern:
        return Either((*_options(self), *_options(other)))


@dataclass(frozen=True, eq=False)
class OpPattern(Pattern):
    """A call; see `op`."""

    targets: Targets
    args: tuple[Any, ...]
    name: str
    commutes: bool
    shared: bool
    where: Callable[[fx.Node], str] | None


@dataclass(frozen=True, eq=False)
class VarPattern(Pattern):
    """Any node; see `var`."""

    name: str
    strip: bool
    where: Callable[[fx.Node], str] | None


@dataclass(frozen=True, eq=False)
class ValuePattern(Pattern):
    """A Python argument; `accepts(value, node)` sees the node that has it as an argument."""

    name: str
    accepts: Callable[[Any, fx.Node], bool]
    text: str


@dataclass(frozen=True, eq=False)
class Either(Pattern):
    """Alternatives, tried in order."""

    options: tuple[Pattern, ...]


@dataclass(frozen=True, eq=False)
class Items(Pattern):
    """A list argument whose elements match in order."""

    patterns: tuple[Any, ...]


def op(
    targets: Targets,
    *args: Any,
    name: str = "",
    commutes: bool = False,
    shared: bool = False,
    where: Callable[[fx.Node], str] | None = None,
) -> Pattern:
    """A call of one of `targets`; `args` are patterns or constants for the schema's arguments, in order.

    name: capture the node. commutes: the first two arguments may come in either order. shared: the node may be used
    outside the match (for views and other free ops). where: '' when the node is acceptable, else the reason.
    """
    return OpPattern(targets, args, name, commutes, shared, where)


def var(name: str, *, strip: bool = True, where: Callable[[fx.Node], str] | None = None) -> Pattern:
    """Any node. strip: capture the node below lossless casts and copies; they are part of every dialect op."""
    return VarPattern(name, strip, where)


def number(name: str) -> Pattern:
    """A Python int or float."""
    return ValuePattern(
        name, lambda value, _: isinstance(value, int | float) and not isinstance(value, bool), "a number"
    )


def value(name: str = "") -> Pattern:
    """Any Python argument that is not a node, None and lists included."""
    return ValuePattern(name, lambda given, _: not isinstance(given, fx.Node), "a constant")


def anything() -> Pattern:
    """Any argument at all, not captured."""
    return ValuePattern("", lambda value, _: True, "anything")


def dim(index: int) -> Pattern:
    """One dimension, counted from either end, given as an int or as a list of one."""

    def accepts(given: Any, node: fx.Node) -> bool:
        given = given[0] if isinstance(given, list | tuple) and len(given) == 1 else given
        rank = rank_of(node.args[0])
        return isinstance(given, int) and (given == index or (rank is not None and given % rank == index % rank))

    return ValuePattern("", accepts, f"dimension {index}")


def items(*patterns: Any) -> Pattern:
    """A list argument, element by element."""
    return Items(patterns)


def item(source: Pattern, index: int, name: str = "") -> Pattern:
    """Result number `index` of an op with several results."""

    def other(node: fx.Node) -> str:
        return "" if node.args[1] == index else f"{describe(node)} is result {node.args[1]}, not {index}"

    return OpPattern(GETITEM, (source, index), name, False, True, other)


def cast(source: Pattern, name: str) -> Pattern:
    """A cast, captured as `name`, or nothing: for roundings that a rewrite has to reproduce."""
    return OpPattern(CASTS, (source, anything()), name, False, True, None) | source


def root_targets(pattern: Pattern) -> Targets:
    """The ops at which a match of `pattern` can be rooted, to try it only there."""
    return frozenset[Any]().union(*(option.targets for option in _options(pattern) if isinstance(option, OpPattern)))


def _options(pattern: Pattern) -> tuple[Pattern, ...]:
    return pattern.options if isinstance(pattern, Either) else (pattern,)
