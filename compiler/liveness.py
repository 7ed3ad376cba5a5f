"""When the values of one graph exist, as its emitted function holds them: a list of instructions to replay.

1. Every op makes storages of its own, but for views, which share those of what they view. A `reshape` counts as a view
   where the strides allow one.
2. A name is deleted after the statement that reads it last, and a storage is freed with its last name. What is written
   inside the expression that uses it (views with one reader) exists for that statement alone.
3. While an op runs, its inputs, its results and its workspace exist together.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from moec.compiler.allocations import rounded
from moec.compiler.dialect.registry import nbytes, size_hint
from moec.compiler.partition import is_view
from moec.compiler.workspace import Workspaces

aten = torch.ops.aten


@dataclass(frozen=True)
class Instruction:
    """One op of a graph.

    view: of the first argument; sizes: else bytes of what it makes, nested as its result is (None: no tensor).
    dies: nodes whose names are deleted behind it.
    """

    node: fx.Node
    view: bool
    sizes: Any
    workspace: int
    dies: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Liveness:
    """A graph's instructions in the order of its statements. outputs: nodes that it returns, which nothing deletes."""

    instructions: tuple[Instruction, ...]
    placeholders: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


class Lives:
    """The instructions of graphs; each graph is read once, so none may change in between.

    granularity: bytes of which every allocation is a multiple (`Hardware.allocation_bytes`).
    """

    def __init__(self, granularity: int = 1) -> None:
        self.granularity = granularity
        self._workspaces = Workspaces(granularity)
        self._known: dict[fx.Graph, Liveness] = {}

    def of(self, graph: fx.Graph, kept: Iterable[fx.Node] = ()) -> Liveness:
        """The instructions of a lowered graph. kept: values that outlive the function, beside none."""
        if graph not in self._known:
            self._known[graph] = self._read(graph, tuple(kept))
        return self._known[graph]

    def _read(self, graph: fx.Graph, outputs: tuple[fx.Node, ...]) -> Liveness:
        order = _statement_order(graph)
        dies = _deaths(graph, order, {*outputs})
        instructions = [
            Instruction(
                node,
                _shares_memory(node),
                None if _shares_memory(node) else _sizes(node.meta.get("val"), self.granularity),
                self._workspaces.of(node),
                tuple(dies.get(node, ())),
            )
            for node in order
        ]
        return Liveness(tuple(instructions), tuple(graph.find_nodes(op="placeholder")), outputs)


def _statement_order(graph: fx.Graph) -> list[fx.Node]:
    """The ops in the order in which they run: a view with one reader runs in the statement of that reader."""
    order: list[fx.Node] = []
    done: set[fx.Node] = set()

    def run(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source.op == "call_function" and source not in done:
                run(source)
        done.add(node)
        order.append(node)

    for node in graph.nodes:
        if node.op == "call_function" and node not in done and not _is_delayed(node):
            run(node)
    return order


def _is_delayed(node: fx.Node) -> bool:
    return is_view(node) and len(node.users) == 1 and next(iter(node.users)).op == "call_function"


def _deaths(graph: fx.Graph, order: list[fx.Node], kept: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Node -> values that nothing reads behind it."""
    position = {node: index for index, node in enumerate(order)}
    result: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "output" or node in kept:
            continue
        readers = [position[user] for user in node.users if user in position]
        last = max([*readers, *([position[node]] if node in position else [])], default=None)
        if last is not None:
            result.setdefault(order[last], []).append(node)
    return result


def _shares_memory(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    if node.target is aten.reshape.default:
        source = node.args[0]
        return isinstance(source, fx.Node) and _can_view(source.meta["val"], node.meta["val"])
    return is_view(node)


def _can_view(source: Tensor, result: Tensor) -> bool:
    """Whether a reshape need not copy: asked of tensors without data."""
    sizes, strides = ([size_hint(n) for n in numbers] for numbers in (source.shape, source.stride()))
    try:
        torch.empty_strided(sizes, strides, dtype=source.dtype, device="meta").view(
            [size_hint(size) for size in result.shape]
        )
    except RuntimeError:
        return False
    return True


def _sizes(value: Any, granularity: int) -> Any:
    if isinstance(value, Tensor):
        return rounded(nbytes(value), granularity)
    return [_sizes(item, granularity) for item in value] if isinstance(value, list | tuple) else None
