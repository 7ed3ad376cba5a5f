"""Gradient modes of an exported graph: what runs under `no_grad` comes inline, and its results are detached.

torch.export hides such code in calls of `wrap_with_set_grad_enabled`, an op without a schema: whoever looks for writes
into buffers, or removes what is not used, would miss everything inside.

1. Each sub-graph is copied in the place of its call.
2. A value computed without gradient is detached where something computed with gradient uses it.
3. What a write under no_grad puts into a value from outside, such as a running mean, is detached.
4. A write under no_grad into a value that carries a gradient is refused: autograd goes on as if nothing were written,
   which a graph of values cannot say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx

from moec.compiler.aliases import Aliases, shares_memory_with, written_arguments
from moec.compiler.errors import CaptureError
from moec.compiler.graph import module_path, source_line, tensor_meta

_GRAD_MODE = "wrap_with_set_grad_enabled"


def inline_grad_modes(module: fx.GraphModule, carrying: Iterable[fx.Node]) -> None:
    """Take the sub-graphs of other gradient modes into the graph of `module`, where autograd gives the same as before.

    carrying: placeholders that require a gradient. Raises CaptureError for a write that autograd would not see.
    """
    graph = module.graph
    calls = [node for node in graph.nodes if _is_grad_mode(node)]
    modes: dict[fx.Node, bool] = {}
    for node in calls:
        modes |= _inline(module, node)
    without = [node for node, enabled in modes.items() if not enabled]
    _refuse_hidden_writes(graph, without, carrying)
    for node in without:
        for written in written_arguments(node):
            _detach_all_but(graph, node, written)
    detach_at_border(graph, without)
    if calls:
        module.delete_all_unused_submodules()


def detach_at_border(graph: fx.Graph, inside: Collection[fx.Node]) -> None:
    """Detach the values of `inside`, which are computed without gradient, for those who use them outside."""
    members = set(inside)
    for node in inside:
        outside = [user for user in node.users if user not in members]
        if not outside or not _may_carry(node):
            continue
        with graph.inserting_after(node):
            detached = _detached(graph, node)
        for user in outside:
            user.replace_input_with(node, detached)


def _is_grad_mode(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == _GRAD_MODE


def _inline(module: fx.GraphModule, call: fx.Node) -> dict[fx.Node, bool]:
    """Copy the sub-graph of `call` in its place; returns for each new node whether its gradient mode is on."""
    graph, modes = module.graph, dict[fx.Node, bool]()
    enabled, body, *inputs = call.args
    inner: fx.GraphModule = getattr(module, body.target)  # type: ignore[union-attr, arg-type]
    environment: dict[fx.Node, Any] = dict(zip(inner.graph.find_nodes(op="placeholder"), inputs, strict=True))
    with graph.inserting_before(call):
        for node in inner.graph.nodes:
            if node.op in ("call_function", "get_attr"):
                environment[node] = copy = graph.node_copy(node, environment.__getitem__)
                modes[copy] = bool(enabled)
            if node.op == "get_attr":
                copy.target = _taken_over(module, inner, str(node.target))
    results: Any = fx.map_arg(inner.graph.output_node().args[0], environment.__getitem__)
    for user in list(call.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(call)
    return modes


def _taken_over(module: fx.GraphModule, inner: fx.GraphModule, target: str) -> str:
    """The name under which `module` holds what `inner` has at `target`: a constant, or the body of an op."""
    name, number = f"{target}_inlined", 0
    while hasattr(module, name):
        name, number = f"{target}_inlined_{number}", number + 1
    setattr(module, name, getattr(inner, target))
    return name


def _refuse_hidden_writes(graph: fx.Graph, without: list[fx.Node], carrying: Iterable[fx.Node]) -> None:
    writes = [(node, written) for node in without for written in written_arguments(node)]
    if not writes:
        return
    carriers, aliases = _carriers(carrying, set(without)), Aliases(graph)
    for node, written in writes:
        later = [member for member in aliases.members(written) if any(user > node for user in member.users)]
        if any(member in carriers for member in (written, *later) if member < node):
            raise CaptureError(
                f"{node.target} writes under no_grad into a value that carries a gradient",
                where=", ".join(filter(None, [module_path(node), source_line(node)])),
                why="autograd does not see the write, and goes on with the gradient of the value before it",
                hint="write with torch.where or torch.cat into a new value, or detach the value first",
            )


def _carriers(carrying: Iterable[fx.Node], without: set[fx.Node]) -> set[fx.Node]:
    """Everything that a gradient may flow back from to `carrying`, and what shares memory with it under no_grad."""
    found: set[fx.Node] = set()
    stack = list(carrying)
    while stack:
        node = stack.pop()
        if node in found or not _may_carry(node) or (node in without and shares_memory_with(node) not in found):
            continue
        found.add(node)
        stack += node.users
    return found


def _may_carry(node: fx.Node) -> bool:
    value = tensor_meta(node)
    if node.target is torch.ops.aten.detach.default:
        return False
    return value is None or value.is_floating_point() or value.is_complex()


def _detach_all_but(graph: fx.Graph, node: fx.Node, written: fx.Node) -> None:
    def detached(value: fx.Node) -> fx.Node:
        carries = tensor_meta(value) is not None and _may_carry(value)
        return _detached(graph, value) if carries and value is not written else value

    with graph.inserting_before(node):
        node.args = fx.map_arg(node.args, detached)
        node.kwargs = fx.map_arg(node.kwargs, detached)


def _detached(graph: fx.Graph, value: fx.Node) -> fx.Node:
    node = graph.call_function(torch.ops.aten.detach.default, (value,))
    tensor = tensor_meta(value)
    node.meta = {**value.meta, "val": None if tensor is None else tensor.detach()}
    return node
