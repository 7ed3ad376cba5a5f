"""Regions of experts: what lies between a `permute` and its `unpermute`, and the weights that its products read.

`find_region` follows the rows of a permute. Every op on the way must treat each row on its own, with values that all
ranks share, so that it does not matter on which rank a row is, and in what order: `_ROW_WISE` says for each op when
that holds. `expert_weights` follows the matrices of a product back to parameters, through ops that leave the experts'
dimension alone. Both raise Refused, with the node and the reason, before anything has been changed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import moec.compiler.dialect  # noqa: F401  (registers torch.ops.moec)
from moec.compiler._torch_compat import OpOverload
from moec.compiler.graph import InputValue, tensor_meta
from moec.compiler.nodes import CASTS, COPIES, Targets, aten, bound_args, describe, parameters_of
from moec.passes.parts import RESHAPES, SLICES, SPLITS
from moec.passes.rewrite import Refused

_OPS = torch.ops.moec


@dataclass(frozen=True)
class Region:
    """rows, order, offsets: results of `permute`. body: all nodes that compute on rows, in graph order.

    products: the grouped_linear calls among them. ends: the unpermute calls that take the rows back.
    """

    permute: fx.Node
    rows: fx.Node
    offsets: fx.Node
    body: tuple[fx.Node, ...]
    products: tuple[fx.Node, ...]
    ends: tuple[fx.Node, ...]

    @property
    def experts(self) -> int:
        return int(self.permute.args[2])  # type: ignore[arg-type]


@dataclass(frozen=True)
class Stack:
    """The parameters [E, ...] behind one argument of a product, and the nodes between, in graph order."""

    weights: tuple[fx.Node, ...]
    between: tuple[fx.Node, ...]


def find_region(permute: fx.Node, inputs: Mapping[fx.Node, InputValue]) -> Region:
    """The region that starts at a `permute`; raises Refused. inputs: the unit's placeholders."""
    rows, order, offsets = (result_of(permute, index) for index in range(3))
    if rows is None or order is None or offsets is None:
        raise Refused("its rows, their order or their offsets are not used")
    body: dict[fx.Node, None] = {}
    ends: dict[fx.Node, None] = {}
    waiting = [rows]
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if user.target is _OPS.unpermute.default and user.args[0] is node:
                if user.args[1] is not order:
                    raise Refused(f"{describe(user)} puts the rows back in another order than that of {permute.name}")
                ends[user] = None
            elif user not in body:
                if user.op != "call_function":
                    raise Refused(f"{describe(node)} leaves the layer as rows sorted by expert")
                body[user] = None
                waiting.append(user)
    products = [node for node in body if node.target is _OPS.grouped_linear.default]
    if not products or not ends:
        missing = "no grouped_linear" if not products else "no unpermute"
        raise Refused(f"{missing} takes its rows")
    inside = {rows, *body}
    outside = {source for node in body if node not in products for source in node.all_input_nodes} - inside
    for node in body:
        reason = _mixes_rows(node, inside, offsets)
        if reason:
            raise Refused(f"{describe(node)} {reason}")
    for source in outside:
        reason = _differs_by_rank(source, inputs)
        if reason:
            user = next(node for node in body if source in node.all_input_nodes)
            raise Refused(f"{describe(user)} takes {describe(source)}, {reason}")
    return Region(permute, rows, offsets, tuple(sorted(body)), tuple(sorted(products)), tuple(sorted(ends)))


def expert_weights(region: Region, inputs: Mapping[fx.Node, InputValue]) -> Stack:
    """All parameters that the region's products read; raises Refused. inputs: the unit's placeholders."""
    weights: dict[fx.Node, None] = {}
    between: dict[fx.Node, None] = {}
    for product in region.products:
        for argument in (product.args[1], bound_args(product)[3]):
            waiting = [argument] if isinstance(argument, fx.Node) else []
            while waiting:
                node = waiting.pop()
                if node.op == "placeholder" and node in inputs:
                    _check_weight(node, inputs[node], region.experts)
                    weights[node] = None
                elif node not in between:
                    reason = _mixes_experts(node, region.experts)
                    if reason:
                        raise Refused(f"{describe(node)}, of which {describe(product)} takes its matrices, {reason}")
                    between[node] = None
                    waiting += [source for source in node.all_input_nodes if _leads(source, region.experts)]
    known = {*between, *region.products}
    for node in (*weights, *between):
        other = next((user for user in node.users if user not in known), None)
        if other is not None:
            raise Refused(f"{describe(node)} is used by {describe(other)} too, which is no product of these experts")
    return Stack(tuple(sorted(weights)), tuple(sorted(between)))


def same_size(one: Any, other: Any) -> bool:
    """Whether two sizes are the same number or expression; asks nothing of a symbol."""
    return _expression(one) == _expression(other)


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def result_of(node: fx.Node, index: int) -> fx.Node | None:
    """The node that is one result of an op with several, None where nothing takes it."""
    found = [user for user in node.users if user.target is operator.getitem and user.args[1] == index]
    return found[0] if len(found) == 1 else None


# what keeps rows apart


def _mixes_rows(node: fx.Node, inside: set[fx.Node], offsets: fx.Node) -> str:
    """Why a row of the result may depend on other rows, '' when it cannot."""
    if node.target is _OPS.grouped_linear.default:
        if node.args[0] not in inside or node.args[2] is not offsets:
            return "multiplies the rows by groups that are not the experts'"
        return "" if not any(argument in inside for argument in node.args[1:]) else "takes rows as matrices"
    rule = next((rule for targets, rule in _ROW_WISE if node.target in targets), None)
    if rule is None and not _is_pointwise(node.target):
        return "is not known to treat each row on its own"
    first = _rows_of(node, inside)
    for source in node.all_input_nodes:
        tensor = tensor_meta(source)
        aligned = tensor is not None and tensor.dim() == first.dim() and same_size(tensor.shape[0], first.shape[0])
        if source not in inside and aligned:
            return f"takes {describe(source)}, which has one entry per row but does not travel with them"
    return rule(node) if rule is not None else ""


def _rows_of(node: fx.Node, inside: set[fx.Node]) -> torch.Tensor:
    """The widest of the rows that a node takes."""
    values = [source.meta["val"] for source in node.all_input_nodes if source in inside]
    tensors = [tensor for value in values for tensor in (value if isinstance(value, list | tuple) else [value])]
    widest: torch.Tensor = max(tensors, key=lambda tensor: tensor.dim())
    return widest


def _differs_by_rank(node: fx.Node, inputs: Mapping[fx.Node, InputValue]) -> str:
    """Why a value from outside is not the same on all ranks, '' when it is: made of weights and constants."""
    seen: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        value = waiting.pop()
        if value in seen or not isinstance(value.meta.get("val"), torch.Tensor | list | tuple):
            continue  # sizes are those of the plan
        seen.add(value)
        if value in inputs and inputs[value].kind == "input":
            return f"which depends on the {inputs[value].name} of this rank"
        if torch.Tag.nondeterministic_seeded in getattr(value.target, "tags", ()):
            return "which is random"
        waiting += value.all_input_nodes
    return ""


def _is_pointwise(target: Any) -> bool:
    return isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags


def _not_over_first(node: fx.Node) -> str:
    """For ops that work along dimensions that they name."""
    value = _first_value(node)
    names = [name for name, _ in parameters_of(node.target)]
    given: Any = {
        name: argument
        for name, argument in zip(names, bound_args(node), strict=False)
        if name in ("dim", "dims", "dim0", "dim1")
    }
    dims = [
        dim for argument in given.values() for dim in (argument if isinstance(argument, list | tuple) else [argument])
    ]
    if not dims or any(not isinstance(dim, int) or dim % value.dim() == 0 for dim in dims):
        return "works along the first dimension"
    return ""


def _keeps_first(node: fx.Node) -> str:
    """For views: the first dimension is that of the input."""
    before, after = _first_value(node), node.meta["val"]
    return "" if after.dim() and same_size(before.shape[0], after.shape[0]) else "changes the first dimension"


def _keeps_order(node: fx.Node) -> str:
    dims = bound_args(node)[1]
    return "" if dims[0] % len(dims) == 0 else "moves the first dimension"


def _first_value(node: fx.Node) -> torch.Tensor:
    source: Any = node.args[0]
    source = source[0] if isinstance(source, list | tuple) else source
    value: torch.Tensor = source.meta["val"]
    return value


def _always(node: fx.Node) -> str:
    return ""


Keeps = Callable[[fx.Node], str]
_PASSED_ON: Targets = CASTS | COPIES | aten("detach.default") | frozenset({operator.getitem})
_LAYOUT: Sequence[tuple[Targets, Keeps]] = (
    (_PASSED_ON, _always),
    (SLICES | SPLITS | aten("select.int", "transpose.int", "cat.default", "unbind.int"), _not_over_first),
    (aten("permute.default"), _keeps_order),
    (RESHAPES | aten("unflatten.int", "unsqueeze.default", "squeeze.dim", "expand.default"), _keeps_first),
)
_ROW_WISE: Sequence[tuple[Targets, Keeps]] = (
    *_LAYOUT,
    (aten("sum.dim_IntList", "mean.dim", "amax.default", "softmax.int"), _not_over_first),
    (aten("linear.default", "sym_size.int"), _always),
    (
        frozenset(
            op.default for op in (_OPS.gated_mlp_act, _OPS.sigmoid_gate, _OPS.rms_norm, _OPS.l2_norm, _OPS.gated_norm)
        ),
        _always,
    ),
)


# what keeps experts apart


def _check_weight(node: fx.Node, value: InputValue, experts: int) -> None:
    if value.kind != "weight":
        raise Refused(f"its matrices come from the {value.kind} {value.name}, which is no parameter")
    if not _leads(node, experts):
        raise Refused(f"its matrices come from {value.name}, which is not one for each of the {experts} experts")


def _mixes_experts(node: fx.Node, experts: int) -> str:
    """Why an expert's part of the result may depend on another's, '' when it cannot."""
    if node.op != "call_function":
        return "is no parameter"
    if node.target in aten("stack.default"):
        return "puts parameters of separate modules together; experts are spread where they are one parameter [E, ...]"
    rule = next((rule for targets, rule in _LAYOUT if node.target in targets), None)
    if rule is None and not _is_pointwise(node.target):
        return "is not known to treat each expert on its own"
    if not any(_leads(source, experts) for source in node.all_input_nodes):
        return "is not made of one part per expert"
    return rule(node) if rule is not None else ""


def _leads(node: fx.Node, experts: int) -> bool:
    """Whether the first dimension is that of the experts."""
    value = node.meta.get("val")
    tensors = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(t, torch.Tensor) and t.dim() > 1 and t.shape[0] == experts for t in tensors)
