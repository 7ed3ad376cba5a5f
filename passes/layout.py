"""Transposes that a rewrite puts around an op, folded into the ones that are there already."""

from __future__ import annotations

import torch
from torch import fx

from moec.compiler.graph import tensor_meta
from moec.compiler.nodes import aten, looked_through, origin, source_of
from moec.passes.rewrite import Rewriter

_TRANSPOSE, _RESHAPE = aten("transpose.int"), aten("reshape.default")


def transposed(rewriter: Rewriter, node: fx.Node, first: int, second: int) -> fx.Node:
    """`node` with two dimensions exchanged: what it was a transpose of, when it is one."""
    below = origin(node)
    if _swaps(below, first, second) and _dtype(below) == _dtype(node):
        return source_of(below)
    return rewriter.call(torch.ops.aten.transpose.int, node, first, second)


def fold_users(graph: fx.Graph, node: fx.Node) -> None:
    """Let the users of the transpose `node` that exchange the same dimensions again use its input."""
    source, (first, second) = source_of(node), node.args[1:3]
    waiting = [node]
    while waiting:
        value = waiting.pop()
        for user in list(value.users):
            if _swaps(user, first, second):  # type: ignore[arg-type]
                user.replace_all_uses_with(source)
                graph.erase_node(user)
            elif (looked_through(user) is value and _dtype(user) == _dtype(node)) or _keeps_shape(user):
                waiting.append(user)


def fold_reshapes(graph: fx.Graph, node: fx.Node) -> None:
    """Let the reshapes of the reshape `node` take its input, or be its input where the shape is that already."""
    source = source_of(node)
    for user in list(node.users):
        if user.op != "call_function" or user.target not in _RESHAPE:
            continue
        user.update_arg(0, source)
        if _keeps_shape(user):
            user.replace_all_uses_with(source)
            graph.erase_node(user)


def _swaps(node: fx.Node, first: int, second: int) -> bool:
    return node.op == "call_function" and node.target in _TRANSPOSE and tuple(node.args[1:]) == (first, second)


def _keeps_shape(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target not in _RESHAPE:
        return False
    after, before = tensor_meta(node), tensor_meta(source_of(node))
    return after is not None and before is not None and after.shape == before.shape


def _dtype(node: fx.Node) -> torch.dtype | None:
    tensor = tensor_meta(node)
    return None if tensor is None else tensor.dtype
