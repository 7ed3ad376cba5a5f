"""What can be done with the values of one layer, as numbers: bytes, seconds, and which value is made from which.

Views are seen through: who needs a view needs what it views. Inputs of the layer, its weights and sizes are there in
any case. A value counts once, whatever the number of its readers; the results of one op are recomputed together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from moec.compiler.cost import node_cost
from moec.compiler.dialect.registry import nbytes
from moec.compiler.differentiate import Joint, is_getitem, is_tensor
from moec.compiler.hardware import Hardware
from moec.compiler.partition import forward_nodes, is_view, may_offload, may_recompute

SMALLEST_OFFLOAD = 1 << 20
"""Bytes below which a copy to host memory is not worth its launch."""


@dataclass(frozen=True)
class Value:
    """One forward value. maker: number of the op that makes it. needed: whether the backward itself reads it.

    copies: seconds that copying it out and back takes from the compute beside it.
    """

    name: str
    bytes: int
    maker: int
    needed: bool
    may_offload: bool
    copies: float = 0.0


@dataclass(frozen=True)
class Op:
    """One forward op. reads: numbers of the values that it is made from. may_run_again, seconds: of recomputing it."""

    reads: tuple[int, ...]
    seconds: float
    may_run_again: bool


@dataclass(frozen=True)
class LayerProblem:
    """The values and ops of one layer template, called `layers` times."""

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    layers: int


def layer_problem(joint: Joint, layers: int, device: Hardware, changing: Collection[str] = ()) -> LayerProblem:
    """Of a differentiated template. changing: inputs that the forward writes, which no op reads twice."""
    forward = forward_nodes(joint)
    written = {
        node
        for node, value in zip(joint.inputs, joint.unit.signature.inputs, strict=True)
        if value.name in {*joint.buffers, *changing}
    }
    numbers: dict[fx.Node, int] = {}
    made: list[fx.Node] = []
    makers: dict[fx.Node, int] = {}
    for node in joint.graph.nodes:
        if node.op == "call_function" and node in forward and is_tensor(node) and not is_view(node):
            numbers[node] = len(made)
            made.append(node)
            makers.setdefault(_maker(node), len(makers))
    needed = _needed(joint, forward, numbers)
    ops = []
    for maker in makers:
        reads = {number for source in maker.all_input_nodes for number in _bases(source, numbers)}
        stale = any(source in written for source in _roots(maker))
        cost = node_cost(maker, device)
        seconds = max(cost.seconds, cost.launches * device.launch_seconds)
        ops.append(Op(tuple(sorted(reads)), seconds, may_recompute(maker)[0] and not stale))
    values = [
        Value(
            node.name,
            nbytes(node.meta["val"]),
            makers[_maker(node)],
            numbers[node] in needed,
            may_offload(node) and nbytes(node.meta["val"]) >= SMALLEST_OFFLOAD,
            2 * copy_seconds(node, device),
        )
        for node in made
    ]
    return LayerProblem(tuple(values), tuple(ops), layers)


def copy_seconds(node: fx.Node, device: Hardware) -> float:
    """What one copy over the host link takes from the compute: its device memory's bandwidth, and a launch."""
    return nbytes(node.meta["val"]) / device.hbm_bytes + device.launch_seconds


def _maker(node: fx.Node) -> fx.Node:
    source = node.args[0] if is_getitem(node) else node
    assert isinstance(source, fx.Node)
    return source


def _needed(joint: Joint, forward: Collection[fx.Node], numbers: Mapping[fx.Node, int]) -> set[int]:
    """What the backward reads of the forward, seen through views."""
    readers = [n for n in joint.graph.nodes if n.op == "call_function" and n not in forward]
    sources = [source for reader in readers for source in reader.all_input_nodes]
    sources += [node for node in joint.grads.values() if isinstance(node, fx.Node)]
    return {number for source in sources if source in forward for number in _bases(source, numbers)}


def _bases(node: fx.Node, numbers: Mapping[fx.Node, int]) -> set[int]:
    """The values that a node is or views."""
    if node in numbers:
        return {numbers[node]}
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor | list | tuple):
        return set()
    return {number for source in node.all_input_nodes for number in _bases(source, numbers)}


def _roots(node: fx.Node) -> set[fx.Node]:
    """The inputs that an op reads, directly or through views."""
    found: set[fx.Node] = set()
    for source in node.all_input_nodes:
        found |= {source} if source.op == "placeholder" else _roots(source) if is_view(source) else set()
    return found
