"""Pass recognize_conv: causal depthwise convolutions over the length become short_conv.

1. `conv1d` with groups = channels, padded by W - 1 on both sides and cut, or padded on the left: the transposes around
   it are folded, since short_conv works on [B, T, C].
2. A sum of shifted copies times taps: `sum_j w[:, W-1-j] * x[t-j]`, where copies from another document may be masked
   (`where(ids[t] == ids[t-j], x[t-j], 0)`): the form of moec's own models.

A SiLU that follows is part of the op.
"""

from __future__ import annotations

import torch

import moec.compiler.dialect  # noqa: F401  (registers torch.ops.moec)
from moec.compiler.graph import Unit, tensor_meta
from moec.compiler.matching import Match, match
from moec.compiler.nodes import aten, describe
from moec.compiler.pass_manager import Pass, PassContext, Report
from moec.compiler.pattern import Pattern, anything, cast, dim, items, number, op, value, var
from moec.passes.layout import fold_users, transposed
from moec.passes.masks import never_falls
from moec.passes.recognize_norm import ADD, MUL, input_as_wide_as_result
from moec.passes.rewrite import Refused, Rewriter, Rule, Sign, apply_rules

_CONV, _SLICE, _PAD, _SILU = aten("conv1d.default"), aten("slice.Tensor"), aten("pad.default"), aten("silu.default")


class RecognizeConv(Pass):
    """See the module docstring."""

    name = "recognize_conv"
    requires = ("normal_form",)
    provides = ("short_convs",)
    changes_numerics = True

    def run(self, unit: Unit, context: PassContext) -> Report:
        report = Report()
        apply_rules(unit, RULES, report, SIGNS, context.documents_of(unit))
        return report

    def expected(self, unit: Unit) -> str:
        convs = [node for node in unit.graph.nodes if node.target in _CONV]
        if convs:
            return f"{len(convs)} conv1d are in the graph, none was recognised as a short convolution"
        products = (match(_tap, node, exclusive=False) for node in unit.graph.nodes if node.target in MUL)
        taps = [found for found in products if isinstance(found, Match)]
        if len({found["back"] for found in taps}) < 2:
            return ""
        return f"{describe(taps[0].root)} and others weigh shifted copies, but are no short_conv"


# conv1d

_x, _weight = var("x"), var("weight")
_conv = op(
    _CONV, _x, _weight, anything(), value("stride"), value("padding"), value("dilation"), number("groups"), name="conv"
)
_cut = op(_SLICE, _conv, dim(2), 0, anything(), 1, name="cut") | _conv
_activated = op(_SILU, cast(_cut, "rounded"), name="silu") | _cut


_padded_left = op(_PAD, _x, items(number("left"), number("right")), "constant", value("fill"))


def _rewrite_conv(found: Match, rewriter: Rewriter) -> str:
    taps, x, padded = _taps_of(found), found["x"], found["padding"]
    width = taps.shape[-1]
    if len(found["conv"].args) > 2 and found["conv"].args[2] is not None:
        raise Refused("bias present")
    if list(found["stride"]) != [1] or list(found["dilation"]) != [1]:
        raise Refused(f"stride {found['stride']}, dilation {found['dilation']}")
    left = match(_padded_left, x, exclusive=False)
    if isinstance(left, Match) and list(padded) == [0]:
        if (left["left"], left["right"]) != (width - 1, 0) or left["fill"] not in (None, 0, 0.0):
            raise Refused(f"padded by {left['left']} and {left['right']}, not by {width - 1} on the left")
        x = left["x"]
    elif list(padded) != [width - 1]:
        raise Refused(f"padded by {padded}, not by {width - 1}")
    weight = rewriter.call(torch.ops.aten.squeeze.dim, found["weight"], 1)
    activation = "silu" if "silu" in found else "none"
    x = transposed(rewriter, x, 1, 2)
    mixed = rewriter.call(torch.ops.moec.short_conv.default, x, weight, None, activation)
    back = rewriter.call(torch.ops.aten.transpose.int, mixed, 1, 2)
    rewriter.replace(found.root, back)
    rewriter.then(lambda: fold_users(rewriter.graph, back))
    return f"short_conv of {taps.shape[0]} channels, {width} taps" + (", SiLU" if activation == "silu" else "")


def _taps_of(found: Match) -> torch.Tensor:
    taps = tensor_meta(found["weight"])
    if taps is None or taps.dim() != 3 or taps.shape[1] != 1 or found["groups"] != taps.shape[0]:
        raise Refused("it mixes channels")
    return taps


# A sum over taps


def _taps(width: int) -> Pattern:
    """`x * w[:, W-1] + x[t-1] * w[:, W-2] + ...`, the copies masked by document or not."""
    total = op(MUL, _x, op(aten("select.int"), _weight, 1, width - 1, shared=True), commutes=True)
    for back in range(1, width):
        tap = op(aten("select.int"), _weight, 1, width - 1 - back, shared=True)
        total = op(ADD, total, op(MUL, _masked(back) | _shifted(back), tap, commutes=True))
    return total


def _shifted(back: int) -> Pattern:
    return op(_SLICE, op(_PAD, _x, items(0, 0, back, 0)), dim(1), 0, anything(), 1)


def _masked(back: int) -> Pattern:
    """Zero before the start of the row anyway, so the padding value of the ids does not matter."""
    ids = var("document_ids")
    earlier = op(_SLICE, op(_PAD, ids, items(back, 0), "constant", anything(), shared=True), dim(1), 0, anything(), 1)
    same = op(aten("eq.Tensor"), ids, earlier, commutes=True, shared=True)
    return op(aten("where.ScalarOther"), op(aten("unsqueeze.default"), same, dim(-1), shared=True), _shifted(back), 0)


def _rewrite_taps(found: Match, rewriter: Rewriter) -> str:
    x, weight = input_as_wide_as_result(found, rewriter), found["weight"]
    taps, length = tensor_meta(weight), tensor_meta(x)
    if taps is None or length is None or taps.dim() != 2 or length.dim() != 3:
        raise Refused("the input is not [batch, length, channels]")
    activation = "silu" if "silu" in found else "none"
    ids = found.get("document_ids")
    if ids is not None and not never_falls(ids, rewriter.documents):
        raise Refused(f"the documents {describe(ids)} are not provably consecutive")
    mixed = rewriter.call(torch.ops.moec.short_conv.default, x, weight, ids, activation)
    rewriter.replace(found.root, mixed)
    text = f"short_conv of {taps.shape[0]} channels, {taps.shape[1]} taps"
    return text + (", SiLU" if activation == "silu" else "") + (", by document" if ids is not None else "")


def _tap_rules() -> list[Rule]:
    rules = []
    for width in range(_MOST_TAPS, 1, -1):
        taps = _taps(width)
        activated = op(_SILU, cast(taps, "rounded"), name="silu")
        rules.append(Rule("short_conv", cast(activated | taps, "final"), _rewrite_taps))
    return rules


_MOST_TAPS = 8

_earlier = op(_SLICE, op(_PAD, _x, items(0, 0, number("back"), 0)), *[anything()] * 4)
_tap = op(MUL, _earlier | op(aten("where.ScalarOther"), anything(), _earlier, anything()), anything(), commutes=True)
RULES = (Rule("short_conv", cast(_activated, "final"), _rewrite_conv), *_tap_rules())
SIGNS = (
    Sign("short_conv", op(_CONV, _x, _weight, *[anything()] * 5), "it is not cut back to the length of its input"),
    Sign(
        "short_conv",
        _tap,
        "the taps around it do not form a sum over consecutive tokens of the same documents",
    ),
)
