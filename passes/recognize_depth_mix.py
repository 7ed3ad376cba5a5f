"""Pass recognize_depth_mix: a softmax mixture over depth becomes depth_mix with its list of sources.

    values = stack(sources)                                          along a new dimension before the last
    score_j = (norm * proj) . values_j / sqrt(mean(values_j^2) + eps)
    result = sum_j softmax(score)_j values_j

The norm may be applied to the scores or to the values before them. Comes before recognize_norm, which would take the
norm inside for itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

import moec.compiler.dialect  # noqa: F401  (registers torch.ops.moec)
from moec.compiler.graph import Unit, tensor_meta
from moec.compiler.matching import Match
from moec.compiler.nodes import CASTS, COPIES, aten, bound_args, describe, origin, source_of
from moec.compiler.pass_manager import Pass, PassContext, Report
from moec.compiler.pattern import Pattern, anything, cast, dim, number, op, var
from moec.passes.origins import ancestors
from moec.passes.parts import RESHAPES
from moec.passes.recognize_norm import ADD, MUL
from moec.passes.rewrite import Refused, Rewriter, Rule, Sign, apply_rules

_STACK, _CAT, _UNSQUEEZE = aten("stack.default"), aten("cat.default"), aten("unsqueeze.default")
_SOFTMAX = aten("softmax.int", "_softmax.default")
_PRODUCTS = aten("mul.Tensor", "matmul.default", "bmm.default", "einsum.default")
_LAYOUT = CASTS | COPIES | RESHAPES | aten("unsqueeze.default", "transpose.int", "permute.default", "expand.default")
_MEAN, _SUM, _RSQRT = aten("mean.dim"), aten("sum.dim_IntList"), aten("rsqrt.default")


class RecognizeDepthMix(Pass):
    """See the module docstring."""

    name = "recognize_depth_mix"
    requires = ("normal_form",)
    provides = ("depth_mixes",)
    changes_numerics = True

    def run(self, unit: Unit, context: PassContext) -> Report:
        report = Report()
        apply_rules(unit, RULES, report, SIGNS)
        return report

    def expected(self, unit: Unit) -> str:
        left = [node for node in unit.graph.nodes if _looks_mixed(node)]
        return f"{describe(left[0])} weighs stacked values by a softmax of them, but is no depth_mix" if left else ""


def _looks_mixed(node: fx.Node) -> bool:
    """Whether a node weighs two or more values, stacked along a new dimension, by a softmax that is made of them."""
    if node.target not in _PRODUCTS:
        return False
    below = [_below_layout(source) for source in node.all_input_nodes]
    stacks = [source for source in below if _stacks(source)]
    shares = [source for source in below if source.target in _SOFTMAX]
    return bool(stacks and shares) and stacks[0] in ancestors(shares)


def _below_layout(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and node.target in _LAYOUT:
        node = source_of(node)
    return node


def _stacks(node: fx.Node) -> bool:
    if node.target not in _STACK | _CAT:
        return False
    sources: Any = node.args[0]
    return len(sources) > 1 and (node.target in _STACK or all(source.target in _UNSQUEEZE for source in sources))


def _rewrite(found: Match, rewriter: Rewriter) -> str:
    sources = _sources(found["stack"])
    vectors = [found["norm"], found["proj"]]
    if any((tensor := tensor_meta(vector)) is None or tensor.dim() != 1 for vector in vectors):
        raise Refused("norm and projection are not one vector each")
    mixed = rewriter.call(torch.ops.moec.depth_mix.default, sources, *_in_order(vectors), found["eps"])
    rewriter.replace(found.root, mixed)
    return f"depth_mix of {len(sources)} sources, eps {found['eps']}"


def _in_order(vectors: Iterable[fx.Node]) -> list[fx.Node]:
    """norm * proj commutes: keep the order of the graph's inputs, which is the order they were declared in."""
    return sorted(vectors)


def _sources(stack: fx.Node) -> list[fx.Node]:
    """The stacked nodes; raises Refused unless they are stacked along a new dimension before the last."""
    nodes, along = bound_args(stack)[:2]
    result = tensor_meta(stack)
    if result is None or along % result.dim() != result.dim() - 2:
        raise Refused("the sources are not stacked along the dimension before the last")
    if stack.target in _STACK:
        return [_lossless(node, stack) for node in nodes]
    sources = []
    for node in nodes:
        node = origin(node)
        if node.target not in _UNSQUEEZE or node.args[1] % result.dim() != result.dim() - 2:  # type: ignore[operator]
            raise Refused("the concatenated sources have no dimension of their own")
        sources.append(_lossless(source_of(node), stack))
    return sources


def _lossless(node: Any, stack: fx.Node) -> fx.Node:
    """The source below lossless casts, as long as stacking does not round it."""
    before, after = tensor_meta(node), tensor_meta(stack)
    if before is None or after is None or torch.promote_types(before.dtype, after.dtype) != after.dtype:
        raise Refused("the sources are rounded when they are stacked")
    return origin(node)


def _mix() -> Pattern:
    values = op(_STACK | _CAT, anything(), anything(), name="stack")
    norm, proj = var("norm"), var("proj")
    query = op(MUL, norm, proj, commutes=True)
    square = op(aten("pow.Tensor_Scalar"), values, 2) | op(MUL, values, values) | op(aten("square.default"), values)

    def inverse(keep: bool) -> Pattern:
        return op(_RSQRT, op(ADD, op(_MEAN, square, dim(-1), keep), number("eps")))

    along = op(_SUM, op(MUL, values, query, commutes=True), dim(-1))
    unit = op(MUL, values, inverse(True), commutes=True)
    scaled = op(MUL, op(MUL, unit, norm, commutes=True), proj, commutes=True) | op(MUL, unit, query, commutes=True)
    score = op(MUL, along, inverse(False), commutes=True) | op(_SUM, scaled, dim(-1))
    share = op(aten("softmax.int"), score, dim(-1), anything())
    return op(_SUM, op(MUL, values, op(_UNSQUEEZE, share, dim(-1)), commutes=True), dim(-2))


RULES = (Rule("depth_mix", cast(_mix(), "final"), _rewrite),)
_share = op(_UNSQUEEZE, op(aten("softmax.int"), *[anything()] * 3), dim(-1))
_weighted = op(MUL, op(_STACK | _CAT, *[anything()] * 2), _share, commutes=True)
SIGNS = (
    Sign("depth_mix", op(_SUM, _weighted, *[anything()] * 3), "the weights are not a softmax of normalised scores"),
)
