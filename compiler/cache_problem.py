"""What can be done with the values of one layer, as numbers: bytes, seconds, and which value is made from which.

Views are seen through: who needs a view needs what it views. Inputs of the layer, its weights and sizes are there in
any case. A value counts once, whatever the number of its readers; the results of one op are recomputed together. What
backward never asks for, however it gets the rest, is left out.

The graph around the layers is a problem of the same kind. What layers keep as their inputs is there, and costs nothing.
What is made behind the last layer, or read before the backward of a layer, is left alone: backward begins with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

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
    return _problem(joint, forward_nodes(joint), frozenset(), layers, device, changing)


def outer_problem(outer: Joint, inputs_kept: Mapping[str, Collection[int]], device: Hardware) -> LayerProblem:
    """Of the graph around the layers. inputs_kept: template -> places of the inputs that its backward reads."""
    calls = outer.graph.find_nodes(op="call_function", target=torch.ops.moec.region.default)
    forward = _decided_outside(outer, calls)
    given = {call.args[2][place] for call in calls for place in inputs_kept[str(call.args[0])]}  # type: ignore[index]
    return _problem(outer, forward, {value for value in given if isinstance(value, fx.Node)}, 1, device)


def _decided_outside(outer: Joint, calls: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes of the forward before its last layer, but for those that backward reads before its first one."""
    order, forward = list(outer.graph.nodes), forward_nodes(outer)
    back = outer.graph.find_nodes(op="call_function", target=torch.ops.moec.region_backward.default)
    if not calls or not back:
        return set()
    begin = [node for node in order[: order.index(back[0])] if node not in forward]
    early = _through_views(source for node in [*begin, back[0]] for source in node.all_input_nodes)
    return {node for node in order[: order.index(calls[-1])] if node in forward} - early


def inputs_kept(joint: Joint) -> list[int]:
    """The places, among the inputs of a layer that are no weights, of those that its backward reads."""
    forward = forward_nodes(joint)
    inputs = [n for n, v in zip(joint.inputs, joint.unit.signature.inputs, strict=True) if v.kind == "input"]
    read = _read_by_backward(joint, forward)
    return [place for place, node in enumerate(inputs) if node in read]


def _problem(
    joint: Joint,
    forward: Collection[fx.Node],
    held: Collection[fx.Node],
    layers: int,
    device: Hardware,
    changing: Collection[str] = (),
) -> LayerProblem:
    """forward: the nodes whose values are decided. held: of these, those that are kept in any case."""
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
    needed = {n for node in _read_by_backward(joint, forward_nodes(joint)) for n in _bases(node, numbers)}
    there = {number for node in held for number in _bases(node, numbers)}
    ops = []
    for maker in makers:
        reads = {number for source in maker.all_input_nodes for number in _bases(source, numbers)}
        may = may_recompute(maker)[0] and not any(source in written for source in _roots(maker))
        ops.append(Op(tuple(sorted(reads)), _seconds(maker, device) if may else 0.0, may))
    values = []
    for node in made:
        size = 0 if numbers[node] in there else nbytes(node.meta["val"])
        offload = may_offload(node) and size >= SMALLEST_OFFLOAD
        copies = 2 * copy_seconds(node, device)
        values.append(Value(node.name, size, makers[_maker(node)], numbers[node] in needed, offload, copies))
    return _asked_for(LayerProblem(tuple(values), tuple(ops), layers))


def _asked_for(problem: LayerProblem) -> LayerProblem:
    """Without the values that nothing in backward can ask for."""
    wanted = {number for number, value in enumerate(problem.values) if value.needed}
    pending = list(wanted)
    while pending:
        op = problem.ops[problem.values[pending.pop()].maker]
        more = set(op.reads) - wanted if op.may_run_again else set()
        wanted |= more
        pending += more
    values = {number: place for place, number in enumerate(sorted(wanted))}
    makers = {old: new for new, old in enumerate(sorted({problem.values[number].maker for number in wanted}))}
    ops = []
    for maker in makers:
        op = problem.ops[maker]
        ops.append(replace(op, reads=tuple(values[read] for read in op.reads) if op.may_run_again else ()))
    kept = [replace(problem.values[number], maker=makers[problem.values[number].maker]) for number in values]
    return LayerProblem(tuple(kept), tuple(ops), problem.layers)


def _seconds(node: fx.Node, device: Hardware) -> float:
    cost = node_cost(node, device)
    return max(cost.seconds, cost.launches * device.launch_seconds)


def copy_seconds(node: fx.Node, device: Hardware) -> float:
    """What one copy over the host link takes from the compute: its device memory's bandwidth, and a launch."""
    return nbytes(node.meta["val"]) / device.hbm_bytes + device.launch_seconds


def _maker(node: fx.Node) -> fx.Node:
    source = node.args[0] if is_getitem(node) else node
    assert isinstance(source, fx.Node)
    return source


def _read_by_backward(joint: Joint, forward: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes of the forward that the backward reads, and through views what they view."""
    readers = [n for n in joint.graph.nodes if n.op == "call_function" and n not in forward]
    sources = [source for reader in readers for source in reader.all_input_nodes]
    return _through_views([*sources, *(n for n in joint.grads.values() if isinstance(n, fx.Node))]) & set(forward)


def _through_views(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes, and what they view."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes if is_view(node) else []
    return found


def _bases(node: fx.Node, numbers: Mapping[fx.Node, int]) -> set[int]:
    """The values that a node is or views."""
    if node in numbers:
        return {numbers[node]}
    return {n for source in node.all_input_nodes for n in _bases(source, numbers)} if is_view(node) else set()


def _roots(node: fx.Node) -> set[fx.Node]:
    """The inputs that an op reads, directly or through views."""
    found: set[fx.Node] = set()
    for source in node.all_input_nodes:
        found |= {source} if source.op == "placeholder" else _roots(source) if is_view(source) else set()
    return found
