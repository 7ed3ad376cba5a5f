"""Pass fuse_attention_gate: attention output * sigmoid(projection) becomes sigmoid_gate.

The gated value is the result of an attention op, reshaped, or multiplied per head (the value expansion of sparse
latent attention).
"""

from __future__ import annotations

import torch
from torch import fx

import moec.compiler.dialect  # noqa: F401  (registers torch.ops.moec)
from moec.compiler.graph import Unit, tensor_meta
from moec.compiler.matching import Match
from moec.compiler.nodes import aten, describe
from moec.compiler.pass_manager import Pass, PassContext, Report
from moec.compiler.pattern import anything, cast, op, var
from moec.passes.origins import attention_below, is_projection, pointwise_of_projections
from moec.passes.recognize_norm import MUL
from moec.passes.rewrite import Refused, Rewriter, Rule, Sign, apply_rules


class FuseAttentionGate(Pass):
    """See the module docstring."""

    name = "fuse_attention_gate"
    stage = "fused"
    requires = ("attention",)
    provides = ("attention_gates",)
    changes_numerics = True

    def run(self, unit: Unit, context: PassContext) -> Report:
        report = Report()
        apply_rules(unit, RULES, report, SIGNS)
        return report

    def expected(self, unit: Unit) -> str:
        left = [node for node in unit.graph.nodes if _looks_gated(node)]
        return f"{describe(left[0])} gates the output of an attention, but not by sigmoid_gate" if left else ""


def _looks_gated(node: fx.Node) -> bool:
    """Whether a node multiplies an attention's output by an activated projection."""
    if node.target not in MUL or len(node.all_input_nodes) != 2:
        return False
    for value, gate in (node.all_input_nodes, node.all_input_nodes[::-1]):
        opening = pointwise_of_projections(gate)
        if opening is not None and opening.bent and attention_below(value) is not None:
            return True
    return False


def _from_attention(node: fx.Node) -> str:
    return "" if attention_below(node) is not None else "the gated value does not come from attention"


def _rewrite(found: Match, rewriter: Rewriter) -> str:
    x, gate = found["x"], found["gate"]
    before, after = tensor_meta(x), tensor_meta(gate)
    if before is None or after is None or before.shape != after.shape:
        sizes = "unknown" if after is None else list(after.shape)
        raise Refused(f"the gate has shape {sizes}, not one number per element")
    if not is_projection(gate):
        raise Refused("the gate is not a projection")
    gated = rewriter.call(torch.ops.moec.sigmoid_gate.default, x, gate)
    rewriter.replace(found.root, gated)
    return f"sigmoid_gate over {before.shape[-1]}"


_x = var("x", where=_from_attention)
_gated = op(MUL, _x, cast(op(aten("sigmoid.default"), var("gate")), "rounded"), commutes=True)

RULES = (Rule("sigmoid_gate", cast(_gated, "final"), _rewrite),)
_silu_gated = op(MUL, _x, op(aten("silu.default"), anything()), commutes=True)
SIGNS = (
    Sign("sigmoid_gate", _gated, "the gated value does not come from attention"),
    Sign("attention gate", _silu_gated, "it is a SiLU, not a sigmoid"),
)
