"""Rewriting by rules: the loop over a graph that every recognising pass uses, and the edit of one match.

A pass lists its `Rule`s, most specific first, and its `Sign`s: small patterns that show that something of the kind
was meant. `apply_rules` walks the graph once from the results to the inputs, so that larger patterns are tried
before the parts they contain; every sign that is left afterwards becomes a near miss, with the reason why the rule
that got furthest from there did not apply.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from moec.compiler._torch_compat import FakeTensor, FakeTensorMode, OpOverload
from moec.compiler.aliases import last_writes
from moec.compiler.graph import Unit, module_path, tensor_meta
from moec.compiler.matching import Failure, Match, match
from moec.compiler.nodes import Targets, describe
from moec.compiler.pass_manager import Report
from moec.compiler.pattern import Pattern, root_targets


class Refused(Exception):
    """Raised by a rewrite that finds a match not to be equivalent after all; the text is the near miss's reason."""


@dataclass(frozen=True)
class Rule:
    """A pattern and its rewrite, which returns what the match became, for the report, or raises Refused.

    outputs: captured nodes that are results too, beside the root, and may be used anywhere.
    """

    what: str
    pattern: Pattern
    rewrite: Callable[[Match, Rewriter], str]
    outputs: tuple[str, ...] = ()

    @property
    def targets(self) -> Targets:
        return root_targets(self.pattern)

    def find(self, root: fx.Node) -> Match | Failure:
        return match(self.pattern, root, self.outputs)


@dataclass(frozen=True)
class Finder:
    """A rule whose pattern has no fixed size, e.g. a sum over taps: `find` looks at each node that is in `targets`."""

    what: str
    targets: Targets
    find: Callable[[fx.Node], Match | Failure]
    rewrite: Callable[[Match, Rewriter], str]


@dataclass(frozen=True)
class Sign:
    """A pattern that shows that `what` was meant; `otherwise` is the reason given when no rule came near it."""

    what: str
    pattern: Pattern
    otherwise: str


# By what a rule is for, and a node that an attempt of it reached: the attempt that reached the furthest.
Failures = dict[tuple[str, fx.Node], Failure]


@dataclass
class Rewriter:
    """Inserts the replacement of one match, with the metadata of what it replaces.

    documents: inputs of the graph that are document ids, and never fall along a row.

    Until `commit` nothing that was in the graph before is touched: a rewrite that is refused half-way leaves it whole.
    """

    graph: fx.Graph
    nodes: Sequence[fx.Node]
    root: fx.Node
    documents: Collection[fx.Node] = ()
    created: list[fx.Node] = field(default_factory=list)
    replacements: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)
    afterwards: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._before = self.root
        self._meta = _shared_meta(self.root, self.nodes)

    def after_inputs(self, inputs: Iterable[fx.Node], outputs: Iterable[fx.Node]) -> None:
        """Insert as soon as all `inputs` and the first matched node are there: an output may be used before the root.

        Raises Refused when some output is used before the last input is computed.
        """
        last = max(inputs)
        inside = set(self.nodes)
        for output in outputs:
            for user in output.users:
                if user not in inside and user < last:
                    raise Refused(f"{describe(output)} is used before {describe(last)} is computed")
        first = min(self.nodes)
        self._before = first if last < first else last.next

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new call, with `meta["val"]` computed by running it on the fake values of its arguments."""
        with self.graph.inserting_before(self._before):
            node = self.graph.create_node("call_function", target, args, kwargs, name=_value_name(target))
        node.meta.update(self._meta)
        node.meta["val"] = fake_result(node)
        self.created.append(node)
        return node

    def results(self, target: Any, *args: Any, count: int) -> tuple[fx.Node, ...]:
        """The `count` results of an op that returns a tuple."""
        node = self.call(target, *args)
        return tuple(self.call(operator.getitem, node, index) for index in range(count))

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """When all is done, let all users of `old` use `new`, rounded to the dtype of `old` if that is narrower.

        Raises Refused when the shapes differ, or `new` is the narrower one.
        """
        before, after = tensor_meta(old), tensor_meta(new)
        if before is not None and after is not None:
            if _narrower(before.dtype, after.dtype):
                new = self.call(torch.ops.aten.to.dtype, new, before.dtype)
            elif before.dtype != after.dtype:
                raise Refused(f"the result is {_short(before.dtype)}, the op would give {_short(after.dtype)}")
            if before.dim() != after.dim() or any(a != b for a, b in zip(before.shape, after.shape, strict=True)):
                raise Refused(f"the result has shape {list(before.shape)}, the op would give {list(after.shape)}")
        self.replacements.append((old, new))

    def then(self, action: Callable[[], None]) -> None:
        """Do something to the graph once the replacements are made, such as folding what is around them."""
        self.afterwards.append(action)

    def commit(self) -> None:
        """Make the replacements, then do what is to follow them."""
        for old, new in self.replacements:
            old.replace_all_uses_with(new)
        for action in self.afterwards:
            action()

    def drop_created(self) -> None:
        """Take back what a refused rewrite has inserted."""
        for node in reversed(self.created):
            self.graph.erase_node(node)


def apply_rules(
    unit: Unit,
    rules: Sequence[Rule | Finder],
    report: Report,
    signs: Sequence[Sign] = (),
    documents: Collection[fx.Node] = (),
) -> None:
    """Rewrite `unit.graph` by `rules` and fill `report`; `documents` is for the rewriters."""
    table: dict[Any, list[Rule | Finder]] = {}
    for rule in rules:
        for target in rule.targets:
            table.setdefault(target, []).append(rule)
    failures: Failures = {}
    gone: set[fx.Node] = set()
    written = last_writes(unit.graph)
    found_backwards = Report()
    for node in list(unit.graph.nodes)[::-1]:
        if node in gone or node.op != "call_function":
            continue
        for rule in table.get(node.target, ()):
            found = _unless_written(rule.find(node), written)
            failure = (
                rewrite_match(unit.graph, rule, found, found_backwards, documents, gone)
                if isinstance(found, Match)
                else found
            )
            if failure is None:
                break
            for seen in failure.nodes:
                known = failures.get((rule.what, seen))
                if known is None or known.reach <= failure.reach:
                    failures[rule.what, seen] = failure
    report.matches += reversed(found_backwards.matches)
    report_signs(unit.graph, signs, report, failures)


def _unless_written(found: Match | Failure, written: Mapping[fx.Node, fx.Node]) -> Match | Failure:
    """A rewrite reads its inputs later than the graph does, so nothing may write into them from there on."""
    if isinstance(found, Failure) or not written:
        return found
    first = min(found.nodes)
    for node in found.nodes:
        for source in (node, *node.all_input_nodes):
            if source in written and written[source] > first:
                return Failure(found.nodes, partial(_written_text, source), complete=True)
    return found


def _written_text(node: fx.Node) -> str:
    return f"{describe(node)} is written in place later"


def rewrite_match(
    graph: fx.Graph,
    rule: Rule | Finder,
    found: Match,
    report: Report,
    documents: Collection[fx.Node] = (),
    gone: set[fx.Node] | None = None,
) -> Failure | None:
    """Rewrite one match and report it; the failure when the rewrite refuses. `gone` collects the erased nodes."""
    rewriter = Rewriter(graph, found.nodes, found.root, documents)
    try:
        became = rule.rewrite(found, rewriter)
    except Refused as refused:
        rewriter.drop_created()
        reason = str(refused)
        return Failure(found.nodes, lambda: reason, complete=True)
    rewriter.commit()
    report.match(rewriter.created[-1] if rewriter.created else found.root, became)
    # Matched nodes go even if they count as impure, as a dropout of probability 0 does.
    erased: set[fx.Node] = set()
    for node in sorted({*found.nodes, *(old for old, _ in rewriter.replacements)}, reverse=True):
        if node not in erased and not node.users:
            inputs = node.all_input_nodes
            graph.erase_node(node)
            erased |= {node} | erase_dead(graph, inputs)
    erased |= erase_dead(graph, [node for node in rewriter.created if node not in erased])
    if gone is not None:
        gone |= erased
    return None


def report_signs(graph: fx.Graph, signs: Sequence[Sign], report: Report, failures: Failures) -> None:
    """A near miss for every place where a sign still matches, one per node."""
    table: dict[Any, list[Sign]] = {}
    for sign in signs:
        for target in root_targets(sign.pattern):
            table.setdefault(target, []).append(sign)
    for node in graph.nodes:
        for sign in table.get(node.target, ()) if node.op == "call_function" else ():
            if isinstance(match(sign.pattern, node, exclusive=False), Match):
                failure = failures.get((sign.what, node))
                report.near_miss(node, sign.what, failure.reason if failure else sign.otherwise)
                break


def erase_dead(graph: fx.Graph, start: Iterable[fx.Node]) -> set[fx.Node]:
    """Erase the nodes of `start` that nothing uses, and whatever only they used; returns the erased nodes."""
    erased: set[fx.Node] = set()
    waiting = list(start)
    while waiting:
        node = waiting.pop()
        if node in erased or node.users or node.op in ("placeholder", "output") or node.is_impure():
            continue
        waiting += node.all_input_nodes
        graph.erase_node(node)
        erased.add(node)
    return erased


def fake_result(node: fx.Node) -> Any:
    """What the call yields on the fake values of its arguments; None where those are not known."""
    known = True

    def of(argument: fx.Node) -> Any:
        nonlocal known
        known = known and "val" in argument.meta
        return argument.meta.get("val")

    args, kwargs = fx.map_arg((node.args, node.kwargs), of)
    mode = _fake_mode((args, kwargs))
    if not known or mode is None:
        return None
    with torch.no_grad(), mode:
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _fake_mode(values: Any) -> FakeTensorMode | None:
    for leaf in torch.utils._pytree.tree_leaves(values):
        if isinstance(leaf, FakeTensor):
            return leaf.fake_mode
    return None


def _shared_meta(root: fx.Node, nodes: Sequence[fx.Node]) -> dict[str, Any]:
    """The root's metadata, moved up to the innermost module that holds all matched nodes."""
    paths = [path.split(".") for path in map(module_path, [root, *nodes]) if path]
    path = ".".join(_shared_prefix(paths))
    meta: dict[str, Any] = {}
    if "stack_trace" in root.meta:
        meta["stack_trace"] = root.meta["stack_trace"]
    if root.meta.get("custom"):
        custom = dict(root.meta["custom"])
        meta["custom"] = custom | {"path": path} if "path" in custom else custom
    for key in ("nn_module_stack", "fwd_nn_module_stack"):
        stacks = [list(node.meta[key].items()) for node in [root, *nodes] if node.meta.get(key)]
        if key in root.meta and stacks:
            meta[key] = dict(_shared_prefix(stacks)) or root.meta[key]
    return meta


def _shared_prefix(rows: Sequence[list[Any]]) -> list[Any]:
    shared = rows[0] if rows else []
    for row in rows[1:]:
        equal = 0
        while equal < min(len(shared), len(row)) and shared[equal] == row[equal]:
            equal += 1
        shared = shared[:equal]
    return shared


def _narrower(wanted: torch.dtype, given: torch.dtype) -> bool:
    floats = wanted.is_floating_point and given.is_floating_point
    return floats and wanted != given and torch.promote_types(wanted, given) == given


def _value_name(target: Any) -> str:
    """aten.add.Tensor -> 'add', so that the values of a rewritten graph are named like those of a traced one."""
    return target._schema.name.split("::")[-1] if isinstance(target, OpOverload) else target.__name__


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
