"""Pass recognize_loss: output head and cross entropy become linear_cross_entropy.

    losses, _ = linear_cross_entropy(hidden, weight, labels, bias)
    sum:  losses.sum()      mean: losses.sum() / (labels != ignored).sum()      none: losses

Reshapes, casts, a soft cap and a slice over the length between head and loss are part of the match; what divides a sum
afterwards stays outside. The plan's `loss_chunk` says how many rows of logits exist at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

import moec.compiler.dialect  # noqa: F401  (registers torch.ops.moec)
from moec.compiler.graph import Unit, tensor_meta
from moec.compiler.matching import Match
from moec.compiler.nodes import aten, bound_args
from moec.compiler.pass_manager import Pass, PassContext, Report
from moec.compiler.pattern import Pattern, anything, cast, dim, number, op, var
from moec.passes.parts import RESHAPES
from moec.passes.recognize_norm import DIV, MUL
from moec.passes.rewrite import Refused, Rewriter, Rule, Sign, apply_rules

_LINEAR, _SLICE, _TANH = aten("linear.default"), aten("slice.Tensor"), aten("tanh.default")
_CROSS_ENTROPY, _NLL = aten("cross_entropy_loss.default"), aten("nll_loss_nd.default", "nll_loss.default")
_LOG_SOFTMAX = aten("log_softmax.int")
_CHUNK = 4096
_NONE, _MEAN, _SUM = 0, 1, 2


class RecognizeLoss(Pass):
    """See the module docstring."""

    name = "recognize_loss"
    requires = ("normal_form",)
    provides = ("loss",)
    changes_numerics = True

    def run(self, unit: Unit, context: PassContext) -> Report:
        report = Report()
        apply_rules(unit, _rules(getattr(context.plan, "loss_chunk", _CHUNK)), report, SIGNS)
        return report

    def expected(self, unit: Unit) -> str:
        left = [node for node in unit.graph.nodes if node.target in _CROSS_ENTROPY | _NLL]
        return "the graph has a cross entropy, whose logits stay whole" if left else ""


def _rules(chunk: int) -> list[Rule]:
    rewrite = _rewrite(chunk)
    logits = _logits()
    whole = op(_CROSS_ENTROPY, logits, *_TAIL, number("smoothing"), where=_no_class_weights)
    split = op(_NLL, op(_LOG_SOFTMAX, logits, dim(-1), anything()), *_TAIL, where=_no_class_weights)
    return [Rule("linear_cross_entropy", whole, rewrite), Rule("linear_cross_entropy", split, rewrite)]


_TAIL = (var("labels"), None, number("reduction"), number("ignored"))


def _logits() -> Pattern:
    """Rows of logits, between the head and the loss."""
    head = op(_LINEAR, var("hidden"), var("weight"), anything(), name="head")
    capped = op(MUL, op(_TANH, op(DIV, cast(head, "a"), number("softcap"))), number("softcap"), commutes=True)
    cut = op(_SLICE, cast(capped | head, "b"), dim(1), *[anything()] * 3, name="cut") | cast(capped | head, "b")
    return cast(op(RESHAPES, cut, anything(), name="rows") | cut, "c")


def _rewrite(chunk: int) -> Callable[[Match, Rewriter], str]:
    def rewrite(found: Match, rewriter: Rewriter) -> str:
        if found.get("smoothing"):
            raise Refused(f"label smoothing is {found['smoothing']}")
        labels, logits = tensor_meta(found["labels"]), tensor_meta(found["head"])
        if labels is None or logits is None or labels.is_floating_point() or labels.dim() != 1:
            raise Refused("the labels are not one class per row")
        rows = tensor_meta(found["rows"]) if "rows" in found else logits
        if rows is None or rows.shape[-1] != logits.shape[-1]:
            raise Refused("the rows of logits are cut up")
        for name in ("a", "b", "c"):
            if name in found and _dtype(found[name]) != torch.float32 and _dtype(found[name]) != logits.dtype:
                raise Refused(f"the logits are cast to {_dtype(found[name])}")
        losses = _losses(found, rewriter, chunk)
        rewriter.replace(found.root, _reduced(found, rewriter, losses))
        kind = {_NONE: "per row", _MEAN: "mean", _SUM: "sum"}[found["reduction"]]
        softcap = f", soft cap {found['softcap']:g}" if "softcap" in found else ""
        return f"linear_cross_entropy over {logits.shape[-1]} classes, {kind}{softcap}, {chunk} rows at a time"

    return rewrite


def _losses(found: Match, rewriter: Rewriter, chunk: int) -> fx.Node:
    hidden = found["hidden"]
    if "cut" in found:
        _, *where = bound_args(found["cut"])
        hidden = rewriter.call(torch.ops.aten.slice.Tensor, hidden, *where)
    tensor = tensor_meta(hidden)
    if tensor is None or not isinstance(tensor.shape[-1], int):
        raise Refused("the width of the hidden state is not known")
    if tensor.dim() != 2:
        hidden = rewriter.call(torch.ops.aten.reshape.default, hidden, [-1, tensor.shape[-1]])
    bias = bound_args(found["head"])[2]
    softcap = float(found.get("softcap", 0.0))
    losses, _ = rewriter.results(
        torch.ops.moec.linear_cross_entropy.default,
        *(hidden, found["weight"], found["labels"], bias, found["ignored"], softcap, chunk),
        count=2,
    )
    return losses


def _reduced(found: Match, rewriter: Rewriter, losses: fx.Node) -> fx.Node:
    if found["reduction"] == _NONE:
        return losses
    total = rewriter.call(torch.ops.aten.sum.default, losses)
    if found["reduction"] == _SUM:
        return total
    valid = rewriter.call(torch.ops.aten.ne.Scalar, found["labels"], found["ignored"])
    return rewriter.call(torch.ops.aten.div.Tensor, total, rewriter.call(torch.ops.aten.sum.default, valid))


def _dtype(node: fx.Node) -> torch.dtype | None:
    tensor = tensor_meta(node)
    return None if tensor is None else tensor.dtype


def _no_class_weights(node: fx.Node) -> str:
    return "classes are weighted" if bound_args(node)[2] is not None else ""


SIGNS = (
    Sign("linear_cross_entropy", op(_CROSS_ENTROPY, *[anything()] * 6), "its logits do not come from a linear head"),
    Sign("linear_cross_entropy", op(_NLL, *[anything()] * 5), "its input is not the log softmax of a linear head"),
)
