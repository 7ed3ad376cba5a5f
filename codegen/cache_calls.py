"""Calls of the host cache in an emitted program: values leave in a layer's forward and come back in its backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx

from moec.codegen.function import FunctionWriter, Handler
from moec.compiler.cache_schedule import outside_name
from moec.compiler.partition import Partitioned
from moec.compiler.text import quoted

HOST_PREFIX = "host_"
"""Of the variable for a value that waits in host memory."""

_OFFLOAD, _FETCH = torch.ops.moec.offload.default, torch.ops.moec.fetch.default


def uses_cache(parts: Partitioned) -> bool:
    """Whether a layer's values go to host memory."""
    return bool(parts.forward.find_nodes(op="call_function", target=_OFFLOAD))


def names_of_fetched(backward: fx.Graph, given: Mapping[fx.Node, str]) -> dict[fx.Node, str]:
    """Fetched values have the names that they had in forward."""
    fetched = backward.find_nodes(op="call_function", target=_FETCH)
    return {node: given[node.args[0]].removeprefix(HOST_PREFIX) for node in fetched}  # type: ignore[index]


def copies_of(holders: Sequence[str], action: str, own: Callable[[str], str]) -> list[str]:
    """Statements that release or prefetch values. own: name of a value outside of layers -> its variable."""
    names = [(holder, outside_name(holder)) for holder in holders]
    return [f"cache.{action}({f'[{own(name)}]' if name else f'saved[{quoted(path)}]'})" for path, name in names]


def _offload(writer: FunctionWriter, node: fx.Node) -> str:
    value = writer.text(node.args[0])
    return f"{writer.name(node, f'{HOST_PREFIX}{value}')} = cache.offload({value})"


def _fetch(writer: FunctionWriter, node: fx.Node) -> str:
    return f"{writer.name(node)} = cache.fetch({writer.text(node.args[0])})"


CACHE_HANDLERS: dict[object, Handler] = {_OFFLOAD: _offload, _FETCH: _fetch}
