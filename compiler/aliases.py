"""Which nodes may share memory, and which of them are written in place."""

from __future__ import annotations

import operator

from torch import fx

from moec.compiler._torch_compat import OpOverload
from moec.compiler.nodes import source_of


def is_mutation(node: fx.Node) -> bool:
    """Whether a call writes into its first argument."""
    return bool(
        isinstance(node.target, OpOverload)
        and node.target._schema.arguments
        and (alias := node.target._schema.arguments[0].alias_info) is not None
        and alias.is_write
    )


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The values that a call writes in place, whichever of its arguments they are."""
    if not isinstance(node.target, OpOverload):
        return []
    arguments = node.target._schema.arguments
    given = dict(zip((argument.name for argument in arguments), node.args, strict=False)) | node.kwargs
    written = [given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    found: list[fx.Node] = []
    fx.map_arg(written, found.append)
    return found


class Aliases:
    """Which nodes may share memory: the node each view chain starts from, and everything taken of it."""

    def __init__(self, graph: fx.Graph) -> None:
        self._roots: dict[fx.Node, fx.Node] = {}
        self._members: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            source = shares_memory_with(node)
            root = self._roots.get(source, source) if source is not None else node
            self._roots[node] = root
            self._members.setdefault(root, []).append(node)

    def root(self, node: object) -> fx.Node:
        assert isinstance(node, fx.Node)
        return self._roots.get(node, node)

    def members(self, node: fx.Node) -> list[fx.Node]:
        """All nodes that may share memory with `node`, in graph order."""
        return self._members.get(self.root(node), [node])

    def split(self, node: fx.Node, mutation: fx.Node, result: fx.Node) -> None:
        """From `mutation` on, what shared memory with `node` shares it with `result` instead."""
        members = self.members(node)
        later = [member for member in members if member > mutation]
        self._members[self.root(node)] = [member for member in members if member < mutation]
        self._members[result] = [result, *later]
        self._roots |= dict.fromkeys(later, result) | {result: result}


def last_writes(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For every node that may share memory with something written in place: the last op that writes there."""
    mutations = [node for node in graph.nodes if node.op == "call_function" and is_mutation(node)]
    if not mutations:
        return {}
    aliases = Aliases(graph)
    return {member: node for node in mutations for member in aliases.members(source_of(node))}


def shares_memory_with(node: fx.Node) -> fx.Node | None:
    """The node whose memory a view, an in-place op or a part of a split may share."""
    if node.op != "call_function" or not node.args:
        return None
    first = node.args[0]
    if node.target is operator.getitem:
        return first if isinstance(first, fx.Node) and shares_memory_with(first) is not None else None
    if not isinstance(node.target, OpOverload) or not isinstance(first, fx.Node):
        return None
    returns = node.target._schema.returns
    arguments = node.target._schema.arguments
    aliased = bool(returns) and bool(arguments) and arguments[0].alias_info is not None
    return first if aliased else None
