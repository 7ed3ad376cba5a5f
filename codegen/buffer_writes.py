"""When the emitted forward writes buffers: the graph knows their values, the layers read their memory.

Buffers are values in the outer graph, and a layer finds its own in the state. So what a layer returns as the new value
of a buffer is written right after its call, and a value that the outer graph made itself right before a call of a
layer that reads it, or at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from moec.compiler.differentiate import is_getitem
from moec.compiler.template import Template

Write = tuple[str, fx.Node]


@dataclass
class BufferWrites:
    """Writes (path, value) around each call of a layer, and those that remain at the end."""

    before: dict[fx.Node, list[Write]] = field(default_factory=dict)
    after: dict[fx.Node, list[Write]] = field(default_factory=dict)
    at_end: list[Write] = field(default_factory=list)


def buffer_writes(
    graph: fx.Graph, templates: Mapping[str, Template], tied: Mapping[str, str], final: Sequence[Write]
) -> BufferWrites:
    """Walk the outer forward in order, keeping what each buffer's memory holds.

    A call of a layer ends with the values of the template's `changing` buffers. final: path -> value
    after the forward. tied: other path of a buffer -> its owner.
    """
    writes = BufferWrites()
    memory: dict[str, fx.Node | None] = {}

    def place(path: str, value: fx.Node) -> list[Write]:
        """The write that makes the memory of a buffer hold `value`, if it takes one."""
        owner, new = tied.get(path, path), None if value.op == "placeholder" else value
        if memory.get(owner) is new:
            return []
        memory[owner] = new
        return [(owner, value)]

    for node in graph.find_nodes(op="call_function", target=torch.ops.moec.region.default):
        template, path, _, reads = node.args
        known = templates[str(template)]
        named = zip(known.changing, reads[len(reads) - len(known.changing) :], strict=True)  # type: ignore[arg-type, index]
        writes.before[node] = [write for name, value in named for write in place(f"{path}.{name}", value)]
        results = {user.args[1]: user for user in node.users if is_getitem(user)}
        count = known.result_count - len(known.mutated)
        made = [(f"{path}.{name}", results.get(count + index)) for index, name in enumerate(known.mutated)]
        writes.after[node] = [write for name, value in made if value is not None for write in place(name, value)]
    writes.at_end = [write for name, value in final for write in place(name, value)]
    return writes
