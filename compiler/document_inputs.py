"""Which inputs of the units of a capture are document ids, and therefore never fall along a row.

A batch holds them by contract (`compiler/view.py`), and they are checked when it comes in. Any other table of whole
numbers may hold anything, and so may every input of a graph that torch.compile found.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx

from moec.compiler.graph import Program, tensor_meta
from moec.compiler.nodes import CASTS, COPIES, source_of

DOCUMENT_IDS = "document_ids"


def document_inputs(program: Program) -> dict[str, frozenset[str]]:
    """Unit name -> names of its inputs that are the batch's document ids in every call."""
    outer = program.outer
    ids = {node for node, value in outer.placeholders() if (value.kind, value.name) == ("input", DOCUMENT_IDS)}
    found = {outer.name: frozenset([DOCUMENT_IDS] if ids else [])}
    for node in outer.graph.find_nodes(op="call_function", target=torch.ops.moec.region.default):
        unit = program.units[str(node.args[0])]
        names = unit.signature.names("input")
        given = frozenset(name for name, value in _pairs(names, node.args[2]) if _below_casts(value) in ids)
        found[unit.name] = found.get(unit.name, given) & given
    return found


def _pairs(names: Collection[str], values: Any) -> Iterator[tuple[str, fx.Node]]:
    yield from zip(names, values, strict=True)


def _below_casts(node: fx.Node) -> fx.Node:
    """The node below copies, and casts between whole numbers."""
    while node.op == "call_function" and node.target in CASTS | COPIES:
        tensor = tensor_meta(node)
        if tensor is None or tensor.dtype not in (torch.int64, torch.int32):
            break
        node = source_of(node)
    return node
