"""The collectives of a program: which, in which group, how many bytes, in which order.

bytes on the wire, sent by one rank of n:   all-gather (n-1) * local   reduce-scatter (n-1) * local
                                            All-to-All (n-1)/n * local   all-reduce 2 (n-1)/n * local
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moec.compiler.dialect.registry import nbytes, size_hint

c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Collective:
    """One collective: the op's name, its group's role, one rank's part, and the bucket it serves, "" for none.

    numel: elements of one rank's part (what it gives to a gather, what it gets from a reduction).
    """

    op: str
    role: str
    dtype: str
    numel: int
    nbytes: int
    bucket: str


def collectives(graph: fx.Graph) -> Iterator[Collective]:
    """The collectives of one graph, in order."""
    for node in graph.nodes:
        rule = _RULES.get(node.target)
        if rule is not None:
            part = rule.part(node)
            value = part.meta["val"]
            numel = 1
            for size in value.shape:
                numel *= size_hint(size)
            dtype = str(value.dtype).removeprefix("torch.")
            yield Collective(rule.name, rule.role(node), dtype, numel, nbytes(value), str(node.meta.get("bucket", "")))


def wire_bytes(collective: Collective, ranks: int) -> float:
    """Bytes that one rank sends in a group of `ranks`, by a ring (or directly, for All-to-All)."""
    return _WIRE[collective.op](ranks) * collective.nbytes


@dataclass(frozen=True)
class _Rule:
    name: str
    part: Callable[[fx.Node], fx.Node]
    role: Callable[[fx.Node], str]


def _first(node: fx.Node) -> fx.Node:
    return node.args[0]  # type: ignore[return-value]


def _last_argument(node: fx.Node) -> str:
    return str(node.args[-1])


_RULES: dict[Any, _Rule] = {
    c10d.all_gather_into_tensor.default: _Rule("all_gather", _first, _last_argument),
    c10d.reduce_scatter_tensor.default: _Rule("reduce_scatter", lambda node: node, _last_argument),
    c10d.all_to_all_single.default: _Rule("all_to_all", _first, _last_argument),
    c10d.all_reduce.default: _Rule("all_reduce", _first, _last_argument),
}

_WIRE: dict[str, Callable[[int], float]] = {
    "all_gather": lambda ranks: ranks - 1,
    "reduce_scatter": lambda ranks: ranks - 1,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
}
