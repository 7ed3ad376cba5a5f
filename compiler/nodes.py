"""Reading one node of a graph: its arguments by schema, its name for people, what lies below lossless casts."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable
from functools import cache
from typing import Any

import torch
from torch import fx

from moec.compiler._torch_compat import OpOverload
from moec.compiler.graph import source_line, tensor_meta

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
    parameters = parameters_of(node.target)
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


@cache
def parameters_of(target: Any) -> tuple[tuple[str, Any], ...]:
    """(name, default) of every argument of an op's schema; empty for other functions."""
    if not isinstance(target, OpOverload):
        return ()
    return tuple((argument.name, argument.default_value) for argument in target._schema.arguments)
