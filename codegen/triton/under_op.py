"""Kernels that an op itself runs on CUDA tensors, so that a call outside of a compiled step has them too.

A module that brings such kernels has a `reason(op, *arguments)`: why they do not fit a call, '' when they fit. Where
they do not, the op's reference runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from moec.compiler.dialect.registry import BODIES
from moec.compiler.lower import Implementation, argument_of, register_implementation
from moec.compiler.workspace import register_workspace

Reason = Callable[..., str]
Workspace = Callable[[fx.Node], int | None]


def register_under_ops(table: Mapping[Any, Callable[..., Any]], reason: Reason, workspace: Workspace) -> None:
    """Register the kernels of each op of a table: on CUDA, with the lowering, and the bytes that they hold."""
    refusal = refusal_by(reason)
    for op, function in table.items():
        torch.library.register_kernel(op, "cuda", _where_they_fit(op, function, reason))
        register_implementation(op, Implementation("triton", op, refusal))
        register_workspace(op, workspace)


def refusal_by(reason: Reason) -> Callable[[fx.Node], str]:
    """The same for a node of a graph: why the kernels do not fit it."""

    def refusal(node: fx.Node) -> str:
        return reason(node.target, *(value_of(argument_of(node, name)) for name in argument_names(node.target)))

    return refusal


def argument_names(op: Any) -> list[str]:
    """Names of the arguments in the schema of an op."""
    return [argument.name for argument in op._schema.arguments]


def value_of(argument: Any) -> Any:
    """The fake tensor of a node; anything else as it is."""
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def _where_they_fit(op: Any, function: Callable[..., Any], reason: Reason) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        return (BODIES[op] if reason(op, *arguments) else function)(*arguments)

    return run
