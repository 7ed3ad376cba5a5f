"""Pass recognize_experts: transformers' grouped-matmul experts become permute, grouped_linear and unpermute.

1. `sort(indices)`, the token of each sorted slot, its row, the counts per expert (histc, cumsum) -> permute.
2. `_grouped_mm` or transformers' fallback on those counts, with a bias looked up per row or not -> grouped_linear.
3. Rows times weights, put back into slot order and summed over the slots of a token -> unpermute.

What happens to the rows in between (activation, norms) stays as it is. Needed where graphs come through torch.compile;
a capture asks transformers for these ops directly.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

import moec.compiler.dialect  # noqa: F401  (registers torch.ops.moec)
from moec.compiler.graph import Unit, tensor_meta
from moec.compiler.matching import Failure, Match, match
from moec.compiler.nodes import Targets, aten, origin, source_of
from moec.compiler.pass_manager import Pass, PassContext, Report
from moec.compiler.pattern import Pattern, anything, cast, dim, item, items, number, op, var
from moec.passes.normalize import swapped_dims
from moec.passes.parts import RESHAPES
from moec.passes.recognize_norm import ADD, MUL
from moec.passes.rewrite import Finder, Refused, Rewriter, Rule, Sign, apply_rules

_SORT, _INDEX, _SUM = aten("sort.default", "sort.stable"), aten("index.Tensor"), aten("sum.dim_IntList")
_FLOOR_DIVIDE = aten("floor_divide.default")
_FALLBACK = "transformers.grouped_mm_fallback.default"


class RecognizeExperts(Pass):
    """See the module docstring."""

    name = "recognize_experts"
    requires = ("normal_form",)
    provides = ("experts",)
    changes_numerics = True

    def run(self, unit: Unit, context: PassContext) -> Report:
        report = Report()
        grouped = grouped_matmuls(unit.graph)
        if not grouped:
            return report
        # Each step builds on the results of the one before, so each is a walk of its own.
        apply_rules(unit, [_PERMUTE], report)
        apply_rules(unit, _linear_rules(grouped), report, [_linear_sign(grouped)])
        apply_rules(unit, [_UNPERMUTE], report, [_UNPERMUTE_SIGN])
        return report

    def expected(self, unit: Unit) -> str:
        left = [node for node in unit.graph.nodes if node.target in grouped_matmuls(unit.graph)]
        return f"{len(left)} grouped matrix products are in the graph, none was recognised" if left else ""


def grouped_matmuls(graph: fx.Graph) -> Targets:
    """The grouped matrix products that occur in the graph; the fallback exists only where transformers is loaded."""
    targets = {node.target for node in graph.nodes if node.op == "call_function"}
    return frozenset(t for t in targets if t in aten("_grouped_mm.default") or str(t) == _FALLBACK)


# 1. permute


def _find_permute(sort: fx.Node) -> Match | Failure:
    flat = match(_sorted_experts, sort, exclusive=False)
    if not isinstance(flat, Match):
        return flat
    shape = tensor_meta(flat["indices"])
    slots = next((user for user in sort.users if user.args[1] == 1), None)
    ids = next((user for user in sort.users if user.args[1] == 0), None)
    if shape is None or shape.dim() != 2 or slots is None or ids is None:
        return Failure((sort,), lambda: "the experts sorted are not [tokens, choices]")
    rows = [found for user in _reach(slots, 2) if isinstance(found := match(_rows, user, exclusive=False), Match)]
    offsets = [f for user in _reach(ids, 3) if isinstance(f := match(_offsets, user, exclusive=False), Match)]
    rows = [found for found in rows if found["slots"] is slots and found["choices"] == shape.shape[1]]
    offsets = [found for found in offsets if found["ids"] is ids]
    if len(rows) != 1 or len(offsets) != 1:
        return Failure((sort,), lambda: "the rows and the counts per expert are not both made of the sorted slots")
    captures = {
        "indices": flat["indices"],
        "slots": slots,
        "ids": ids,
        "rows": rows[0].root,
        "tokens": rows[0]["tokens"],
        "offsets": offsets[0].root,
        "experts": offsets[0]["experts"],
        "last": offsets[0]["last"],
    }
    nodes = (rows[0].root, offsets[0].root, slots, sort)
    return Match(rows[0].root, captures, nodes)


_flat = op(RESHAPES, var("indices"), items(anything()))
_sorted_experts = op(aten("sort.default"), _flat, dim(-1)) | op(aten("sort.stable"), _flat, anything(), dim(-1))
_token = op(_FLOOR_DIVIDE, var("slots"), number("choices"))
_token = _token | op(aten("div.Tensor_mode"), var("slots"), number("choices"), "floor")
_rows = op(_INDEX, var("tokens"), items(_token))
_ids = op(aten("to.dtype"), var("ids"), anything()) | var("ids")
_counts = op(aten("histc.default"), _ids, number("experts"), 0, number("last"))
_offsets = op(aten("cumsum.default"), _counts, dim(0), torch.int32)


def _reach(node: fx.Node, steps: int) -> list[fx.Node]:
    """Nodes within `steps` uses of a node."""
    found, border = [], [node]
    for _ in range(steps):
        border = [user for value in border for user in value.users]
        found += border
    return found


def _rewrite_permute(found: Match, rewriter: Rewriter) -> str:
    experts = found["experts"]
    if found["last"] != experts - 1:
        raise Refused(f"rows are counted for experts 0 to {found['last']}, not {experts - 1}")
    outputs = [found["rows"], found["slots"], found["offsets"]]
    rewriter.after_inputs([found["tokens"], found["indices"]], outputs)
    rows, order, offsets = rewriter.results(
        torch.ops.moec.permute.default, found["tokens"], found["indices"], experts, count=3
    )
    for old, new in zip(outputs, (rows, order, offsets), strict=True):
        rewriter.replace(old, new)
    return f"permute to {experts} experts"


_PERMUTE = Finder("permute", _SORT, _find_permute, _rewrite_permute)


# 2. grouped_linear


def _linear_rules(grouped: Targets) -> list[Rule]:
    product = op(grouped, var("x"), var("weight"), var("offsets"), name="product")
    looked_up = op(_INDEX, var("bias"), items(var("ids")), name="looked_up")
    return [
        Rule("grouped_linear", op(ADD, product, looked_up, commutes=True), _rewrite_linear),
        Rule("grouped_linear", product, _rewrite_linear),
    ]


def _rewrite_linear(found: Match, rewriter: Rewriter) -> str:
    offsets, weight = found["offsets"], found["weight"]
    permute = source_of(offsets) if offsets.target is operator.getitem else offsets
    if permute.target is not torch.ops.moec.permute.default:
        raise Refused("its row counts do not come from a recognised sort of expert indices")
    matrices = tensor_meta(weight)
    if matrices is None or matrices.dim() != 3:
        raise Refused("its weight is not one matrix per expert")
    if "bias" in found and not _are_sorted_experts(found["ids"], permute):
        raise Refused("its bias is not looked up by the expert of each row")
    transposed = swapped_dims(weight) != (1, 2)
    if not transposed:
        weight = source_of(weight)
    result = rewriter.call(
        torch.ops.moec.grouped_linear.default, found["x"], weight, offsets, found.get("bias"), transposed
    )
    rewriter.replace(found.root, result)
    return "grouped_linear" + (" with bias" if "bias" in found else "")


def _are_sorted_experts(ids: fx.Node, permute: fx.Node) -> bool:
    """Whether ids are the values of a sort of the same expert indices."""
    found = match(item(_sorted_experts, 0), ids, exclusive=False)
    return isinstance(found, Match) and origin(permute.args[1]) is found["indices"]  # type: ignore[arg-type]


def _linear_sign(grouped: Targets) -> Sign:
    return Sign("grouped_linear", op(grouped, *[anything()] * 5), "its weight or its counts have an unknown form")


# 3. unpermute


def _unpermute() -> Pattern:
    slots = var("slots")
    weights = op(_INDEX, op(RESHAPES, var("weights"), anything(), shared=True), items(slots))
    weighted = op(MUL, var("rows"), op(aten("unsqueeze.default"), weights, dim(-1)), commutes=True)
    slot_numbers = op(aten("arange.default"), *[anything()] * 5)
    empty = op(aten("empty_like.default"), slots, *[anything()] * 5)
    places = op(aten("index_put.default"), empty, items(slots), slot_numbers)
    back = op(_INDEX, cast(weighted, "rounded"), items(places))
    return op(_SUM, op(RESHAPES, back, anything(), name="choices"), dim(1))


def _rewrite_unpermute(found: Match, rewriter: Rewriter) -> str:
    slots, rows, weights = found["slots"], found["rows"], found["weights"]
    if source_of(slots).target is not torch.ops.moec.permute.default or slots.args[1] != 1:
        raise Refused("the rows are not put back in the order they were taken out")
    shape, choices = tensor_meta(weights), tensor_meta(found["choices"])
    if shape is None or choices is None or choices.shape[:2] != shape.shape:
        raise Refused("the weights are not [tokens, choices]")
    result = rewriter.call(torch.ops.moec.unpermute.default, rows, slots, weights)
    rewriter.replace(found.root, result)
    return f"unpermute {shape.shape[1]} rows per token"


_UNPERMUTE = Rule("unpermute", cast(_unpermute(), "final"), _rewrite_unpermute)
_UNPERMUTE_SIGN = Sign(
    "unpermute",
    op(aten("index_put.default"), op(aten("empty_like.default"), *[anything()] * 6), *[anything()] * 3),
    "the rows that it puts back are not weighted and summed per token",
)
