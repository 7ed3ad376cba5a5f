"""Which lengths a graph with a symbolic length takes, by what was assumed of its sizes while it was traced.

A trace is made at the plan's longest length. Each branch on a size that it went through, and each size that it took to
be other than 1, is a condition on the length; below the largest length that breaks one, the graph is not right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import sympy
import torch
from torch import Tensor, fx

from moec.compiler._torch_compat import ShapeEnv, pytree
from moec.compiler.errors import LengthError
from moec.compiler.plan import Plan

# Conditions of real layers compare with small numbers, or hold for certain multiples: both show within this distance.
_SCANNED = 4096


def length_range(graph: fx.Graph, shortest: int, longest: int) -> tuple[int, str]:
    """The least length from which on, up to `longest`, the conditions of a graph hold, and the one that ends it.

    shortest: where to stop looking. A graph in which no size is a symbol has no conditions.
    """
    length = sympy.Symbol("length", integer=True, positive=True)
    found, reason = shortest, ""
    for condition in _conditions(graph, length):
        if condition == sympy.true:
            continue
        for candidate in _candidates(found, longest):
            if condition.xreplace({length: sympy.Integer(candidate)}) == sympy.false:
                found, reason = candidate + 1, _text(condition)
                break
    return found, reason


def has_symbols(graph: fx.Graph) -> bool:
    """Whether any size in the graph depends on the length."""
    return any(isinstance(size, torch.SymInt) for node in graph.nodes for size in _sizes(node))


def not_every_length(plan: Plan, shortest: int, reasons: Sequence[tuple[str, str]]) -> LengthError:
    """The error for a plan whose lengths one graph does not take all.

    reasons: what takes fewer, and the condition with which it was traced.
    """
    taken = f"lengths from {shortest} to {plan.length}" if shortest < plan.length else f"length {plan.length} alone"
    dropped = "compile with a fixed length (dynamic: null)"
    return LengthError(
        f"one graph does not take every length from {plan.shortest} to {plan.length}: it takes {taken}",
        shortest,
        where="plan.min_length",
        why="; ".join(f"{what} was traced with {reason}" for what, reason in reasons),
        hint=f"set min_length: {shortest}, or {dropped}" if shortest < plan.length else dropped,
    )


def _candidates(shortest: int, longest: int) -> Iterator[int]:
    """Downwards, without those that are far from both ends."""
    yield from range(longest, max(shortest, longest - _SCANNED) - 1, -1)
    yield from range(min(longest - _SCANNED - 1, shortest + _SCANNED), shortest - 1, -1)


def _conditions(graph: fx.Graph, length: sympy.Symbol) -> Iterator[sympy.Basic]:
    for environment in _environments(graph):
        for symbol, allowed in environment.var_to_range.items():
            if not _is_data(symbol):
                yield sympy.Ge(length, allowed.lower)
        for guard in environment.guards:
            if not any(map(_is_data, guard.expr.free_symbols)):
                yield guard.expr.xreplace(dict.fromkeys(guard.expr.free_symbols, length))


def _environments(graph: fx.Graph) -> Iterable[ShapeEnv]:
    found = (size.node.shape_env for node in graph.nodes for size in _sizes(node) if isinstance(size, torch.SymInt))
    return {id(environment): environment for environment in found}.values()


def _sizes(node: fx.Node) -> Iterator[int | torch.SymInt]:
    for value in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(value, Tensor):
            yield from value.shape


def _text(condition: sympy.Basic) -> str:
    if isinstance(condition, sympy.Eq | sympy.Ne):
        return f"{condition.lhs} {'==' if isinstance(condition, sympy.Eq) else '!='} {condition.rhs}"
    return str(condition)


def _is_data(symbol: sympy.Basic) -> bool:
    """Whether a symbol stands for a number of rows that data decide, not for the length."""
    return str(symbol).startswith("u")
