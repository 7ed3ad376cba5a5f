"""Where a value comes from: projections, attention, weights. For conditions of rewrites and for `Pass.expected`."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

import moec.compiler.dialect  # noqa: F401  (registers torch.ops.moec)
from moec.compiler.graph import Unit
from moec.compiler.nodes import CASTS, COPIES, aten, origin, source_of
from moec.passes.parts import RESHAPES, Part, part_of

_ADD, _MUL = aten("add.Tensor", "add.Scalar"), aten("mul.Tensor")
PROJECTIONS = aten("linear.default", "matmul.default", "mm.default", "addmm.default", "_grouped_mm.default") | {
    torch.ops.moec.grouped_linear.default
}
_GROUPED_NAMES = ("grouped_mm_fallback.default",)
_ATTENTION = {torch.ops.moec.attention.default, torch.ops.moec.sparse_attention.default}
_SDPA = aten("scaled_dot_product_attention.default")
_LAYOUT = RESHAPES | aten("transpose.int", "matmul.default", "to.dtype", "permute.default")
_LINEAR_POINTWISE = _ADD | _MUL | aten("sub.Tensor", "div.Tensor", "neg.default")
ACTIVATIONS = aten(
    "sigmoid.default", "tanh.default", "silu.default", "gelu.default", "relu.default", "softplus.default",
    "clamp.default", "clamp_max.default", "clamp_min.default", "exp.default", "pow.Tensor_Scalar", "square.default",
    "erf.default", "hardswish.default", "hardsigmoid.default", "leaky_relu.default", "elu.default", "mish.default",
    "relu6.default", "log.default", "log1p.default", "sin.default", "cos.default", "log_sigmoid.default",
)  # fmt: skip


def is_projection(node: fx.Node) -> bool:
    """Whether a node is a (grouped) linear, a part or view of one, or one plus its bias."""
    return projected(node) is not None


@dataclass(frozen=True)
class Projected:
    """A projection, and which part of it where it is cut up."""

    projection: fx.Node
    part: Part | None

    def overlaps(self, other: Projected) -> bool:
        """Whether two may be the same values."""
        if self.projection is not other.projection:
            return False
        return self.part is None or other.part is None or self.part == other.part


def projected(node: fx.Node) -> Projected | None:
    """The projection that a node is (a part or view of), perhaps plus a bias; None for anything else."""
    found: Part | None = None
    while True:
        node = origin(node)
        part = part_of(node)
        if part is not None:
            node, found = part.source, part
        elif node.target in RESHAPES or node.target in _ADD:
            node = source_of(node)
        elif node.target in PROJECTIONS or getattr(node.target, "__name__", "") in _GROUPED_NAMES:
            return Projected(node, found)
        else:
            return None


def input_of(projection: fx.Node) -> fx.Node:
    """What a projection projects, below views and lossless casts."""
    node = projection.args[1] if projection.target in aten("addmm.default") else projection.args[0]
    assert isinstance(node, fx.Node)
    while origin(node) is not node or node.target in RESHAPES:
        node = origin(node) if origin(node) is not node else source_of(node)
    return node


def attention_below(node: fx.Node) -> fx.Node | None:
    """The attention op whose output `node` is, up to layout, casts and a product per head."""
    while True:
        node = origin(node)
        if node.op != "call_function":
            return None
        if node.target is operator.getitem and source_of(node).target in _ATTENTION:
            return source_of(node) if node.args[1] == 0 else None
        if node.target in _SDPA:
            return node
        if node.target not in _LAYOUT:
            return None
        node = source_of(node)


@dataclass(frozen=True)
class Pointwise:
    """A pointwise function of projections. bent: whether it has an activation, and is not just scaled."""

    projections: tuple[Projected, ...]
    bent: bool


def pointwise_of_projections(node: fx.Node) -> Pointwise | None:
    """The projections that a value is a pointwise function of; None where anything else goes in."""
    found: list[Projected] = []
    waiting, seen, bent = [node], set(), False
    while waiting:
        value = origin(waiting.pop())
        if value in seen:
            continue
        seen.add(value)
        leaf = projected(value)
        if leaf is not None:
            found.append(leaf)
        elif value.target in ACTIVATIONS or value.target in _LINEAR_POINTWISE:
            bent = bent or value.target in ACTIVATIONS
            waiting += value.all_input_nodes
        else:
            return None
    return Pointwise(tuple(found), bent)


def feeds_projection(node: fx.Node) -> bool:
    """Whether a value goes into a projection, directly or through views, casts and scaling."""
    waiting, seen = [node], {node}
    while waiting:
        for user in waiting.pop().users:
            if user.target in PROJECTIONS:
                return True
            passing = user.target in CASTS | COPIES | RESHAPES or (
                user.target in _MUL and len(user.all_input_nodes) == 1
            )
            if passing and user not in seen:
                seen.add(user)
                waiting.append(user)
    return False


def weight_values(unit: Unit) -> set[fx.Node]:
    """Values that only weights, buffers and constants go into."""
    found = {node for node, value in unit.placeholders() if value.kind != "input"}
    for node in unit.graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "get_attr" or (node.op == "call_function" and inputs and all(i in found for i in inputs)):
            found.add(node)
    return found


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Some nodes and all that goes into them."""
    seen: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    return seen
