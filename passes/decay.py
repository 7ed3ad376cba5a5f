"""The gates of a delta rule, read back to their logits: the decay in its two forms, and the sigmoid write strength."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from moec.compiler.graph import tensor_meta
from moec.compiler.matching import Match, match
from moec.compiler.nodes import aten, source_of
from moec.compiler.pattern import Pattern, anything, dim, number, op, var
from moec.passes.parts import RESHAPES
from moec.passes.recognize_norm import ADD, MUL
from moec.passes.rewrite import Refused, Rewriter

_EXP, _NEG, _SIGMOID = aten("exp.default"), aten("neg.default"), aten("sigmoid.default")


@dataclass(frozen=True)
class Decay:
    """g as a function of `logits` [B, T, heads * width] or [B, T, heads], `bias` of that width and `rate`, A_log.

    kind: "bounded" or "softplus". inner: the nodes that compute g.
    """

    kind: str
    logits: fx.Node
    bias: fx.Node
    rate: fx.Node
    lower_bound: float
    inner: tuple[fx.Node, ...]

    def vectors(self, rewriter: Rewriter) -> tuple[fx.Node, fx.Node]:
        """A_log and the bias as vectors, whatever shape they are broadcast in."""
        return _vector(rewriter, self.rate), _vector(rewriter, self.bias)


def read_decay(g: fx.Node, heads: int) -> Decay:
    """The decay of g [B, T, heads(, width)]; raises Refused for another form, or when its parts are used elsewhere."""
    found = match(_DECAY, g)
    if not isinstance(found, Match):
        raise Refused(f"the decay has an unknown form: {found.reason}")
    kind = "bounded" if "lower_bound" in found else "softplus"
    if kind == "bounded" and found["lower_bound"] >= 0:
        raise Refused(f"the bound of the decay is {found['lower_bound']}, not below 0")
    logits, bias, rate, result = (tensor_meta(node) for node in (found["logits"], found["bias"], found["factor"], g))
    if logits is None or bias is None or rate is None or result is None or logits.dim() != 3:
        raise Refused("the logits of the decay are not [batch, length, channels]")
    per_head = [heads, 1] if result.dim() == 4 else [heads]
    if bias.numel() != logits.shape[-1] or list(rate.shape)[-len(per_head) :] != per_head or rate.numel() != heads:
        raise Refused("the decay has no bias per channel or no rate per head")
    return Decay(
        kind,
        found["logits"],
        found["bias"],
        found["rate"],
        float(found.get("lower_bound", 0.0)),
        found.nodes,
    )


def read_sigmoid(beta: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """The logits of a write strength, and the nodes that compute it; raises Refused."""
    found = match(op(_SIGMOID, var("logits")), beta)
    if not isinstance(found, Match):
        raise Refused(f"the write strength is not a sigmoid: {found.reason}")
    return found["logits"], found.nodes


def _pattern() -> Pattern:
    exponential = op(_EXP, var("rate"))
    rate = op(aten("unsqueeze.default"), exponential, dim(-1), name="factor") | op(_EXP, var("rate"), name="factor")
    total = op(ADD, var("logits"), var("bias"), commutes=True)
    z = op(RESHAPES, total, anything(), shared=True) | total
    logarithm = op(aten("log.default"), op(ADD, op(_EXP, z), 1)) | op(aten("log1p.default"), op(_EXP, z))
    softplus = op(aten("softplus.default"), z) | op(aten("where.self"), op(aten("gt.Scalar"), z, 20), z, logarithm)
    bounded = op(MUL, op(_SIGMOID, op(MUL, rate, z, commutes=True)), number("lower_bound"), commutes=True)
    negative = op(MUL, op(_NEG, rate), softplus, commutes=True) | op(_NEG, op(MUL, rate, softplus, commutes=True))
    return bounded | negative


_DECAY = _pattern()


def _vector(rewriter: Rewriter, node: fx.Node) -> fx.Node:
    tensor = tensor_meta(node)
    if tensor is None:
        raise Refused(f"the shape of {node.name} is not known")
    if tensor.dim() == 1:
        return node
    if node.target in RESHAPES and (inner := tensor_meta(source_of(node))) is not None and inner.dim() == 1:
        return source_of(node)
    return rewriter.call(torch.ops.aten.reshape.default, node, [-1])
