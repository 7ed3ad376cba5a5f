"""What a graph costs: FLOPs, bytes moved, launches, and from these an estimate of its time on a device.

1. FLOPs come from the dialect's formulas and a table for ATen.
2. HBM bytes are what each op reads and writes, as if nothing were cached in between. An op that is not a view counts as
   one launch: a fused kernel; an op's reference implementation launches more, and moves more.
3. Network bytes, and bytes over the host link, come from tables of the ops that move them.
4. An op takes as long as was measured of such a call (`op_times.py`), else as long as the slowest of these at the
   device's rates; a graph takes as long as its ops one after the
   other, or as the host needs to launch them. Neither overlap nor Python is counted.

A symbolic size counts by its hint, the size it had when the graph was traced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from moec.compiler._torch_compat import OpOverload
from moec.compiler.dialect._define import NEEDED
from moec.compiler.dialect.registry import lookup, nbytes, size_hint
from moec.compiler.hardware import Hardware, hardware
from moec.compiler.nodes import bound_args
from moec.compiler.op_times import call_key
from moec.compiler.region_op import region

aten = torch.ops.aten


@dataclass(frozen=True)
class Cost:
    """One run of an op or a graph on one rank.

    seconds: estimate. hbm_bytes: read and written. host_bytes: moved over the host link. network_bytes: received from
    other ranks. launches: kernels started.
    """

    seconds: float = 0.0
    flops: float = 0.0
    hbm_bytes: float = 0.0
    host_bytes: float = 0.0
    network_bytes: float = 0.0
    launches: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: int) -> Cost:
        return Cost(*(value * times for value in astuple(self)))


BytesRule = Callable[[fx.Node], float]

NETWORK_BYTES: dict[OpOverload, BytesRule] = {}
"""Bytes that one rank receives from others, by op: whoever brings a collective adds its rule. Others move none."""

HOST_BYTES: dict[OpOverload, BytesRule] = dict.fromkeys(
    (torch.ops.moec.offload.default, torch.ops.moec.fetch.default), lambda node: float(nbytes(node.meta["val"]))
)
"""Bytes over the host link, by op, in the same way."""

FREE: set[Any] = {
    region._opoverload,
    torch.ops.moec.region_backward.default,
    aten.reshape.default,
    aten.sym_size.int,
}
"""Ops that neither compute nor move anything, beside those whose schema says that they return views."""


def graph_cost(graph: fx.Graph, device: Hardware | None = None) -> Cost:
    """The cost of one run of a graph on `device`, an H200 by default; a call of a layer costs nothing here."""
    device = device or hardware()
    total = Cost()
    for node in graph.nodes:
        if node.op == "call_function":
            total += node_cost(node, device)
    return replace(total, seconds=max(total.seconds, total.launches * device.launch_seconds))


def node_cost(node: fx.Node, device: Hardware) -> Cost:
    """The cost of one node; its seconds are those of the device, without the launch."""
    if _is_free(node):
        return Cost()
    flops, moved = node_flops(node), node_bytes(node)
    host, network = (_moved(table, node) for table in (HOST_BYTES, NETWORK_BYTES))
    measured = device.times.get(call_key(node)) if device.times else None
    seconds = max(
        flops / device.flops_of(_dtype(node)),
        moved / device.hbm_bytes,
        host / device.host_bytes,
        network / device.network_bytes,
    )
    return Cost(seconds if measured is None else measured, flops, moved, host, network, 1)


def _moved(table: dict[OpOverload, BytesRule], node: fx.Node) -> float:
    rule = table.get(node.target)  # type: ignore[call-overload]
    return 0.0 if rule is None else float(rule(node))


def _dtype(node: fx.Node) -> torch.dtype:
    """The dtype that an op computes in: that of its first floating point operand, or of its result."""
    for value in (*(source.meta.get("val") for source in node.all_input_nodes), node.meta.get("val")):
        for tensor in _tensors(value):
            if tensor.is_floating_point():
                return tensor.dtype
    return torch.float32


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
        return float(rule(_values(bound_args(node))))
    if _is_free(node):
        return 0.0
    return float(sum(t.numel() for t in _tensors(_values(node))))


def node_bytes(node: fx.Node) -> float:
    """Bytes that one node reads and writes; views move nothing, and a look-up reads the rows it takes."""
    if _is_free(node):
        return 0.0
    if node.target in _LOOKUPS or node.target in _READS_WHAT_IT_WRITES:
        return float(2 * nbytes(node.meta.get("val")))
    read = sum(nbytes(source.meta.get("val")) for source in node.all_input_nodes)
    return float(read + nbytes(node.meta.get("val")))


def _forward_arguments(definition: Any, node: fx.Node) -> dict[str, Any]:
    """What a call of a backward op gives under names of its cost formula, and which gradients it does not make.

    A gradient is as large as its own argument, which the backward may not take; one that nobody asks for is empty.
    """
    schema = node.target._schema  # type: ignore[union-attr]
    results = node.meta.get("val")
    found = results if isinstance(results, list | tuple) else [results]
    names = [result.name.removeprefix("grad_") for result in schema.returns]
    gradients = {name: value for name, value in zip(names, found, strict=False) if nbytes(value)}
    arguments = dict(zip((argument.name for argument in schema.arguments), bound_args(node), strict=True))
    flags = arguments.get(NEEDED) or [True] * len(names)
    needs = {f"need_{name}": int(flag and name in gradients) for name, flag in zip(names, flags, strict=True)}
    given = gradients | {name: value for name, value in arguments.items() if value is not None}
    wanted = {argument.name for argument in definition.op._schema.arguments} | set(definition.shapes)
    return {name: _values(value) for name, value in given.items() if name in wanted} | needs


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
    if node.target in FREE:
        return True
    returns = node.target._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


_LOOKUPS = {aten.embedding.default, aten.index_select.default, aten.gather.default}


def _linear(args: list[Any]) -> int:
    return 2 * args[0].numel() * args[1].shape[0]


def _matmul(args: list[Any]) -> int:
    return 2 * args[0].numel() * args[1].shape[-1]


def _sdpa(args: list[Any]) -> int:
    query, key, value = args[:3]
    pairs = query.numel() // query.shape[-1] * key.shape[-2]
    total = 2 * pairs * (query.shape[-1] + value.shape[-1])
    return total // 2 if args[5] else total


def _conv1d(args: list[Any]) -> int:
    return 2 * args[0].shape[0] * args[0].shape[-1] * args[1].numel()


def _grouped_mm(args: list[Any]) -> int:
    return 2 * args[0].numel() * args[1].shape[-1]


_FLOPS: dict[Any, Callable[[list[Any]], int]] = {
    aten.linear.default: _linear,
    aten.mm.default: _matmul,
    aten.bmm.default: _matmul,
    aten.matmul.default: _matmul,
    aten.addmm.default: lambda args: 2 * args[1].numel() * args[2].shape[-1],
    aten.scaled_dot_product_attention.default: _sdpa,
    aten.conv1d.default: _conv1d,
    aten._grouped_mm.default: _grouped_mm,
    **dict.fromkeys(_LOOKUPS, lambda args: 0),
}
# Takes its part out of a larger value.
_READS_WHAT_IT_WRITES = {torch.ops.moec.unshard.default}
