"""Pass recognize_mlp: act(gate) * up between the projections of a gated MLP becomes gated_mlp_act.

Gate and up come from two projections, or are halves of one (chunk, split, slices, interleaved columns). The activation
is one row of `ACTIVATIONS`; roundings between its factors are dropped, since the op rounds once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

import moec.compiler.dialect  # noqa: F401  (registers torch.ops.moec)
from moec.compiler.graph import Unit, tensor_meta
from moec.compiler.matching import Match
from moec.compiler.nodes import aten, describe
from moec.compiler.pass_manager import Pass, PassContext, Report
from moec.compiler.pattern import Pattern, cast, number, op, value, var
from moec.passes.origins import feeds_projection, input_of, is_projection, pointwise_of_projections, weight_values
from moec.passes.recognize_norm import ADD, DIV, MUL, input_as_wide_as_result
from moec.passes.rewrite import Refused, Rewriter, Rule, Sign, apply_rules

_CLAMP, _SIGMOID, _TANH = aten("clamp.default"), aten("sigmoid.default"), aten("tanh.default")
_RELU = aten("relu.default")


class RecognizeMlp(Pass):
    """See the module docstring."""

    name = "recognize_mlp"
    requires = ("normal_form",)
    provides = ("gated_mlps",)
    changes_numerics = True

    def run(self, unit: Unit, context: PassContext) -> Report:
        report = Report()
        apply_rules(unit, RULES, report, SIGNS)
        return report

    def expected(self, unit: Unit) -> str:
        weights = weight_values(unit)
        left = [node for node in unit.graph.nodes if _looks_gated(node, weights)]
        return f"{describe(left[0])} multiplies two projections, one activated, as no known MLP does" if left else ""


@dataclass(frozen=True)
class Activation:
    """The op's `kind`, its pattern over "gate" and "up", and the constants (a, b) that a match gives it."""

    kind: str
    pattern: Pattern
    constants: Callable[[Match], tuple[float, float]] = lambda found: (0.0, 0.0)


_gate, _up, _a, _b = var("gate"), var("up"), number("a"), number("b")


def _times_up(activated: Pattern) -> Pattern:
    return op(MUL, cast(activated, "rounded"), _up, commutes=True)


_relu = op(_RELU, _gate)
_square_of_relu = op(aten("pow.Tensor_Scalar"), _relu, 2) | op(MUL, _relu, _relu) | op(aten("square.default"), _relu)


def _bounded(x: Pattern, limit: Pattern) -> Pattern:
    """limit * tanh(x / limit)"""
    return op(MUL, op(_TANH, op(DIV, x, limit)), limit, commutes=True)


_situ = op(
    MUL, op(MUL, _bounded(_gate, _a), op(_SIGMOID, _gate), commutes=True), _bounded(_up, _b), commutes=True
) | op(MUL, _bounded(_gate, _a), op(MUL, op(_SIGMOID, _gate), _bounded(_up, _b), commutes=True), commutes=True)

_clamped_gate = op(_CLAMP, _gate, None, number("limit"), name="clamped") | op(
    aten("clamp_max.default"), _gate, number("limit"), name="clamped"
)
_swish = op(MUL, _clamped_gate, op(_SIGMOID, op(MUL, _clamped_gate, number("alpha"), commutes=True)), commutes=True)
_clamped_up = op(ADD, op(_CLAMP, _up, number("low"), number("high")), 1)
_clamped_swiglu = op(MUL, _clamped_up, _swish, commutes=True)


def _clamps(found: Match) -> tuple[float, float]:
    limit = float(found["limit"])
    if found["high"] != limit or found["low"] != -limit:
        raise Refused(f"gate is clamped at {limit}, up to [{found['low']}, {found['high']}]")
    return float(found["alpha"]), limit


ACTIVATIONS = (
    Activation("situ", _situ, lambda found: (float(found["a"]), float(found["b"]))),
    Activation("clamped_swiglu", _clamped_swiglu, _clamps),
    Activation(
        "silu",
        _times_up(op(aten("silu.default"), _gate) | op(MUL, _gate, op(_SIGMOID, _gate), commutes=True)),
    ),
    Activation("gelu", _times_up(op(aten("gelu.default"), _gate))),
    Activation("gelu_tanh", _times_up(op(aten("gelu.default"), _gate, "tanh"))),
    Activation("relu2", _times_up(_square_of_relu)),
)


def _rule(activation: Activation) -> Rule:
    def rewrite(found: Match, rewriter: Rewriter) -> str:
        gate, up = input_as_wide_as_result(found, rewriter, "gate"), found["up"]
        a, b = activation.constants(found)
        before, after = tensor_meta(gate), tensor_meta(up)
        if before is None or after is None or before.shape != after.shape:
            raise Refused("gate and up differ in shape")
        for name, node in (("gate", found["gate"]), ("up", up)):
            if not is_projection(node):
                raise Refused(f"{name} is not a projection but {describe(node)}")
        result = rewriter.call(torch.ops.moec.gated_mlp_act.default, gate, up, activation.kind, a, b)
        rewriter.replace(found.root, result)
        return f"gated_mlp_act {activation.kind}" + (f"({a:g}, {b:g})" if b else "")

    return Rule("gated_mlp_act", cast(activation.pattern, "final"), rewrite)


def _looks_gated(node: fx.Node, weights: set[fx.Node]) -> bool:
    """A product of two projections of one input, at least one activated, that a further projection takes."""
    if node.target not in MUL or len(node.all_input_nodes) != 2 or not feeds_projection(node):
        return False
    sides = [pointwise_of_projections(side) for side in node.all_input_nodes]
    if any(side is None for side in sides) or not any(side.bent for side in sides if side is not None):
        return False
    left, right = (side.projections for side in sides if side is not None)
    projections = [each.projection for each in (*left, *right)]
    shapes = {
        tuple(tensor.shape) for each in (node, *node.all_input_nodes) if (tensor := tensor_meta(each)) is not None
    }
    return (
        len(shapes) == 1
        and not any(one.overlaps(two) for one in left for two in right)
        and len({input_of(projection) for projection in projections}) == 1
        and all(weights & set(projection.all_input_nodes) for projection in projections)
    )


RULES = tuple(map(_rule, ACTIVATIONS))
SIGNS = (
    Sign(
        "gated_mlp_act",
        op(MUL, cast(op(aten("silu.default", "gelu.default"), _gate | value()), "rounded"), _up, commutes=True),
        "the gelu has a form that is not known",
    ),
    Sign("gated_mlp_act", op(MUL, op(_TANH, op(DIV, _gate, _a)), number("other"), commutes=True), "not a SiTU-GLU"),
    Sign("gated_mlp_act", _swish, "up is not clamped and shifted by one"),
)
