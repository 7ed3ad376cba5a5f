"""Edits of a joint graph that placement passes share: inputs come and go, and the output follows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from moec.compiler.differentiate import Joint
from moec.compiler.graph import InputValue, Signature
from moec.compiler.partition import forward_nodes, is_view

BACKWARD = "is_backward"


class JointEditor:
    """Rewrites one joint. `finish` must be called at the end: it brings signature, inputs and output in line.

    Nodes that were forward work when the editor was made are known as such: `is_forward`.
    """

    def __init__(self, joint: Joint) -> None:
        self.joint = joint
        self._forward = forward_nodes(joint)
        values = list(zip(joint.inputs, joint.unit.signature.inputs, strict=True))
        self._grads = {joint.inputs[index]: node for index, node in joint.grads.items()}
        self._values: list[tuple[fx.Node, InputValue]] = values
        self._removed: list[fx.Node] = []

    @property
    def graph(self) -> fx.Graph:
        return self.joint.graph

    def weights(self) -> list[tuple[fx.Node, InputValue]]:
        """Placeholders of weights with their descriptions, in order."""
        return [(node, value) for node, value in self._values if value.kind == "weight"]

    def name_by_owner(self, tied: Mapping[str, str]) -> None:
        """Give each weight the name that owns it; further names of it, which the trace left unread, are dropped."""
        values = [
            (node, replace(value, name=tied.get(value.name, value.name)) if value.kind == "weight" else value)
            for node, value in self._values
        ]
        read = {value.name for node, value in values if node.users}
        taken: set[str] = set()
        for node, value in values:
            idle = not node.users and (value.name in read or value.name in taken)
            if value.kind == "weight" and idle and self.gradient(node) is None:
                self._removed.append(node)
            elif value.kind == "weight" and value.name in taken:
                self._join(next(other for other, known in values if known.name == value.name), node)
            else:
                taken |= {value.name} if value.kind == "weight" else set()
        self._values = [(node, value) for node, value in values if node not in self._removed]

    def _join(self, first: fx.Node, second: fx.Node) -> None:
        """Let one placeholder stand for both, with the sum of their gradients."""
        second.replace_all_uses_with(first)
        one, two = self._grads.get(first), self._grads.pop(second, None)
        self._removed.append(second)
        if one is None or two is None:
            if two is not None:
                self._grads[first] = two
            return
        with self.graph.inserting_after(self.last([one, two])):
            total = self.graph.call_function(torch.ops.aten.add.Tensor, (one, two))
        total.meta = dict(one.meta)
        self._grads[first] = total

    def is_forward(self, node: fx.Node) -> bool:
        return node in self._forward

    def gradient(self, placeholder: fx.Node) -> fx.Node | None:
        """The gradient that the joint returns for an input."""
        return self._grads.get(placeholder)

    def add_input(self, value: InputValue, fake: Tensor) -> fx.Node:
        """A new placeholder, after the weights and buffers and before the inputs of the caller."""
        position = next((i for i, (_, v) in enumerate(self._values) if v.kind == "input"), len(self._values))
        anchor = self._values[position - 1][0] if position else None
        with self.graph.inserting_after(anchor) if anchor is not None else self.graph.inserting_before(_first(self)):
            node = self.graph.placeholder(value.name.replace(".", "_").replace(":", "_") or "value")
        node.meta = {"val": fake, "custom": {"path": ""}}
        self._values.insert(position, (node, value))
        return node

    def set_gradient(self, placeholder: fx.Node, gradient: fx.Node) -> None:
        self._grads[placeholder] = gradient

    def remove_input(self, placeholder: fx.Node) -> None:
        """Take away an input that nothing reads any more, and its gradient."""
        self._values = [(node, value) for node, value in self._values if node is not placeholder]
        self._grads.pop(placeholder, None)
        self._removed.append(placeholder)

    def discard(self, node: fx.Node) -> None:
        """Take away a node that only the output still reads."""
        self._removed.insert(0, node)

    def call(self, target: Any, args: tuple[Any, ...], value: Any, *, path: str, backward: bool, wish: str) -> fx.Node:
        """A call at the graph's current insertion point; wish: its variable in the emitted program, if free."""
        node = self.graph.call_function(target, args)
        node.meta = {"val": value, "custom": {"path": path}, "wish": wish}
        if backward:
            node.meta["partitioner_tag"] = BACKWARD
        else:
            node.meta["partitioner_tag"] = "is_forward"
            self._forward.add(node)
        return node

    def separate_views(self, weight: fx.Node) -> None:
        """Give each backward user of a view of `weight` that the forward made a view of its own."""
        chain = [weight]
        for node in chain:
            for user in list(node.users):
                if self.is_forward(user) and is_view(user) and user not in chain:
                    chain.append(user)
        for view in chain[1:]:
            for user in [user for user in view.users if not self.is_forward(user) and user.op != "output"]:
                user.replace_input_with(view, self._twin(view, weight, user))

    def users(self, weight: fx.Node, *, backward: bool) -> list[fx.Node]:
        """Users on one side of the program, in no order."""
        return [user for user in weight.users if user.op != "output" and self.is_forward(user) != backward]

    def first(self, nodes: Iterable[fx.Node]) -> fx.Node:
        """The node that comes first in the graph."""
        wanted = set(nodes)
        return next(node for node in self.graph.nodes if node in wanted)

    def last(self, nodes: Iterable[fx.Node]) -> fx.Node:
        """The node that comes last in the graph."""
        wanted = set(nodes)
        return next(node for node in reversed(self.graph.nodes) if node in wanted)

    def finish(self) -> None:
        """Bring the joint's description in line with the graph."""
        joint = self.joint
        joint.inputs = [node for node, _ in self._values]
        index_of = {node: index for index, node in enumerate(joint.inputs)}
        joint.grads = {index_of[node]: grad for node, grad in self._grads.items()}
        joint.grads = dict(sorted(joint.grads.items()))
        signature = Signature(tuple(value for _, value in self._values), joint.unit.signature.outputs)
        joint.unit = replace(joint.unit, signature=signature)
        outputs = [*joint.results, *joint.buffers.values(), *joint.grads.values()]
        self.graph.output_node().args = (tuple(outputs),)
        for node in self._removed:
            self.graph.erase_node(node)
        self.graph.lint()

    def _twin(self, view: fx.Node, weight: fx.Node, before: fx.Node) -> fx.Node:
        source = view.args[0]
        assert isinstance(source, fx.Node)
        inner = source if source is weight else self._twin(source, weight, before)
        with self.graph.inserting_before(before):
            copy = self.graph.node_copy(view, lambda node: inner if node is source else node)
        copy.meta["partitioner_tag"] = BACKWARD
        return copy


def empty_like_of(node: fx.Node, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    """A fake tensor in the mode and on the device of a node's value."""
    return node.meta["val"].new_empty(tuple(shape), dtype=dtype)


def _first(editor: JointEditor) -> fx.Node:
    return next(iter(editor.graph.nodes))
