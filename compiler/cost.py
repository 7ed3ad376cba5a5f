"""What a graph costs: FLOPs from the dialect's formulas and a table for ATen, bytes from the values it touches.

A symbolic size counts by its hint, the size it had when the graph was traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from moec.compiler._torch_compat import OpOverload
from moec.compiler.dialect.registry import lookup, nbytes, size_hint
from moec.compiler.region_op import region

aten = torch.ops.aten


def graph_cost(graph: fx.Graph) -> dict[str, float]:
    """{"flops", "bytes"} of one run: arithmetic, and values read and written by each op as if nothing were cached."""
    flops = moved = 0.0
    for node in graph.nodes:
        if node.op == "call_function":
            flops += node_flops(node)
            moved += node_bytes(node)
    return {"flops": flops, "bytes": moved}


def node_flops(node: fx.Node) -> float:
    """FLOPs of one node; pointwise ATen ops count one per output element, views and calls of layers count none."""
    args, kwargs = _values(node.args), {name: _values(value) for name, value in node.kwargs.items()}
    definition = lookup(node.target)
    if definition is not None:
        if node.target is definition.op:
            return float(definition.flops_of(args, kwargs))
        return float(definition.backward_flops_of((), _forward_arguments(definition, node)))
    rule = _FLOPS.get(node.target)
    if rule is not None:
        return float(rule(args))
    if _is_free(node):
        return 0.0
    return float(sum(t.numel() for t in _tensors(_values(node))))


def node_bytes(node: fx.Node) -> float:
    """Bytes that one node reads and writes; views move nothing."""
    if _is_free(node):
        return 0.0
    if node.target in _READS_WHAT_IT_WRITES:
        return 2.0 * nbytes(node.meta.get("val"))
    read = sum(nbytes(source.meta.get("val")) for source in node.all_input_nodes)
    return float(read + nbytes(node.meta.get("val")))


def _forward_arguments(definition: Any, node: fx.Node) -> dict[str, Any]:
    """What a call of a backward op gives under names of the forward's arguments."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    wanted = {argument.name for argument in definition.op._schema.arguments}
    return {name: _values(value) for name, value in given.items() if name in wanted}


def _values(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return _values(value.meta.get("val"))
    if isinstance(value, list | tuple):
        return [_values(item) for item in value]
    if isinstance(value, Tensor):
        return torch.empty([size_hint(size) for size in value.shape], dtype=value.dtype, device="meta")
    return size_hint(value) if isinstance(value, torch.SymInt) else value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [item for item in value if isinstance(item, Tensor)] if isinstance(value, list | tuple) else []


def _is_free(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return True
    if node.target in _FREE:
        return True
    returns = node.target._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _linear(args: list[Any]) -> int:
    return 2 * args[0].numel() * args[1].shape[0]


def _matmul(args: list[Any]) -> int:
    return 2 * args[0].numel() * args[1].shape[-1]


_FLOPS: dict[Any, Callable[[list[Any]], int]] = {
    aten.linear.default: _linear,
    aten.mm.default: _matmul,
    aten.bmm.default: _matmul,
    aten.matmul.default: _matmul,
    aten.addmm.default: lambda args: 2 * args[1].numel() * args[2].shape[-1],
    aten.embedding.default: lambda args: 0,
}
_FREE = {
    region._opoverload,
    torch.ops.moec.region_backward.default,
    aten.reshape.default,
    aten.sym_size.int,
}
# Takes its part out of a larger value.
_READS_WHAT_IT_WRITES = {torch.ops.moec.unshard.default}
