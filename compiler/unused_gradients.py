"""Gradients that nothing uses are not asked for: the `needed` flags of backward ops, from their users.

Autograd asks for what requires a gradient. What is dropped afterwards, because nothing needs it after all, would still
be computed by the op that makes several gradients at once.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from moec.compiler.dialect._define import NEEDED, asked_for
from moec.compiler.dialect.registry import Definition, lookup
from moec.compiler.nodes import bound_args, parameters_of


def ask_for_used_gradients(graph: fx.Graph) -> int:
    """Ask every backward op of the dialect for the gradients that are used; returns how many are no longer made."""
    dropped = 0
    for node in graph.nodes:
        definition = lookup(node.target)
        if definition is not None and node.target is definition.backward and NEEDED in _names(node):
            dropped += _ask(node, definition)
    return dropped


def leave_to_backward(graph: fx.Graph) -> None:
    """Take away the arguments that ops take for their backward alone: a differentiated graph gives them to it."""
    for node in graph.nodes:
        definition = lookup(node.target)
        if definition is not None and node.target is definition.op and definition.for_backward:
            arguments = zip(_names(node), bound_args(node), strict=True)
            node.args = tuple(None if name in definition.for_backward else value for name, value in arguments)
            node.kwargs = {}


def _ask(node: fx.Node, definition: Definition) -> int:
    arguments = dict(zip(_names(node), bound_args(node), strict=True))
    gradients = [result.name.removeprefix("grad_") for result in node.target._schema.returns]  # type: ignore[union-attr]
    before = asked_for(arguments.pop(NEEDED), len(gradients))
    used = {user.args[1] for user in node.users}
    # The gradient of an argument that is absent is empty already.
    absent = {name for name, value in arguments.items() if value is None and name not in definition.only_for}
    after = [
        flag and (index in used or name in absent)
        for index, (name, flag) in enumerate(zip(gradients, before, strict=True))
    ]
    if list(before) == after:
        return 0
    made = {name for name, flag in zip(gradients, after, strict=True) if flag and name not in absent}
    unread = {name for name, readers in definition.only_for.items() if not made & set(readers)}
    node.args = (*(None if name in unread else value for name, value in arguments.items()), after)
    node.kwargs = {}
    node.meta["val"] = tuple(v if flag else _nothing(v) for v, flag in zip(node.meta["val"], after, strict=True))
    return sum(before) - sum(after)


def _names(node: fx.Node) -> list[str]:
    return [name for name, _ in parameters_of(node.target)]


def _nothing(value: Any) -> Any:
    return value.new_empty(0) if isinstance(value, Tensor) else []
