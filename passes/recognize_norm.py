"""Pass recognize_norm: written-out norms become rms_norm, gated_norm and l2_norm.

    rms = x * rsqrt(mean(x^2) + eps)           also x / sqrt(...), x * x, pow, square, aten.rms_norm
    rms_norm   = rms * w, rms * (1 + w)        cast at the end, or before the weight as Hugging Face does
    gated_norm = rms * w * act(gate)           sigmoid or SiLU, factors in any order
    l2_norm    = x * rsqrt(sum(x^2) + eps)

A cast between norm and gate is a rounding that gated_norm does not make; everything else is the same arithmetic.
"""

from __future__ import annotations

import torch
from torch import fx

import moec.compiler.dialect  # noqa: F401  (registers torch.ops.moec)
from moec.compiler.graph import Unit, tensor_meta
from moec.compiler.matching import Match
from moec.compiler.nodes import aten, origin
from moec.compiler.pass_manager import Pass, PassContext, Report
from moec.compiler.pattern import Pattern, anything, cast, dim, number, op, value, var
from moec.passes.rewrite import Refused, Rewriter, Rule, Sign, apply_rules

MUL, DIV, ADD = aten("mul.Tensor"), aten("div.Tensor"), aten("add.Tensor", "add.Scalar")
_MEAN, _SUM = aten("mean.dim"), aten("sum.dim_IntList")
_SIGMOID, _SILU = aten("sigmoid.default"), aten("silu.default")


class RecognizeNorm(Pass):
    """See the module docstring."""

    name = "recognize_norm"
    requires = ("normal_form",)
    provides = ("norms",)
    changes_numerics = True

    def run(self, unit: Unit, context: PassContext) -> Report:
        report = Report()
        apply_rules(unit, RULES, report, SIGNS)
        return report

    def expected(self, unit: Unit) -> str:
        roots = [n for n in unit.graph.nodes if n.target in aten("rsqrt.default", "rms_norm.default")]
        return f"{len(roots)} reciprocal roots are in the graph, none was recognised as a norm" if roots else ""


def _vector(node: fx.Node) -> str:
    tensor = tensor_meta(node)
    shape = None if tensor is None else list(tensor.shape)
    return "" if shape is not None and len(shape) == 1 else f"the weight has shape {shape}, not one dimension"


_x, _weight, _gate, _eps = var("x"), var("weight", where=_vector), var("gate"), number("eps")
_square = op(aten("pow.Tensor_Scalar"), _x, 2) | op(MUL, _x, _x) | op(aten("square.default"), _x)


def _over_root(total: Pattern) -> Pattern:
    """x / sqrt(total + eps), in either spelling."""
    inside = op(ADD, total, _eps)
    reciprocal = op(MUL, _x, op(aten("rsqrt.default"), inside), commutes=True)
    return reciprocal | op(DIV, _x, op(aten("sqrt.default"), inside))


_rms = _over_root(op(_MEAN, _square, dim(-1), True))
_l2 = _over_root(op(_SUM, _square, dim(-1), True))
_scale = op(ADD, _weight, 1, name="zero_centered") | _weight
_scaled = op(MUL, cast(_rms, "before_weight"), _scale, commutes=True)
_sigmoid = op(_SIGMOID, _gate, name="sigmoid")
_silu = op(_SILU, _gate) | op(MUL, _gate, op(_SIGMOID, _gate), commutes=True)
_gated = op(MUL, cast(_scaled, "before_gate"), _sigmoid | _silu, commutes=True) | op(
    MUL, op(MUL, cast(_rms, "before_weight"), _sigmoid | _silu, commutes=True), _scale, commutes=True
)
_builtin = op(aten("rms_norm.default"), _x, value("shape"), anything(), value("eps"), name="builtin")


def _rewrite_rms(found: Match, rewriter: Rewriter) -> str:
    x = input_as_wide_as_result(found, rewriter)
    early = found.get("before_weight")
    if early is not None and _dtype(early) != _dtype(x):
        raise Refused(f"the normalised value is cast to {_dtype(early)}, the input is {_dtype(x)}")
    zero_centered = "zero_centered" in found
    norm = rewriter.call(
        torch.ops.moec.rms_norm.default, x, found["weight"], found["eps"], zero_centered, early is not None
    )
    rewriter.replace(found.root, norm)
    return f"rms_norm over {_width(norm)}, eps {found['eps']}" + (", 1 + weight" if zero_centered else "")


def _rewrite_builtin(found: Match, rewriter: Rewriter) -> str:
    weight = found.root.args[2] if len(found.root.args) > 2 else None
    if len(found["shape"]) != 1:
        raise Refused(f"it normalises over {len(found['shape'])} dimensions")
    if not isinstance(weight, fx.Node):
        raise Refused("it has no weight")
    eps = torch.finfo(_dtype(found["x"])).eps if found["eps"] is None else found["eps"]
    norm = rewriter.call(torch.ops.moec.rms_norm.default, found["x"], origin(weight), eps, False, False)
    rewriter.replace(found.root, norm)
    return f"rms_norm over {_width(norm)}, eps {eps}"


def _rewrite_gated(found: Match, rewriter: Rewriter) -> str:
    x, gate = input_as_wide_as_result(found, rewriter), found["gate"]
    before, after = tensor_meta(x), tensor_meta(gate)
    if before is None or after is None or before.shape != after.shape:
        raise Refused("gate and input differ in shape")
    activation = "sigmoid" if "sigmoid" in found else "silu"
    zero_centered = "zero_centered" in found
    norm = rewriter.call(
        torch.ops.moec.gated_norm.default, x, gate, found["weight"], found["eps"], activation, zero_centered
    )
    rewriter.replace(found.root, norm)
    return f"gated_norm over {_width(norm)}, {activation} gate, eps {found['eps']}"


def _rewrite_l2(found: Match, rewriter: Rewriter) -> str:
    norm = rewriter.call(torch.ops.moec.l2_norm.default, input_as_wide_as_result(found, rewriter), found["eps"])
    rewriter.replace(found.root, norm)
    return f"l2_norm over {_width(norm)}, eps {found['eps']}"


def input_as_wide_as_result(found: Match, rewriter: Rewriter, name: str = "x") -> fx.Node:
    """The captured input, widened when the match never rounds its result back to the input's dtype."""
    x: fx.Node = found[name]
    wanted = _dtype(found.root)
    if wanted == torch.float32 and _dtype(x) in (torch.float16, torch.bfloat16):
        return rewriter.call(torch.ops.aten.to.dtype, x, wanted)
    return x


def _dtype(node: fx.Node) -> torch.dtype:
    tensor = tensor_meta(node)
    if tensor is None:
        raise Refused(f"the dtype of {node.name} is not known")
    return tensor.dtype


def _width(node: fx.Node) -> object:
    tensor = tensor_meta(node)
    return "?" if tensor is None else tensor.shape[-1]


RULES = (
    Rule("gated_norm", cast(_gated, "final"), _rewrite_gated),
    Rule("rms_norm", cast(_scaled, "final"), _rewrite_rms),
    Rule("rms_norm", _builtin, _rewrite_builtin),
    Rule("l2_norm", cast(_l2, "final"), _rewrite_l2),
)

_anything_root = aten("rsqrt.default", "sqrt.default")
SIGNS = (
    Sign("rms_norm", _builtin, "it has no weight"),
    Sign("rms_norm", op(_anything_root, op(ADD, op(_MEAN, _square, anything(), anything()), anything())), "no weight"),
    Sign("l2_norm", op(_anything_root, op(ADD, op(_SUM, _square, anything(), anything()), anything())), "not divided"),
    Sign(
        "l2_norm",
        op(aten("linalg_vector_norm.default"), _x, 2, dim(-1), True),
        "its epsilon bounds the norm from below instead of being added under the root",
    ),
)


def is_norm(node: fx.Node) -> bool:
    """Whether a node is a recognised norm, for passes that build on this one."""
    return node.target in (torch.ops.moec.rms_norm.default, torch.ops.moec.l2_norm.default)
