"""Partition a joint graph into forward and backward, deciding per value how it reaches the backward.

1. The forward is everything that results and new buffer values need; the rest is backward.
2. A forward value that the backward uses is kept (saved in HBM), offloaded (saved in host memory, `moec::offload` and
   `moec::fetch`), or recomputed, as `Choices` say. What a recomputed value is made from has to be available too, each
   in the way that the choices say of it. Views of a value are always recomputed from what they view, so nothing is
   saved twice.
3. Never recomputed, whatever the choices say: routing decisions and other ops whose definition forbids it, random ops,
   and reads of buffers that the forward writes.
4. What runs again, and what comes back, does so right before it is read first.
5. A size that is data (the rows that an exchange delivers) is read off a tensor that backward has, else saved itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import fx

from moec.compiler._torch_compat import OpOverload
from moec.compiler.dialect.registry import lookup, nbytes
from moec.compiler.differentiate import Joint, is_getitem, is_tensor

aten = torch.ops.aten
_OFFLOAD = torch.ops.moec.offload.default

Decision = Literal["keep", "offload", "recompute"]


@dataclass(frozen=True)
class Choice:
    """What a value is meant for, and why."""

    decision: Decision
    reason: str


DECISIONS = {
    aten.topk.default,
    aten.sort.default,
    aten.sort.stable,
    aten.argsort.default,
    aten.argmax.default,
    aten.argmin.default,
}
"""Ops whose indices hang on which of two numbers is larger, beside those of the dialect that say so."""

_COLLECTIVE = "_c10d_functional"

KEEP = Choice("keep", "backward uses it")
RECOMPUTE = Choice("recompute", "the plan recomputes it")
OFFLOAD = Choice("offload", "the plan offloads it")


@dataclass(frozen=True)
class Choices:
    """What is meant for the values of one joint graph, and for the inputs of a layer: by node name, and for the rest.

    Inputs are kept or offloaded, and follow `by_name` alone.
    """

    rest: Choice = KEEP
    by_name: tuple[tuple[str, Choice], ...] = ()


def every(choice: Choice) -> Choices:
    """The same for all values."""
    return Choices(rest=choice)


@dataclass(frozen=True)
class Placement:
    """How one forward value reaches the backward, and why."""

    name: str
    path: str
    op: str
    bytes: int
    decision: Decision
    reason: str


@dataclass
class Partitioned:
    """Forward and backward graphs of a unit.

    forward: (inputs) -> results, new buffer values, saved values. backward: (inputs it needs, saved, tangents) ->
    gradients. Placeholders carry meta["role"] = ("input", index) | ("saved", index) | ("tangent", index).
    """

    joint: Joint
    forward: fx.Graph
    backward: fx.Graph
    saved: list[fx.Node]
    placements: list[Placement] = field(default_factory=list)

    @property
    def saved_bytes(self) -> int:
        return sum(nbytes(node.meta["val"]) for node in self.saved)

    def copies(self) -> dict[fx.Node, str]:
        """Nodes of both graphs that move a value to host memory or back -> the name of the value."""
        outputs: Sequence[fx.Node] = self.forward.output_node().args[0]  # type: ignore[assignment]
        pairs = zip(outputs[len(outputs) - len(self.saved) :], self.saved, strict=True)
        out = {node: value.name for node, value in pairs if node.target is _OFFLOAD}
        back = self.backward.find_nodes(op="call_function", target=torch.ops.moec.fetch.default)
        return out | {node: self.saved[node.args[0].meta["role"][1]].name for node in back}  # type: ignore[union-attr]


def partition(joint: Joint, choices: Choices = Choices(), *, changing: Collection[str] = ()) -> Partitioned:
    """Split `joint`, with each value going the way that `choices` say where it may.

    changing: names of inputs that something else writes between this forward and its backward.
    """
    changed = {
        joint.inputs[i] for i, v in enumerate(joint.unit.signature.inputs) if v.name in {*joint.buffers, *changing}
    }
    _copy_changed(joint, changed)
    forward = forward_nodes(joint)
    backward = [node for node in joint.graph.nodes if node.op == "call_function" and node not in forward]
    chooser = _Chooser(changed, choices)
    # A chain that only the backward asks for may still be pure forward work (a transposed weight): it stays there.
    for node in [*backward, *joint.grads.values()]:
        own = node in forward or _is_data_size(node, forward)
        for source in [node] if own else node.all_input_nodes:
            if own or source in forward:
                chooser.need(source)
    chooser.place_sizes()
    return Partitioned(
        joint,
        _forward_graph(joint, forward | set(chooser.saved), chooser),
        _backward_graph(joint, backward, chooser),
        chooser.saved,
        chooser.placements,
    )


def forward_nodes(joint: Joint) -> set[fx.Node]:
    """The nodes, inputs included, that results and new buffer values need."""
    found = _ancestors([*joint.results, *joint.buffers.values()])
    return found | {
        node
        for node in joint.graph.nodes
        if (is_getitem(node) and node.args[0] in found) or node.meta.get("before_write")
    }


def _copy_changed(joint: Joint, changed: Collection[fx.Node]) -> None:
    """The backward reads the value that a buffer had before the step wrote it: give it a copy to keep."""
    for node in joint.inputs:
        readers = [user for user in node.users if user.meta.get("partitioner_tag") == "is_backward"]
        if node in changed and readers:
            with joint.graph.inserting_before(next(n for n in joint.graph.nodes if n.op != "placeholder")):
                copy = joint.graph.call_function(aten.clone.default, (node,))
            copy.meta = {**node.meta, "partitioner_tag": "is_forward", "before_write": True}
            for reader in readers:
                reader.replace_input_with(node, copy)


def _is_data_size(node: fx.Node, forward: set[fx.Node]) -> bool:
    """Whether a node is the size of a forward value, and data: only backward asks, but forward can answer."""
    value = node.meta.get("val")
    of_forward = node.target is aten.sym_size.int and node.args[0] in forward
    return of_forward and isinstance(value, torch.SymInt) and not value.node.has_hint()


def may_recompute(node: fx.Node) -> tuple[bool, str]:
    """Whether an op may run again in backward, and the reason if not."""
    definition = lookup(node.target)
    if definition is not None and not definition.recompute:
        return False, f"{definition.name} is a decision that must be taken once"
    tags = getattr(node.target, "tags", ())
    if node.target in DECISIONS:
        return False, "it chooses by comparing, and near-ties may fall another way"
    if torch.Tag.nondeterministic_seeded in tags:
        return False, "it draws random numbers"
    if str(node.target).startswith(("moec.region", "moec::region", _COLLECTIVE)):
        return False, "a call of a layer or a collective runs once"
    return True, ""


def may_offload(node: fx.Node) -> bool:
    """Whether a value can wait in host memory: one dense tensor, and no weights that ranks have gathered."""
    value = node.meta.get("val")
    gathered = str(node.target).startswith(_COLLECTIVE)
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not gathered


class _Chooser:
    def __init__(self, changed: Collection[fx.Node], choices: Choices) -> None:
        self._saved: dict[fx.Node, None] = {}
        self.offloaded: set[fx.Node] = set()
        self.again: set[fx.Node] = set()
        self.placements: list[Placement] = []
        self.sizes: dict[fx.Node, tuple[fx.Node, int] | None] = {}
        self._rest, self._named = choices.rest, dict(choices.by_name)
        self._changed = changed

    @property
    def saved(self) -> list[fx.Node]:
        return list(self._saved)

    def need(self, node: fx.Node) -> None:
        """Make `node`'s value available in backward, and with it all that running it again takes."""
        pending = [node]
        while pending:
            pending += reversed(self._decide(pending.pop()))

    def _decide(self, node: fx.Node) -> list[fx.Node]:
        """Place one value; returns the values that must be available for it."""
        if node in self.again or node in self._saved or node.op == "get_attr":
            return []
        if node.op == "placeholder":
            choice = self._named.get(node.name, KEEP)
            if choice.decision == "offload" and may_offload(node):
                self._save(node, choice.reason, offload=True)
            return []
        if not _has_tensor(node):
            return self._note_size(node)
        maker = node.args[0] if is_getitem(node) and not is_view(node) else node
        assert isinstance(maker, fx.Node)
        allowed, reason = may_recompute(maker)
        changed = _reads_any(node, self._changed)
        if changed:
            allowed, reason = False, "it reads a buffer that the forward changes"
        if is_view(node) and not changed:
            return self._run_again(node, maker, "a view of a value at hand")
        choice = self._named.get(node.name, self._rest)
        if choice.decision == "recompute" and allowed:
            return self._run_again(node, maker, choice.reason)
        offload = choice.decision == "offload" and may_offload(node)
        refused = reason if choice.decision == "recompute" else ""
        self._save(node, refused or (choice if offload else _kept(choice)).reason, offload=offload)
        return []

    def place_sizes(self) -> None:
        """Find a tensor at hand for each size that is data; the size is saved where there is none."""
        homes = {
            str(size): (node, dim)
            for node in self.saved
            if is_tensor(node) and node not in self.offloaded
            for dim, size in enumerate(node.meta["val"].shape)
            if isinstance(size, torch.SymInt)
        }
        for node in self.sizes:
            if node.args[0] not in self.again and node.args[0] not in self._saved:
                self.sizes[node] = homes.get(str(node.meta["val"]))
                if self.sizes[node] is None:
                    self._saved[node] = None

    def _note_size(self, node: fx.Node) -> list[fx.Node]:
        value = node.meta.get("val")
        if not isinstance(value, torch.SymInt) or value.node.has_hint():
            return []
        if node.target is not aten.sym_size.int:
            return node.all_input_nodes
        self.sizes[node] = None
        return []

    def _run_again(self, node: fx.Node, maker: fx.Node, reason: str) -> list[fx.Node]:
        """Run `node` again in backward; of several results of one op, the op runs again once."""
        self.again |= {node, maker}
        if is_tensor(node) and not is_view(node):
            self._note(node, "recompute", reason)
        return maker.all_input_nodes

    def _save(self, node: fx.Node, reason: str, *, offload: bool) -> None:
        self._saved[node] = None
        if offload:
            self.offloaded.add(node)
        self._note(node, "offload" if offload else "keep", reason)

    def _note(self, node: fx.Node, decision: Decision, reason: str) -> None:
        op = node.args[0] if is_getitem(node) else node
        self.placements.append(
            Placement(
                node.name,
                str((node.meta.get("custom") or {}).get("path", "")),
                str(op.target) if isinstance(op, fx.Node) else str(node.target),
                nbytes(node.meta["val"]),
                decision,
                reason,
            )
        )


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen


def _kept(choice: Choice) -> Choice:
    """Why a value is kept for which a choice was made, or for which another one cannot be carried out."""
    return choice if choice.decision == "keep" else KEEP


def _forward_graph(joint: Joint, forward: set[fx.Node], chooser: _Chooser) -> fx.Graph:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for index, node in enumerate(joint.inputs):
        copies[node] = _placeholder(graph, node, ("input", index))
    parked = {node: _park(graph, node, copies[node]) for node in joint.inputs if node in chooser.offloaded}
    for node in joint.graph.nodes:
        if node in forward and node.op in ("call_function", "get_attr"):
            copies[node] = graph.node_copy(node, lambda source: copies[source])
            if node in chooser.offloaded:
                parked[node] = _park(graph, node, copies[node])
    outputs = [copies[node] for node in (*joint.results, *joint.buffers.values())]
    graph.output((*outputs, *(parked.get(node) or copies[node] for node in chooser.saved)))
    return graph


def _backward_graph(joint: Joint, backward: list[fx.Node], chooser: _Chooser) -> fx.Graph:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for index, node in enumerate(joint.inputs):
        if node not in chooser.offloaded:
            copies[node] = _placeholder(graph, node, ("input", index))
    for index, node in enumerate(chooser.saved):
        copies[node] = _placeholder(graph, node, ("saved", index))
    for index, node in joint.tangents.items():
        copies[node] = _placeholder(graph, node, ("tangent", index))
    back = [_come_back(graph, node, copies) for node in chooser.saved if node in chooser.offloaded]
    for node, home in chooser.sizes.items():
        if home is not None:
            copies[node] = graph.call_function(aten.sym_size.int, (copies[home[0]], home[1]))
            copies[node].meta = dict(node.meta)
    wanted = set(backward) | chooser.again
    sizes = _ancestors([node for node in wanted]) - wanted
    for node in joint.graph.nodes:
        if node in copies or node.op not in ("call_function", "get_attr"):
            continue
        small = node in sizes and (node.op == "get_attr" or not _has_tensor(node))
        if (node in wanted or small) and all(source in copies for source in node.all_input_nodes):
            copies[node] = graph.node_copy(node, lambda source: copies[source])
    graph.output(tuple(copies[node] for node in joint.grads.values()))
    graph.eliminate_dead_code()
    _run_late(graph, {copies[node] for node in chooser.again if node in copies} | set(back))
    for node in graph.find_nodes(op="placeholder"):
        if not node.users:
            graph.erase_node(node)
    graph.lint()
    return graph


def _park(graph: fx.Graph, node: fx.Node, value: fx.Node) -> fx.Node:
    parked = graph.call_function(_OFFLOAD, (value,))
    fake = node.meta["val"]
    parked.meta = {**node.meta, "val": _OFFLOAD(fake)}
    return parked


def _come_back(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """Let a saved value be the one that is fetched from host memory."""
    parked, fake = copies[node], node.meta["val"]
    parked.meta = {**parked.meta, "val": _OFFLOAD(fake)}
    copies[node] = graph.call_function(torch.ops.moec.fetch.default, (parked, fake.device))
    copies[node].meta = {**node.meta, "val": fake}
    return copies[node]


def _run_late(graph: fx.Graph, movable: set[fx.Node]) -> None:
    """Move what is made in backward right before its first reader, so that it does not lie about before."""
    made: set[fx.Node] = set()
    for node in graph.nodes:
        if node in movable and (not is_view(node) or any(source in made for source in node.all_input_nodes)):
            made.add(node)
    for node in reversed(list(graph.nodes)):
        if node in made and node.users:
            min(node.users).prepend(node)


def _placeholder(graph: fx.Graph, node: fx.Node, role: tuple[str, int]) -> fx.Node:
    copy = graph.placeholder(node.name)
    copy.meta = {**node.meta, "role": role}
    return copy


def _has_tensor(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor | tuple | list)


def is_view(node: fx.Node) -> bool:
    """Whether a node yields the memory of its first input, or is as cheap as if it did."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return is_getitem(node) and is_view(node.args[0])  # type: ignore[arg-type]
    if node.target in _COPYING_VIEWS:
        return True
    returns = node.target._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


# `reshape` is a view wherever it can be one; running it again costs at most a copy.
_COPYING_VIEWS = {aten.reshape.default}


def _reads_any(node: fx.Node, sources: Collection[fx.Node]) -> bool:
    """Whether a node reads the memory of one of `sources`, directly or through views."""
    return any(
        source in sources or (is_view(source) and _reads_any(source, sources)) for source in node.all_input_nodes
    )
