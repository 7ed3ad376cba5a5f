"""Comparing a pattern with a graph, from a result towards its inputs.

1. Arguments are bound by the op's schema first, so positional, keyword and defaulted spellings are the same.
2. Where a node does not fit, casts that lose nothing (half to float32) and copies that change nothing are looked
   through; a narrowing cast is only accepted where a pattern says so.
3. The values inside a match must not be used outside of it, since a rewrite would compute them twice.

A failed attempt keeps how far it got, and `Failure.reason` says what did not fit there: passes report it as the
reason of a near miss, and `explain` prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx

from moec.compiler._torch_compat import OpOverload
from moec.compiler.graph import module_path
from moec.compiler.nodes import (
    CASTS,
    Targets,
    bound_args,
    describe,
    looked_through,
    origin,
    parameters_of,
    used_outside,
)
from moec.compiler.pattern import Either, Items, OpPattern, Pattern, ValuePattern, VarPattern


@dataclass
class Match:
    """What a pattern found: captured values by name, and the nodes that a rewrite makes superfluous, root first."""

    root: fx.Node
    captures: Mapping[str, Any]
    nodes: tuple[fx.Node, ...]
    crossed: tuple[fx.Node, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.captures[name]

    def __contains__(self, name: str) -> bool:
        return name in self.captures

    def get(self, name: str, default: Any = None) -> Any:
        return self.captures.get(name, default)


@dataclass
class Failure:
    """The furthest that an attempt got: the nodes that did fit, and what did not.

    complete: the whole pattern fitted, and the rewrite refused.
    """

    nodes: tuple[fx.Node, ...] = ()
    describe: Callable[[], str] = field(default=lambda: "the op at the root differs")

    complete: bool = False

    @property
    def reason(self) -> str:
        return self.describe()

    @property
    def reach(self) -> tuple[bool, int]:
        """Orders attempts by how far they got."""
        return self.complete, len(set(self.nodes))


def match(pattern: Pattern, root: fx.Node, outputs: tuple[str, ...] = (), *, exclusive: bool = True) -> Match | Failure:
    """Compare `pattern` with the graph that ends in `root`.

    outputs: names of captured nodes that the rewrite replaces too, and that may therefore be used anywhere.
    exclusive: False to only look, without asking who else uses the values inside.
    """
    search = _Search()
    for state in search.compare(pattern, root, root, _EMPTY):
        replaced = {root, *(state.captures[name] for name in outputs if name in state.captures)}
        outside = _used_outside(state, replaced) if exclusive else None
        if outside is None:
            inner = tuple(dict.fromkeys(node for node, _ in state.nodes))
            return Match(root, state.captures, inner, state.crossed)
        search.fail(state, partial(_outside_text, outside))
    return search.failure


def explain(pattern: Pattern, root: fx.Node) -> str:
    """Why `pattern` does not match at `root`, for debugging; 'matches' when it does."""
    found = match(pattern, root)
    if isinstance(found, Match):
        return f"{describe(root)} matches, with {dict(found.captures)}"
    seen = ", ".join(node.name for node in found.nodes) or "nothing"
    where = module_path(root) or "the unit's own forward"
    return f"{describe(root)} in {where}: {found.reason}; matched so far: {seen}"


@dataclass(frozen=True)
class _State:
    captures: Mapping[str, Any]
    nodes: tuple[tuple[fx.Node, bool], ...]  # with whether the node may be shared
    crossed: tuple[fx.Node, ...]

    def capture(self, name: str, found: Any) -> _State | None:
        """This state with one more name, or None when the name already stands for something else."""
        if not name:
            return self
        if name in self.captures:
            known = self.captures[name]
            same = known is found if isinstance(found, fx.Node) or isinstance(known, fx.Node) else known == found
            return self if same else None
        return _State({**self.captures, name: found}, self.nodes, self.crossed)

    def visit(self, node: fx.Node, shared: bool) -> _State:
        return _State(self.captures, (*self.nodes, (node, shared)), self.crossed)

    def cross(self, node: fx.Node) -> _State:
        return _State(self.captures, self.nodes, (*self.crossed, node))


_EMPTY = _State({}, (), ())


class _Search:
    """One attempt: depth-first over alternatives and argument orders, remembering the furthest failure."""

    def __init__(self) -> None:
        self.failure = Failure()
        self._expected: tuple[Any, Targets] = (None, frozenset())

    def fail(self, state: _State, reason: Callable[[], str]) -> None:
        if len(state.nodes) >= len(self.failure.nodes):
            self.failure = Failure(tuple(node for node, _ in state.nodes), reason)
            self._expected = (None, frozenset())

    def fail_op(self, state: _State, targets: Targets, found: Any) -> None:
        """Another op stands there; alternatives that fail at the same node are told together."""
        if len(state.nodes) < len(self.failure.nodes):
            return
        node, others = self._expected
        if node is found and len(state.nodes) == len(self.failure.nodes):
            targets = targets | others
        self.fail(state, lambda: f"expected {_names(targets)}, found {_text(found)}")
        self._expected = (found, targets)

    def compare(self, pattern: Any, found: Any, parent: fx.Node, state: _State) -> Iterator[_State]:
        """All ways in which `found`, an argument of `parent`, fits `pattern`."""
        match pattern:
            case Either():
                for option in pattern.options:
                    yield from self.compare(option, found, parent, state)
            case OpPattern():
                yield from self._compare_op(pattern, found, state)
            case VarPattern():
                yield from self._compare_var(pattern, found, parent, state)
            case Items():
                if isinstance(found, list | tuple) and len(found) == len(pattern.patterns):
                    yield from self._compare_args(pattern.patterns, tuple(found), parent, state)
                else:
                    self.fail(
                        state, lambda: f"{describe(parent)} has {_text(found)}, not {len(pattern.patterns)} items"
                    )
            case ValuePattern():
                after = state.capture(pattern.name, found) if pattern.accepts(found, parent) else None
                if after is not None:
                    yield after
                else:
                    self.fail(state, lambda: f"{describe(parent)} has {_text(found)} instead of {pattern.text}")
            case _:
                if type(found) is not fx.Node and pattern == found:
                    yield state
                else:
                    self.fail(state, lambda: f"{describe(parent)} has {_text(found)} instead of {pattern!r}")

    def _compare_op(self, pattern: OpPattern, found: Any, state: _State) -> Iterator[_State]:
        node, crossed = found, state
        while isinstance(node, fx.Node):
            if node.op == "call_function" and node.target in pattern.targets:
                yield from self._compare_call(pattern, node, crossed)
            below = looked_through(node)
            if below is None:
                break
            node, crossed = below, crossed.cross(node)
        if not (isinstance(node, fx.Node) and node.op == "call_function" and node.target in pattern.targets):
            self.fail_op(state, pattern.targets, node)

    def _compare_call(self, pattern: OpPattern, node: fx.Node, state: _State) -> Iterator[_State]:
        reason = pattern.where(node) if pattern.where is not None else ""
        after = state.capture(pattern.name, node)
        if reason or after is None:
            seen = state.visit(node, pattern.shared)
            self.fail(seen, lambda: reason or f"{describe(node)} is not the same {pattern.name} as elsewhere")
            return
        after = after.visit(node, pattern.shared)
        given = bound_args(node)
        wanted = pattern.args
        if len(wanted) < len(given):
            wanted = (*wanted, *(default for _, default in parameters_of(node.target)[len(wanted) :]))
        yield from self._compare_args(wanted, given, node, after)
        if pattern.commutes:
            yield from self._compare_args(wanted, (given[1], given[0], *given[2:]), node, after)

    def _compare_args(
        self, wanted: tuple[Any, ...], given: tuple[Any, ...], parent: fx.Node, state: _State
    ) -> Iterator[_State]:
        if not wanted:
            yield state
            return
        if not given:
            self.fail(state, lambda: f"{describe(parent)} has too few arguments")
            return
        for after in self.compare(wanted[0], given[0], parent, state):
            yield from self._compare_args(wanted[1:], given[1:], parent, after)

    def _compare_var(self, pattern: VarPattern, found: Any, parent: fx.Node, state: _State) -> Iterator[_State]:
        if not isinstance(found, fx.Node):
            self.fail(state, lambda: f"{describe(parent)} has {_text(found)} instead of a tensor")
            return
        node = origin(found) if pattern.strip else found
        reason = pattern.where(node) if pattern.where is not None else ""
        after = state.capture(pattern.name, node)
        if reason or after is None:
            other = state.captures.get(pattern.name)
            self.fail(state, lambda: reason or f"{describe(parent)} takes {_text(node)} instead of {_text(other)}")
            return
        yield after


def _used_outside(state: _State, replaced: set[fx.Node]) -> fx.Node | None:
    """The first inner node, outputs aside, that something outside the match uses."""
    inside = {node for node, _ in state.nodes} | set(state.crossed)
    return used_outside((node for node, shared in state.nodes if not shared and node not in replaced), inside)


def _outside_text(node: fx.Node) -> str:
    return f"{describe(node)} is used outside the pattern too"


def _names(targets: Targets) -> str:
    """Names of the ops, the ones that a pattern is about rather than its optional casts, four at most."""
    names = [str(t) if isinstance(t, OpOverload) else t.__name__ for t in (targets - CASTS or targets)]
    shown = sorted(names)[:4] + ["..."] * (len(names) > 4)
    return shown[0] if len(shown) == 1 else f"one of {', '.join(shown)}"


def _text(found: Any) -> str:
    return describe(found) if isinstance(found, fx.Node) else repr(found)
