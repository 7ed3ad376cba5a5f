"""Pass fuse_experts: an expert layer becomes the ops that its kernels are: expert_slots, expert_up, expert_down.

    rows, order, offsets = permute(x, indices)
    act = activation(grouped_linear(rows, first, offsets, bias))
    y = unpermute(grouped_linear(act, second, offsets, bias), order, weights)

1. From the second product the pass reads back to the first, through pointwise operators alone: they become one
   expression (`pointwise.py`), which the first product's kernel applies. Nothing between may be used elsewhere.
2. Where the rows are those of a `permute` and nothing else takes them, `expert_up` gathers them, and of the permute
   the sort is left. Otherwise, as between ranks, it takes the rows as they come.
3. Where the result goes to the `unpermute` of that permute alone, `expert_down` sums the rows. Otherwise it gives rows.
4. Router weights of the rows (`row_weights.py`) may stand before the second product, and their sum then has weights 1;
   or at the tokens, before the first one. Both become arguments of the ops, whose kernels multiply on the way.

The pass is for CUDA devices, where there are kernels of these forms. On others the references would do what those of
the ops before do, and the program would be harder to read for nothing; there it runs where `plan.enable` names it. It
comes after `shard_experts`, which knows rows and products on their own.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import moec.compiler.dialect  # noqa: F401  (registers torch.ops.moec)
from moec.compiler.graph import Unit, tensor_meta
from moec.compiler.nodes import CASTS, bound_args, describe, source_of, used_outside
from moec.compiler.pass_manager import Pass, PassContext, Report
from moec.passes.expert_regions import result_of, same_size
from moec.passes.pointwise import Pointwise, read_pointwise
from moec.passes.rewrite import Refused, Rewriter, erase_dead
from moec.passes.row_weights import RowWeights, are_ones, read_row_weights

_OPS = torch.ops.moec
_LINEAR = _OPS.grouped_linear.default


class FuseExperts(Pass):
    """See the module docstring."""

    name = "fuse_experts"
    stage = "sharded"
    requires = ("normal_form",)
    provides = ("fused_experts",)
    changes_numerics = True
    device = "cuda"

    def run(self, unit: Unit, context: PassContext) -> Report:
        report = Report()
        for down in unit.graph.find_nodes(op="call_function", target=_LINEAR):
            if not self.fits(down, context) or not _has_product_above(down):
                continue
            try:
                layer = _find(down)
            except Refused as refused:
                report.near_miss(down, "experts", str(refused))
                continue
            report.match(_fuse(layer), _text(layer))
        return report

    def expected(self, unit: Unit) -> str:
        left = [node for node in unit.graph.find_nodes(op="call_function", target=_LINEAR) if _on(node, self.device)]
        return f"{len(left)} products of experts are in the graph, none was fused with its activation" if left else ""

    def fits(self, node: fx.Node, context: PassContext) -> bool:
        """Whether a node is on the device that the pass is for, or the plan wants the pass on any."""
        return _on(node, self.device) or (context.plan is not None and self.name in context.plan.enable)


@dataclass(frozen=True)
class _Layer:
    """What becomes one layer. rows: what the first product takes. permute, end: None where rows come or go.

    on_act, on_tokens: weights of the activated rows, and of the gathered ones.
    """

    up: fx.Node
    middle: Pointwise
    down: fx.Node
    rows: fx.Node
    permute: fx.Node | None
    end: fx.Node | None
    on_act: RowWeights | None
    on_tokens: RowWeights | None


def _on(node: fx.Node, device: str) -> bool:
    tensor = tensor_meta(node)
    return tensor is not None and tensor.device.type == device


def _has_product_above(down: fx.Node) -> bool:
    """Whether the rows of a product are made of another one's, on the same offsets: the second of a layer."""
    offsets, seen, waiting = down.args[2], set(), [down.args[0]]
    while waiting:
        node = waiting.pop()
        if node in seen or not isinstance(node, fx.Node) or node.target in _ENDS:
            continue
        if node.target is _LINEAR:
            return node.args[2] is offsets
        seen.add(node)
        waiting += node.all_input_nodes
    return False


def _find(down: fx.Node) -> _Layer:
    """The layer whose second product this is; raises Refused."""
    x, _, offsets, *_ = bound_args(down)
    on_act = read_row_weights(x)
    middle = read_pointwise(x if on_act is None else on_act.rows, {_LINEAR})
    up, inner = middle.product, (*middle.inner, *(on_act.inner if on_act else ()))
    if bound_args(up)[2] is not offsets:
        raise Refused(f"{describe(up)} has other groups than {describe(down)}")
    used = used_outside([up, *inner], {down, *inner})
    if used is not None:
        raise Refused(f"{describe(used)} is used outside of the layer too")
    before, after = tensor_meta(up), tensor_meta(x)
    if before is None or after is None or before.dtype != after.dtype:
        raise Refused(f"the activation turns {describe(up)} into another dtype")
    rows: fx.Node = bound_args(up)[0]
    on_tokens = _weights_of_tokens(rows, offsets, up)
    permute = _gathered(rows if on_tokens is None else on_tokens.rows, offsets)
    layer = _Layer(up, middle, down, rows, permute, _summed(down, permute), on_act, on_tokens)
    _check_weights(layer)
    return layer


def _weights_of_tokens(rows: fx.Node, offsets: fx.Node, up: fx.Node) -> RowWeights | None:
    """The weights of gathered rows; None as well where something else takes those: they are made, and come as rows."""
    found = read_row_weights(rows)
    permute = None if found is None else _gathered(found.rows, offsets)
    if found is None or permute is None or used_outside(found.inner, {up, *found.inner}) is not None:
        return None
    return None if _misplaced(found, permute, up) else found


def _check_weights(layer: _Layer) -> None:
    """Raise Refused for weights of the activated rows that `expert_up` cannot apply."""
    if layer.on_act is None:
        return
    what = f"the weights in {describe(layer.on_act.inner[-1])}"
    if layer.permute is None or layer.end is None:
        raise Refused(f"{what} need the rows of a permute, and their sum")
    reason = _misplaced(layer.on_act, layer.permute, layer.up)
    if reason:
        raise Refused(f"{what} {reason}")
    outer = layer.end.args[2]
    if not isinstance(outer, fx.Node) or not are_ones(outer):
        raise Refused(f"{what} are not the only ones: {describe(layer.end)} has others")


def _misplaced(found: RowWeights, permute: fx.Node, up: fx.Node) -> str:
    """Why weights are not those of the permute's slots, or come too late; '' when they fit."""
    indices, weights = tensor_meta(permute.args[1]), tensor_meta(found.weights)  # type: ignore[arg-type]
    if found.order is not result_of(permute, 1):
        return "are in another order than the rows"
    if indices is None or weights is None or not all(map(same_size, indices.shape, weights.shape)):
        return "are not one for each slot"
    return "" if found.weights < up else "are computed after the first product"


def _gathered(rows: fx.Node, offsets: fx.Node) -> fx.Node | None:
    """The permute whose rows these are, cast or not, if nothing else takes them."""
    value = rows
    while value.target in CASTS and len(value.users) == 1:
        value = source_of(value)
    permute = value.args[0] if value.target is operator.getitem else None
    if not isinstance(permute, fx.Node) or permute.target is not _OPS.permute.default:
        return None
    whole = value.args[1] == 0 and len(value.users) == 1 and len(rows.users) == 1
    return permute if whole and offsets is result_of(permute, 2) else None


def _summed(down: fx.Node, permute: fx.Node | None) -> fx.Node | None:
    """The unpermute that takes the rows of the second product, if that is all that does."""
    if permute is None or len(down.users) != 1:
        return None
    (user,) = down.users
    fits = user.target is _OPS.unpermute.default and user.args[0] is down and user.args[1] is result_of(permute, 1)
    return user if fits else None


def _fuse(layer: _Layer) -> fx.Node:
    """Rewrite one layer; returns what gives its result now."""
    graph = layer.down.graph
    x, first, offsets, first_bias, first_transposed = bound_args(layer.up)
    _, second, _, second_bias, second_transposed = bound_args(layer.down)
    order, position, choices = None, None, 0
    if layer.permute is not None:
        x, order, position, offsets, choices = _slots(layer, layer.permute)
    activation, interleaved = layer.middle.expression.text, layer.middle.interleaved
    of_tokens, of_act = (None if found is None else found.weights for found in (layer.on_tokens, layer.on_act))
    begin = Rewriter(graph, [layer.up, *layer.middle.inner], layer.up)
    pre, act = begin.results(
        _OPS.expert_up.default,
        x, first, offsets, order, position, first_bias, of_tokens, of_act, activation, choices, interleaved,
        first_transposed, count=2,
    )  # fmt: skip
    end = layer.end or layer.down
    finish = Rewriter(graph, [layer.down, end], end)
    arguments: tuple[Any, ...] = (None, None, second_bias, None)
    if layer.end is not None:
        arguments = (order, position, second_bias, layer.end.args[2] if of_act is None else of_act)
    y = finish.call(
        _OPS.expert_down.default,
        pre, act, second, offsets, *arguments, activation, interleaved, second_transposed, of_act is not None,
    )  # fmt: skip
    end.replace_all_uses_with(y)
    erase_dead(graph, [end])
    return y


def _slots(layer: _Layer, permute: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node, int]:
    """Sort without gathering: tokens, order, position, offsets, choices."""
    tokens, indices, experts = bound_args(permute)
    sort = Rewriter(permute.graph, [permute], permute)
    order, position, offsets = sort.results(_OPS.expert_slots.default, indices, experts, count=3)
    for index, new in ((1, order), (2, offsets)):
        old = result_of(permute, index)
        if old is not None:
            old.replace_all_uses_with(new)
    wanted, given = layer.rows.meta["val"].dtype, tokens.meta["val"].dtype
    if wanted != given:
        tokens = Rewriter(permute.graph, [layer.rows], layer.rows).call(torch.ops.aten.to.dtype, tokens, wanted)
    return tokens, order, position, offsets, int(indices.meta["val"].shape[1])


def _text(layer: _Layer) -> str:
    parts = [] if layer.permute is None else ["gather"] if layer.on_tokens is None else ["weighted gather"]
    parts += ["up", f"({layer.middle.expression.text})"]
    parts += ["down"] if layer.on_act is None else ["weighted down"]
    ends = [] if layer.end is None else ["weighted sum"] if layer.on_act is None else ["sum"]
    return " ".join([*parts, *ends])


_ENDS = {
    _OPS.permute.default,
    _OPS.unpermute.default,
    _OPS.exchange.default,
    _OPS.exchange_back.default,
    _OPS.exchange_padded.default,
    _OPS.exchange_padded_back.default,
}
"""Where the rows of a layer begin, and where those of another one end."""
