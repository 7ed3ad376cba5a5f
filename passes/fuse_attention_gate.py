"""Pass fuse_attention_gate: attention output * sigmoid(projection) becomes sigmoid_gate.

The gated value is the result of an attention op, reshaped, or multiplied per head (the value expansion of sparse
latent attention).
"""

from __future__ import annotations

import operator

import torch
from torch import fx

import moec.compiler.dialect  # noqa: F401  (registers torch.ops.moec)
from moec.compiler.graph import Unit, tensor_meta
from moec.compiler.matching import Match
from moec.compiler.nodes import aten, origin, source_of
from moec.compiler.pass_manager import Pass, PassContext, Report
from moec.compiler.pattern import anything, cast, op, var
from moec.passes.parts import RESHAPES
from moec.passes.recognize_mlp import is_projection
from moec.passes.recognize_norm import MUL
from moec.passes.rewrite import Refused, Rewriter, Rule, Sign, apply_rules

_ATTENTION = {torch.ops.moec.attention.default, torch.ops.moec.sparse_attention.default}
_LAYOUT = RESHAPES | aten("transpose.int", "matmul.default", "to.dtype", "permute.default")
_SDPA = aten("scaled_dot_product_attention.default")


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


def attention_below(node: fx.Node) -> fx.Node | None:
    """The attention op whose output `node` is, up to layout, casts and a product per head."""
    while True:
        node = origin(node)
        if node.op != "call_function":
            return None
        if node.target is operator.getitem and source_of(node).target in _ATTENTION:
            return source_of(node) if node.args[1] == 0 else None
        if node.target in _SDPA:
            return node
        if node.target not in _LAYOUT:
            return None
        node = source_of(node)


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
