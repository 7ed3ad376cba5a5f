"""Logits between an output head and a loss: the pattern, and what of it the loss ops take as arguments.

    head    linear(hidden, weight, bias), or hidden @ weight^T
    scaled  logits * number, logits / number            capped  number * tanh(logits / number)
    cut     a slice over the length                      rows    a reshape to rows of logits

with casts that round nothing anywhere in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moec.compiler.graph import tensor_meta
from moec.compiler.matching import Match
from moec.compiler.nodes import aten, bound_args
from moec.compiler.pattern import Pattern, anything, cast, dim, number, op, var
from moec.passes.parts import RESHAPES
from moec.passes.recognize_norm import DIV, MUL
from moec.passes.rewrite import Refused, Rewriter

_LINEAR, _MATMUL = aten("linear.default"), aten("matmul.default", "mm.default")
_SLICE, _TANH, _TRANSPOSE = aten("slice.Tensor"), aten("tanh.default"), aten("transpose.int")
_CASTS = ("cast_head", "cast_scaled", "cast_capped", "cast_rows")


def _logits() -> Pattern:
    hidden, weight = var("hidden"), var("weight")
    head = op(_LINEAR, hidden, weight, anything(), name="head") | op(
        _MATMUL, hidden, op(_TRANSPOSE, weight, 0, 1, shared=True), name="head"
    )
    plain = cast(head, "cast_head")
    scaled = op(MUL, plain, number("scale"), commutes=True) | op(DIV, plain, number("divisor"))
    given = cast(scaled | plain, "cast_scaled")
    capped = op(MUL, op(_TANH, op(DIV, given, number("softcap"))), number("softcap"), commutes=True)
    whole = cast(capped | scaled | plain, "cast_capped")
    cut = op(_SLICE, whole, dim(1), *[anything()] * 3, name="cut") | whole
    rows = op(RESHAPES, cut, anything(), name="rows") | cut
    return cast(rows, "cast_rows")


LOGITS = _logits()
CLASSES_SECOND = op(_TRANSPOSE, LOGITS, 1, 2, name="classes_second") | LOGITS


@dataclass(frozen=True)
class Logits:
    """The head of a match as arguments: hidden [N, D] (made by `read`), weight, bias, and the form of the logits."""

    hidden: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    scale: float
    softcap: float
    classes: int

    def text(self) -> str:
        """', scaled by 0.5, soft cap 30', for the log."""
        scaled = f", scaled by {self.scale:g}" if self.scale != 1 else ""
        return scaled + (f", soft cap {self.softcap:g}" if self.softcap else "")


def read(found: Match, rewriter: Rewriter) -> Logits:
    """Raises Refused where the logits are not those that the op would make."""
    logits = tensor_meta(found["head"])
    if logits is None or not isinstance(logits.shape[-1], int):
        raise Refused("the number of classes is not known")
    rows = tensor_meta(found["rows"]) if "rows" in found else logits
    if rows is None or rows.shape[-1] != logits.shape[-1]:
        raise Refused("the rows of logits are cut up")
    for name in _CASTS:
        if name in found and _dtype(found[name]) not in (torch.float32, torch.float64, logits.dtype):
            raise Refused(f"the logits are cast to {_dtype(found[name])}")
        if name in found and _dtype(found[name]) == torch.float64 != logits.dtype:
            raise Refused("the logits are cast to torch.float64")
    hidden = found["hidden"]
    if "cut" in found:
        _, *where = bound_args(found["cut"])
        hidden = rewriter.call(torch.ops.aten.slice.Tensor, hidden, *where)
    tensor = tensor_meta(hidden)
    if tensor is None or not isinstance(tensor.shape[-1], int):
        raise Refused("the width of the hidden state is not known")
    if tensor.dim() != 2:
        hidden = rewriter.call(torch.ops.aten.reshape.default, hidden, [-1, tensor.shape[-1]])
    bias = bound_args(found["head"])[2] if found["head"].target in _LINEAR else None
    scale = float(found["scale"]) if "scale" in found else 1 / float(found.get("divisor", 1.0))
    return Logits(hidden, found["weight"], bias, scale, float(found.get("softcap", 0.0)), logits.shape[-1])


def same_logits(one: Match, other: Match) -> bool:
    """Whether two matches read the same rows of the same logits."""
    same = all(one.get(name) == other.get(name) for name in ("head", "scale", "divisor", "softcap"))
    cuts = [bound_args(m["cut"])[1:] if "cut" in m else None for m in (one, other)]
    return same and cuts[0] == cuts[1]


def row_shape(node: fx.Node) -> list[Any]:
    """The sizes of a tensor as `reshape` takes them; Refused where more than one is symbolic."""
    tensor = tensor_meta(node)
    sizes = [] if tensor is None else [size if isinstance(size, int) else -1 for size in tensor.shape]
    if tensor is None or sizes.count(-1) > 1:
        raise Refused("the shape of the losses is not known")
    return sizes


def _dtype(node: fx.Node) -> torch.dtype | None:
    tensor = tensor_meta(node)
    return None if tensor is None else tensor.dtype
