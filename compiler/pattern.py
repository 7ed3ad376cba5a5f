"""A declarative matcher over fx graphs: patterns are trees, compared from a result towards its inputs.

    x, eps = var("x"), number("eps")
    square = op(aten("pow.Tensor_Scalar"), x, 2) | op(aten("mul.Tensor"), x, x)
    inverse = op(aten("rsqrt.default"), op(aten("add.Tensor"), op(aten("mean.dim"), square, dim(-1), True), eps))
    found = match(op(aten("mul.Tensor"), x, inverse, commutes=True), node)

1. Arguments are bound by the op's schema first, so positional, keyword and defaulted spellings are the same; an
   argument the pattern does not mention must have its default.
2. Where a node does not fit, casts that lose nothing (half to float32) and copies that change nothing are looked
   through; a narrowing cast is only accepted where a pattern says so.
3. A name that occurs twice must be the same node or the same number both times.
4. The values inside a match must not be used outside of it, since a rewrite would compute them twice.

A failed attempt keeps how far it got, and `Failure.reason` says what did not fit there: passes report it as the
reason of a near miss, and `explain` prints it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import fx

from moec.compiler._torch_compat import OpOverload
from moec.compiler.graph import module_path, source_line, tensor_meta

Targets = frozenset[Any]


def aten(*names: str) -> Targets:
    """The overloads of the given names, e.g. aten("add.Tensor", "add.Scalar"); every name must exist."""
    return frozenset(_overload(name) for name in names)


def _overload(name: str) -> OpOverload:
    packet, overload = name.rsplit(".", 1)
    found: OpOverload = getattr(getattr(torch.ops.aten, packet), overload)
    return found


CASTS = aten("to.dtype", "to.dtype_layout", "to.device", "_to_copy.default", "type_as.default")
COPIES = aten("alias.default", "contiguous.default", "clone.default", "lift_fresh_copy.default")
GETITEM: Targets = frozenset({operator.getitem})


class Pattern:
    """Base of all patterns; `a | b` tries a, then b."""

    def __or__(self, other: Pattern) -> Pattern:
        return _Either((*_options(self), *_options(other)))


@dataclass(frozen=True, eq=False)
class _Op(Pattern):
    targets: Targets
    args: tuple[Any, ...]
    name: str
    commutes: bool
    shared: bool
    where: Callable[[fx.Node], str] | None


@dataclass(frozen=True, eq=False)
class _Var(Pattern):
    name: str
    strip: bool
    where: Callable[[fx.Node], str] | None


@dataclass(frozen=True, eq=False)
class _Value(Pattern):
    """A Python argument; `accepts(value, node)` sees the node that has it as an argument."""

    name: str
    accepts: Callable[[Any, fx.Node], bool]
    text: str


@dataclass(frozen=True, eq=False)
class _Either(Pattern):
    options: tuple[Pattern, ...]


@dataclass(frozen=True, eq=False)
class _Items(Pattern):
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
    return _Op(targets, args, name, commutes, shared, where)


def var(name: str, *, strip: bool = True, where: Callable[[fx.Node], str] | None = None) -> Pattern:
    """Any node. strip: capture the node below lossless casts and copies; they are part of every dialect op."""
    return _Var(name, strip, where)


def number(name: str) -> Pattern:
    """A Python int or float."""
    return _Value(name, lambda value, _: isinstance(value, int | float) and not isinstance(value, bool), "a number")


def value(name: str = "") -> Pattern:
    """Any Python argument that is not a node, None and lists included."""
    return _Value(name, lambda given, _: not isinstance(given, fx.Node), "a constant")


def anything() -> Pattern:
    """Any argument at all, not captured."""
    return _Value("", lambda value, _: True, "anything")


def dim(index: int) -> Pattern:
    """One dimension, counted from either end, given as an int or as a list of one."""

    def accepts(given: Any, node: fx.Node) -> bool:
        given = given[0] if isinstance(given, list | tuple) and len(given) == 1 else given
        rank = rank_of(node.args[0])
        return isinstance(given, int) and (given == index or (rank is not None and given % rank == index % rank))

    return _Value("", accepts, f"dimension {index}")


def items(*patterns: Any) -> Pattern:
    """A list argument, element by element."""
    return _Items(patterns)


def item(source: Pattern, index: int, name: str = "") -> Pattern:
    """Result number `index` of an op with several results."""

    def other(node: fx.Node) -> str:
        return "" if node.args[1] == index else f"{describe(node)} is result {node.args[1]}, not {index}"

    return _Op(GETITEM, (source, index), name, False, True, other)


def cast(source: Pattern, name: str) -> Pattern:
    """A cast, captured as `name`, or nothing: for roundings that a rewrite has to reproduce."""
    return _Op(CASTS, (source, anything()), name, False, True, None) | source


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


def root_targets(pattern: Pattern) -> Targets:
    """The ops at which a match of `pattern` can be rooted, to try it only there."""
    return frozenset[Any]().union(*(option.targets for option in _options(pattern) if isinstance(option, _Op)))


def explain(pattern: Pattern, root: fx.Node) -> str:
    """Why `pattern` does not match at `root`, for debugging; 'matches' when it does."""
    found = match(pattern, root)
    if isinstance(found, Match):
        return f"{describe(root)} matches, with {dict(found.captures)}"
    seen = ", ".join(node.name for node in found.nodes) or "nothing"
    where = module_path(root) or "the unit's own forward"
    return f"{describe(root)} in {where}: {found.reason}; matched so far: {seen}"


def describe(node: fx.Node) -> str:
    """'mul_3 (aten.mul.Tensor, norm.py:12)', without the line where it is not known."""
    line = source_line(node).rsplit("/", 1)[-1]
    kind = node.op if node.op != "call_function" else target_name(node)
    return f"{node.name} ({kind}, {line})" if line else f"{node.name} ({kind})"


def target_name(node: fx.Node) -> str:
    """The op's name as people write it: aten.mul.Tensor, getitem."""
    return str(node.target) if isinstance(node.target, OpOverload) else getattr(node.target, "__name__", "?")


def bound_args(node: fx.Node) -> tuple[Any, ...]:
    """All arguments of a call in schema order, keywords placed and defaults filled in."""
    parameters = _parameters(node.target)
    if not parameters:
        return node.args
    given = node.args
    rest = (node.kwargs.get(name, default) for name, default in parameters[len(given) :])
    return (*given, *rest)


def source_of(node: fx.Node) -> fx.Node:
    """The first argument of a call, for ops whose first argument is a tensor."""
    source = node.args[0]
    assert isinstance(source, fx.Node), node.format_node()
    return source


def rank_of(argument: Any) -> int | None:
    """The number of dimensions of the tensor that a node, or the first node of a list, yields."""
    if isinstance(argument, list | tuple) and argument:
        argument = argument[0]
    tensor = tensor_meta(argument) if isinstance(argument, fx.Node) else None
    return None if tensor is None else tensor.dim()


def origin(node: fx.Node) -> fx.Node:
    """The node below all lossless casts and copies."""
    while True:
        below = looked_through(node)
        if below is None:
            return node
        node = below


def looked_through(node: fx.Node) -> fx.Node | None:
    """The input of a cast or copy that keeps every value exactly, else None.

    Half precision to float32 counts, since every dialect op computes in float32 at least; float32 to float64 does
    not, because an op given the float32 value would compute in less than the model does.
    """
    if node.op != "call_function" or node.target not in CASTS | COPIES:
        return None
    source = source_of(node)
    if node.target in COPIES:
        return source
    after, before = tensor_meta(node), tensor_meta(source)
    if after is None or before is None:
        return None
    same = after.dtype == before.dtype
    widened = after.dtype == torch.float32 and before.dtype in (torch.float16, torch.bfloat16)
    return source if same or widened else None


def used_outside(nodes: Iterable[fx.Node], inside: Container[fx.Node]) -> fx.Node | None:
    """The first of `nodes` that a node outside of `inside` uses; dead code is no use."""
    for node in nodes:
        for user in node.users:
            if user not in inside and (user.users or user.is_impure()):
                return node
    return None


def _options(pattern: Pattern) -> tuple[Pattern, ...]:
    return pattern.options if isinstance(pattern, _Either) else (pattern,)


@cache
def _parameters(target: Any) -> tuple[tuple[str, Any], ...]:
    if not isinstance(target, OpOverload):
        return ()
    return tuple((argument.name, argument.default_value) for argument in target._schema.arguments)


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
            case _Either():
                for option in pattern.options:
                    yield from self.compare(option, found, parent, state)
            case _Op():
                yield from self._compare_op(pattern, found, state)
            case _Var():
                yield from self._compare_var(pattern, found, parent, state)
            case _Items():
                if isinstance(found, list | tuple) and len(found) == len(pattern.patterns):
                    yield from self._compare_args(pattern.patterns, tuple(found), parent, state)
                else:
                    self.fail(
                        state, lambda: f"{describe(parent)} has {_text(found)}, not {len(pattern.patterns)} items"
                    )
            case _Value():
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

    def _compare_op(self, pattern: _Op, found: Any, state: _State) -> Iterator[_State]:
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

    def _compare_call(self, pattern: _Op, node: fx.Node, state: _State) -> Iterator[_State]:
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
            wanted = (*wanted, *(default for _, default in _parameters(node.target)[len(wanted) :]))
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

    def _compare_var(self, pattern: _Var, found: Any, parent: fx.Node, state: _State) -> Iterator[_State]:
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
