"""Pass recognize_route: a router's choice of experts becomes moec::route.

    scores = sigmoid(logits) or softmax(logits)
    choice = scores, or scores + bias; with groups, minus infinity outside of the best groups
    indices = topk(choice);  weights = scores[indices], renormalised or not, scaled or not
    or: values, indices = topk(logits);  weights = softmax(values)

Logits and biases of the projection itself stay outside.
"""

from __future__ import annotations

import math

import torch
from torch import fx

import moec.compiler.dialect  # noqa: F401  (registers torch.ops.moec)
from moec.compiler.graph import Unit, tensor_meta
from moec.compiler.matching import Match
from moec.compiler.nodes import aten, bound_args
from moec.compiler.pass_manager import Pass, PassContext, Report
from moec.compiler.pattern import Pattern, anything, dim, item, number, op, var
from moec.passes.parts import RESHAPES
from moec.passes.recognize_norm import ADD, DIV, MUL
from moec.passes.rewrite import Refused, Rewriter, Rule, Sign, apply_rules

_TOPK, _SOFTMAX, _SIGMOID = aten("topk.default"), aten("softmax.int"), aten("sigmoid.default")
_SUM, _UNSQUEEZE, _EXPAND = aten("sum.dim_IntList"), aten("unsqueeze.default"), aten("expand.default")


class RecognizeRoute(Pass):
    """See the module docstring."""

    name = "recognize_route"
    requires = ("normal_form",)
    provides = ("routes",)
    changes_numerics = True

    def run(self, unit: Unit, context: PassContext) -> Report:
        report = Report()
        apply_rules(unit, RULES, report, SIGNS)
        return report

    def expected(self, unit: Unit) -> str:
        targets = {node.target for node in unit.graph.nodes}
        experts = {torch.ops.moec.permute.default} & targets
        return "experts are permuted, but no router was recognised" if experts and not _ROUTE & targets else ""


_ROUTE = {torch.ops.moec.route.default}


def _rewrite(found: Match, rewriter: Rewriter) -> str:
    logits, weights, topk = found["logits"], found.root, found["topk"]
    top_k = bound_args(topk)[1]
    if not isinstance(top_k, int):
        raise Refused("the number of experts per token is symbolic")
    tensor, result = tensor_meta(logits), tensor_meta(weights)
    if tensor is None or result is None or tensor.dim() != 2:
        raise Refused("the logits are not [tokens, experts]")
    after = "after" in found
    score = "sigmoid" if "sigmoid" in found else "softmax"
    groups, top_groups = _groups(found, tensor.shape[1])
    if "values" in found and ("bias" in found or groups > 1):
        raise Refused("the weights are the values it selects by, with bias or groups")
    renormalize = "total" in found
    eps, scale = float(found.get("eps", 0.0)), float(found.get("scale", 1.0))
    bias = found.get("bias")
    old_indices = [user for user in topk.users if user.args[1] == 1]
    inputs = [node for node in (logits, bias) if node is not None]
    rewriter.after_inputs(inputs, [weights, *old_indices])
    if tensor.dtype != result.dtype and torch.promote_types(tensor.dtype, result.dtype) == result.dtype:
        logits = rewriter.call(torch.ops.aten.to.dtype, logits, result.dtype)
    chosen, indices = rewriter.results(
        torch.ops.moec.route.default,
        *(logits, bias, top_k, score, after, renormalize, scale, groups, top_groups, eps),
        count=2,
    )
    for node in old_indices:
        rewriter.replace(node, indices)
    rewriter.replace(weights, chosen)
    parts = [f"top {top_k} of {tensor.shape[1]}", f"{score} after top-k" if after else score]
    parts += ["bias"] if bias is not None else []
    parts += [f"{top_groups} of {groups} groups"] if groups > 1 else []
    parts += ["renormalised"] if renormalize else []
    parts += [f"x {scale:g}"] if scale != 1 else []
    return f"route {', '.join(parts)}"


def _groups(found: Match, experts: int) -> tuple[int, int]:
    """Number of groups and of groups kept, (1, 1) without groups; raises Refused where the op's rule is another."""
    if "grouped" not in found:
        return 1, 1
    shape = tensor_meta(found["grouped"])
    top_groups = found["top_groups"]
    if shape is None or shape.dim() != 3 or shape.shape[1] * shape.shape[2] != experts:
        raise Refused("the groups do not divide the experts evenly")
    if found["hidden"] != -math.inf:
        raise Refused(f"experts of other groups score {found['hidden']}, not minus infinity, and may be chosen")
    if "bias" in found and ("best" not in found or bound_args(found["best"])[1] != 2):
        raise Refused("with a bias, groups are not ranked by the sum of their two best scores")
    if "bias" not in found and "best" in found:
        raise Refused("without a bias, groups are not ranked by their best score")
    if list(tensor_shape(found["spread"])) != [shape.shape[0], shape.shape[1], shape.shape[2]]:
        raise Refused("the group mask is not spread over the experts of each group")
    return int(shape.shape[1]), int(top_groups)


def tensor_shape(node: fx.Node) -> torch.Size:
    """The shape of what a node yields; raises Refused where it is not known."""
    tensor = tensor_meta(node)
    if tensor is None:
        raise Refused(f"the shape of {node.name} is not known")
    return tensor.shape


def _pattern() -> Pattern:
    logits = var("logits", strip=False)
    scores = op(_SIGMOID, logits, name="sigmoid") | op(_SOFTMAX, logits, dim(-1), anything(), name="softmax")
    choice = op(ADD, scores, var("bias"), commutes=True, name="choice") | scores
    # Shared: the indices are used elsewhere, and are replaced with the rest.
    topk = op(_TOPK, _limited(choice) | choice, anything(), dim(-1), True, anything(), name="topk", shared=True)
    # The values that topk returns are the weights too where it ranks the bare scores.
    picked = op(aten("gather.default"), scores, dim(-1), item(topk, 1)) | item(topk, 0, name="values")
    total = op(_SUM, picked, dim(-1), True, name="total")
    renormalised = op(DIV, picked, op(ADD, total, number("eps")) | total) | picked
    return op(MUL, renormalised, number("scale"), commutes=True) | renormalised


def _limited(choice: Pattern) -> Pattern:
    """The choice scores, minus infinity outside of the best groups."""
    grouped = op(RESHAPES, choice, anything(), name="grouped")
    best = item(op(_TOPK, grouped, anything(), dim(-1), True, anything(), name="best"), 0)
    rank = op(_SUM, best, dim(-1)) | op(aten("amax.default"), grouped, dim(-1))
    rank = rank | item(op(aten("max.dim"), grouped, dim(-1)), 0)
    groups = item(op(_TOPK, rank, number("top_groups"), dim(-1), True, anything()), 1)
    flags = op(aten("scatter.value"), op(aten("zeros_like.default"), rank, *[anything()] * 5), dim(-1), groups, 1)
    spread = op(_EXPAND, op(_UNSQUEEZE, flags, dim(-1)), anything(), name="spread")
    kept = op(RESHAPES, spread, anything())
    hidden = op(aten("bitwise_not.default", "logical_not.default"), op(aten("to.dtype"), kept, torch.bool))
    return op(aten("masked_fill.Scalar"), choice, hidden, number("hidden"))


def _after() -> Pattern:
    logits = var("logits", strip=False)
    topk = op(_TOPK, logits, anything(), dim(-1), True, anything(), name="topk", shared=True)
    return op(_SOFTMAX, item(topk, 0), dim(-1), anything(), name="after")


RULES = (
    Rule("route", _pattern(), _rewrite),
    Rule("route", _after(), _rewrite),
)
_scores = op(_SIGMOID, anything()) | op(_SOFTMAX, anything(), dim(-1), anything())
_biased = op(ADD, _scores, anything(), commutes=True) | _scores
_choice = op(aten("masked_fill.Scalar"), _biased, anything(), anything()) | _biased
SIGNS = (
    Sign(
        "route",
        op(_TOPK, _choice, anything(), dim(-1), True, anything()),
        "the weights are not the scores of the chosen experts",
    ),
    Sign("route", op(_SOFTMAX, item(op(_TOPK, *[anything()] * 5), 0), dim(-1), anything()), "the indices are not used"),
)
