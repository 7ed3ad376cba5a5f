"""The program as the compiler holds it: one outer graph and one graph per layer template.

A `Unit` is one FX graph with a flat signature: every weight, buffer and input is a placeholder, in the order of
`Signature.inputs`, and the output is one tuple in the order of `Signature.outputs`. Layers of the same structure
share one unit (`instances` lists their module paths), and the outer unit calls them through `moec::region`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from moec.compiler._torch_compat import OpOverload

InputKind = Literal["weight", "buffer", "input", "bucket", "shard"]
OutputKind = Literal["result", "buffer", "overflow"]

OUTER = "model"


@dataclass(frozen=True)
class InputValue:
    """One placeholder. `name`: the weight's or buffer's path below the unit's module, or the input's name.

    On several ranks, a layer takes its weights as a gathered "bucket", and the outer unit takes a "shard" of each.
    experts: for a weight whose experts (dimension 0) are spread over ranks, how many there are over all ranks; the
    placeholder then has those of one rank. 0 for every other value.
    """

    kind: InputKind
    name: str
    requires_grad: bool = False
    experts: int = 0


@dataclass(frozen=True)
class OutputValue:
    """One element of the output tuple: a result, or the new value of the buffer `name`.

    overflow: rows per expert, int64 [E], beyond the `capacity` rows that the experts at module path `name` take from a
    rank.
    """

    kind: OutputKind
    name: str
    capacity: int = 0


@dataclass(frozen=True)
class Signature:
    inputs: tuple[InputValue, ...]
    outputs: tuple[OutputValue, ...]

    def names(self, kind: InputKind) -> list[str]:
        """Names of the inputs of one kind, in order."""
        return [value.name for value in self.inputs if value.kind == kind]


@dataclass
class Unit:
    """One graph of the program before differentiation."""

    name: str
    module: fx.GraphModule
    signature: Signature
    instances: tuple[str, ...] = ("",)

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def is_outer(self) -> bool:
        return self.name == OUTER

    def placeholders(self) -> Iterator[tuple[fx.Node, InputValue]]:
        """Each placeholder node with its signature entry."""
        nodes = self.graph.find_nodes(op="placeholder")
        yield from zip(nodes, self.signature.inputs, strict=True)


@dataclass
class Program:
    """All units of one capture; `units["model"]` is the outer one and comes last."""

    units: dict[str, Unit] = field(default_factory=dict)

    @property
    def outer(self) -> Unit:
        return self.units[OUTER]

    def templates(self) -> list[Unit]:
        return [unit for unit in self.units.values() if not unit.is_outer]


def module_path(node: fx.Node) -> str:
    """The path of the module that a node came from, '' for the unit's own forward or where it is not known."""
    custom = node.meta.get("custom") or {}
    if "path" in custom:
        return str(custom["path"])
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    return path.removeprefix("L['self'].").removeprefix("L['self']")


def source_line(node: fx.Node) -> str:
    """'file.py:12' of the innermost frame recorded for a node, or ''."""
    trace = node.meta.get("stack_trace") or ""
    frames = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    if not frames:
        return ""
    file, line = frames[-1].split(", ")[:2]
    return f"{file.removeprefix('File ').strip(chr(34))}:{line.removeprefix('line ')}"


def tensor_meta(node: fx.Node) -> torch.Tensor | None:
    """The fake tensor a node yields, or None for tuples, sizes and nodes without metadata."""
    value: Any = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def op_histogram(graph: fx.Graph) -> dict[str, int]:
    """How often each op is called, for graph sizes and diffs in the log."""
    counts: dict[str, int] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            # str() of a Python function holds its address, or reads <built-in function ...>.
            name = str(node.target) if isinstance(node.target, OpOverload) else node.target.__name__
            counts[name] = counts.get(name, 0) + 1
    return counts
