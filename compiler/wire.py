"""What collectives move: a table from op to bytes, and the list of a graph's collectives.

    bytes that one rank of n receives:   all-gather (n-1) * local      reduce-scatter (n-1) * local
                                         All-to-All (n-1)/n * local    all-reduce 2 (n-1)/n * local

"local" is one rank's part: what it gives to a gather, an All-to-All or an all-reduce, and gets from a reduction.
The rows of an exchange count as if every expert had the same number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from moec.compiler.collectives import group_of
from moec.compiler.dialect.registry import size_hint
from moec.compiler.hardware import Hardware
from moec.compiler.partition import Partitioned
from moec.compiler.plan import MeshPlan

c10d, moec = torch.ops._c10d_functional, torch.ops.moec
_LAYERS = {moec.region.default, moec.region_backward.default}


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    kind: "all_gather", "reduce_scatter", "all_to_all", "all_reduce". role: of its group. numel: of one rank's part.
    bucket: the bucket or layer that it serves.
    """

    kind: str
    role: str
    dtype: str
    numel: int
    itemsize: int
    bucket: str = ""

    def wire_bytes(self, mesh: MeshPlan) -> float:
        """Bytes that one rank receives."""
        ranks = len(group_of(mesh, self.role, 0))
        return _WIRE[self.kind](ranks) * self.numel * self.itemsize

    def seconds(self, mesh: MeshPlan, device: Hardware) -> float:
        """Of this collective alone: by the line of its kind within a host, at the rate of the network otherwise."""
        members, received = group_of(mesh, self.role, 0), self.wire_bytes(mesh)
        within = members[-1] < device.host_devices and self.kind in device.links
        return device.links[self.kind].seconds(received) if within else received / device.network_bytes


def collectives(graph: fx.Graph) -> Iterator[Collective]:
    """The collectives of one graph, in order, those inside of exchanges included."""
    for node in graph.nodes:
        yield from _of_node(node)


def microbatch_collectives(outer: Partitioned, layers: Mapping[str, Partitioned]) -> list[Collective]:
    """The collectives of one microbatch in program order, forward then backward, those of layers at their calls."""
    found = []
    for graph, of in ((outer.forward, lambda parts: parts.forward), (outer.backward, lambda parts: parts.backward)):
        within = {name: list(collectives(of(parts))) for name, parts in layers.items()}
        for node in graph.nodes:
            if node.target in _LAYERS:
                found += [replace(one, bucket=str(node.args[1])) for one in within[str(node.args[0])]]
            found += _of_node(node)
    return found


@dataclass(frozen=True)
class _Rule:
    kind: str
    role: int
    part: Callable[[fx.Node], fx.Node]
    numel: Callable[[fx.Node], int] | None = None


def _of_node(node: fx.Node) -> Iterator[Collective]:
    rule = _RULES.get(node.target)
    if rule is not None:
        value = rule.part(node).meta["val"]
        numel = rule.numel(node) if rule.numel else math.prod(size_hint(size) for size in value.shape)
        dtype = str(value.dtype).removeprefix("torch.")
        bucket = str(node.meta.get("bucket", ""))
        yield Collective(rule.kind, str(node.args[rule.role]), dtype, numel, value.dtype.itemsize, bucket)


def _first(node: fx.Node) -> fx.Node:
    return node.args[0]  # type: ignore[return-value]


def _self(node: fx.Node) -> fx.Node:
    return node


def _counted(node: fx.Node) -> int:
    """One count per rank and expert is sent; the result holds those received too."""
    return int(node.meta["val"].numel()) // 2


_RULES: dict[Any, _Rule] = {
    c10d.all_gather_into_tensor.default: _Rule("all_gather", 2, _first),
    c10d.reduce_scatter_tensor.default: _Rule("reduce_scatter", 3, _self),
    c10d.all_to_all_single.default: _Rule("all_to_all", 3, _first),
    c10d.all_reduce.default: _Rule("all_reduce", 2, _first),
    moec.exchange_counts.default: _Rule("all_to_all", 3, _self, _counted),
    moec.exchange.default: _Rule("all_to_all", 2, _first),
    moec.exchange_back.default: _Rule("all_to_all", 3, _first),
    moec.exchange_padded.default: _Rule("all_to_all", 3, _self),
    moec.exchange_padded_back.default: _Rule("all_to_all", 4, _first),
}

_WIRE: dict[str, Callable[[int], float]] = {
    "all_gather": lambda ranks: ranks - 1,
    "reduce_scatter": lambda ranks: ranks - 1,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
}
