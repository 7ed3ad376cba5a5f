"""Pass recognize_attention: softmax attention becomes moec::attention.

1. `scaled_dot_product_attention`, and attention written out as matmul, scale, mask, softmax, matmul, with attention
   sinks concatenated to the scores or not.
2. The mask must be provably causal, perhaps with a window and within documents, or absent (`masks.py`); the op then
   needs no mask at all.
3. Repeated key and value heads are not repeated: the op takes fewer heads.
4. The op works on [B, T, H, D]: transposes into [B, H, T, D] and back are folded.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

import moec.compiler.dialect  # noqa: F401  (registers torch.ops.moec)
from moec.compiler.graph import Unit, tensor_meta
from moec.compiler.matching import Match, match
from moec.compiler.nodes import aten, bound_args, origin, source_of
from moec.compiler.pass_manager import Pass, PassContext, Report
from moec.compiler.pattern import Pattern, anything, cast, dim, item, items, number, op, var
from moec.passes.layout import fold_users, transposed
from moec.passes.masks import Mask, NotUnderstood, understand
from moec.passes.parts import RESHAPES
from moec.passes.recognize_norm import ADD, DIV, MUL
from moec.passes.rewrite import Refused, Rewriter, Rule, Sign, apply_rules

_SDPA, _SOFTMAX, _MATMUL = aten("scaled_dot_product_attention.default"), aten("softmax.int"), aten("matmul.default")
_TRANSPOSE, _EXPAND, _UNSQUEEZE = aten("transpose.int"), aten("expand.default"), aten("unsqueeze.default")


class RecognizeAttention(Pass):
    """See the module docstring."""

    name = "recognize_attention"
    requires = ("normal_form",)
    provides = ("attention",)
    changes_numerics = True

    def run(self, unit: Unit, context: PassContext) -> Report:
        report = Report()
        apply_rules(unit, RULES, report, SIGNS, context.documents_of(unit))
        return report

    def expected(self, unit: Unit) -> str:
        left = [node for node in unit.graph.nodes if node.target in _SDPA]
        return f"{len(left)} scaled_dot_product_attention are in the graph, none was recognised" if left else ""


def _rewrite_sdpa(found: Match, rewriter: Rewriter) -> str:
    q, k, v, mask, dropout, causal, scale, grouped = bound_args(found.root)
    if dropout:
        raise Refused(f"attention dropout is {dropout}")
    if mask is not None and causal:
        raise Refused("it has a mask and is_causal")
    meaning = Mask(causal=True) if causal else _meaning(mask, rewriter.documents)
    return _replace(found, rewriter, (q, k, v), meaning, scale, None, grouped)


def _rewrite_written(found: Match, rewriter: Rewriter) -> str:
    if found.get("fill", -math.inf) > torch.finfo(_dtype(found.root)).min:
        raise Refused(f"hidden scores become {found['fill']}, which may still count")
    if "hidden" in found:
        meaning = _meaning(found["hidden"], rewriter.documents, hides=True)
    else:
        meaning = _meaning(found.get("mask", found.get("visible")), rewriter.documents)
    scale = found.get("scale", 1.0 / found["divisor"] if "divisor" in found else 1.0)
    sinks = _per_head(found["sink"], found["q"]) if "sink" in found else None
    return _replace(found, rewriter, (found["q"], found["k"], found["v"]), meaning, scale, sinks, grouped=False)


def _meaning(mask: fx.Node | None, documents: Collection[fx.Node], *, hides: bool = False) -> Mask:
    try:
        return understand(mask, documents, hides=hides)
    except NotUnderstood as reason:
        raise Refused(str(reason)) from None


def _replace(
    found: Match,
    rewriter: Rewriter,
    operands: tuple[fx.Node, fx.Node, fx.Node],
    mask: Mask,
    scale: float | None,
    sinks: fx.Node | None,
    grouped: bool,
) -> str:
    shapes = [_shape(node) for node in operands]
    if any(len(shape) != 4 for shape in shapes):
        raise Refused(f"queries have {len(shapes[0])} dimensions, not [B, H, T, D]")
    if shapes[0][2] != shapes[1][2] or shapes[1][2] != shapes[2][2]:
        raise Refused("queries and keys differ in length")
    scale = float(shapes[0][3]) ** -0.5 if scale is None else float(scale)
    q = transposed(rewriter, operands[0], 1, 2)
    k, v = _unrepeated(rewriter, operands[1], operands[2])
    heads, key_heads = _shape(q)[2], _shape(k)[2]
    if key_heads != _shape(v)[2] or heads % key_heads or (key_heads != heads and shapes[1][1] != heads and not grouped):
        raise Refused(f"{heads} query heads, {key_heads} key heads, {_shape(v)[2]} value heads")
    documents = _documents(rewriter, mask.documents, shapes[0][0])
    o, _ = rewriter.results(
        torch.ops.moec.attention.default, q, k, v, documents, sinks, scale, mask.window, mask.causal, count=2
    )
    back = rewriter.call(torch.ops.aten.transpose.int, o, 1, 2)
    rewriter.replace(found.root, back)
    rewriter.then(lambda: fold_users(rewriter.graph, back))
    kinds = ["causal" if mask.causal else "full"]
    kinds += [f"window {mask.window}"] if mask.window else []
    kinds += ["by document"] if documents is not None else []
    kinds += ["sinks"] if sinks is not None else []
    return f"attention of {heads} heads" + (f" to {key_heads}" if key_heads != heads else "") + f": {', '.join(kinds)}"


def _dtype(node: fx.Node) -> torch.dtype:
    tensor = tensor_meta(node)
    if tensor is None:
        raise Refused(f"the dtype of {node.name} is not known")
    return tensor.dtype


def _shape(node: fx.Node) -> torch.Size:
    tensor = tensor_meta(node)
    if tensor is None:
        raise Refused(f"the shape of {node.name} is not known")
    return tensor.shape


def _documents(rewriter: Rewriter, table: fx.Node | None, batch: int) -> fx.Node | None:
    if table is None or _shape(table)[0] == batch:
        return table
    return rewriter.call(torch.ops.aten.expand.default, table, [batch, -1])


# Repeated heads


def _unrepeated(rewriter: Rewriter, k: fx.Node, v: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Keys and values [B, T, G, D], each head once where both repeat their heads equally."""
    keys, values = _once(k), _once(v)
    if keys is None or values is None or keys.times != values.times:
        return transposed(rewriter, k, 1, 2), transposed(rewriter, v, 1, 2)
    return keys.placed(rewriter), values.placed(rewriter)


@dataclass(frozen=True)
class _Repeated:
    """Heads before they were repeated `times`: [B, T, G, D] if `in_place`, else [B, G, T, D]."""

    node: fx.Node
    in_place: bool
    times: int

    def placed(self, rewriter: Rewriter) -> fx.Node:
        return self.node if self.in_place else transposed(rewriter, self.node, 1, 2)


def _once(node: fx.Node) -> _Repeated | None:
    """What a node [B, H, T, D] repeats, if it does."""
    below = origin(node)
    for axis in (1, 2):
        inner = below
        if axis == 2:
            if below.target not in _TRANSPOSE or tuple(below.args[1:]) != (1, 2):
                return None
            inner = origin(source_of(below))
        found = match(_repeated(axis), inner, exclusive=False)
        if isinstance(found, Match):
            before, after = _shape(found["once"]), _shape(inner)
            times = after[axis] // before[axis]
            if found.get("times", times) == times and (
                "opened" not in found or _is_repeat(found["opened"], axis, times)
            ):
                return _Repeated(found["once"], axis == 2, times)
    return None


def _repeated(axis: int) -> Pattern:
    once = var("once", strip=False)
    opened = op(_EXPAND, op(_UNSQUEEZE, once, axis + 1), anything(), name="opened")
    return op(RESHAPES, opened, anything()) | op(aten("repeat_interleave.self_int"), once, number("times"), axis)


def _is_repeat(opened: fx.Node, axis: int, times: int) -> bool:
    """Whether expand(unsqueeze(x)) only repeats along the new dimension."""
    shape = list(_shape(opened))
    return shape.pop(axis + 1) == times and shape == list(_shape(source_of(source_of(opened))))


def _per_head(sink: fx.Node, q: fx.Node) -> fx.Node:
    """The vector [H] that sinks [B, H, T, 1] are broadcast from."""
    heads = _shape(q)[1]
    if list(_shape(sink)[1:]) != [heads, _shape(q)[2], 1]:
        raise Refused(f"the sinks have shape {list(_shape(sink))}")
    below = sink
    while len(_shape(below)) != 1:
        below = origin(below)
        if below.target not in _EXPAND | _UNSQUEEZE | RESHAPES:
            raise Refused("the sinks are not one number per head")
        below = source_of(below)
    if list(_shape(below)) != [heads]:
        raise Refused("the sinks are not one number per head")
    return below


# Attention written out


def _written() -> Pattern:
    q, k, v = var("q"), var("k"), var("v")
    raw = op(_MATMUL, q, op(_TRANSPOSE, k, 2, 3, shared=True))
    scaled = op(MUL, raw, number("scale"), commutes=True) | op(DIV, raw, number("divisor")) | raw
    scores = (
        op(ADD, scaled, var("mask", strip=False), commutes=True)
        | op(aten("masked_fill.Scalar"), scaled, var("hidden"), number("fill"))
        | op(aten("where.ScalarOther"), var("visible"), scaled, number("fill"))
        | scaled
    )
    joined = op(aten("cat.default"), items(scores, var("sink", strip=False)), dim(-1), name="joined")
    highest = item(op(aten("max.dim"), joined, dim(-1), True), 0) | op(aten("amax.default"), joined, dim(-1), True)
    with_sink = op(aten("sub.Tensor"), joined, highest) | joined
    kept = op(aten("slice.Tensor"), op(_SOFTMAX, with_sink, dim(-1), anything(), name="softmax"), dim(3), 0, -1, 1)
    shares = kept | op(_SOFTMAX, scores, dim(-1), anything(), name="softmax")
    return op(_MATMUL, cast(shares, "rounded"), v)


RULES = (
    Rule("attention", op(_SDPA, *[anything()] * 8), _rewrite_sdpa),
    Rule("attention", cast(_written(), "final"), _rewrite_written),
)
SIGNS = (
    Sign("attention", op(_SDPA, *[anything()] * 8), "it has an unknown form"),
    Sign(
        "attention",
        op(_SOFTMAX, op(_MATMUL, anything(), anything()) | op(MUL, op(_MATMUL, anything(), anything()), anything())
           | op(ADD | aten("masked_fill.Scalar"), op(MUL, op(_MATMUL, anything(), anything()), anything()),
                *[anything()] * 2), dim(-1), anything()),
        "its result is not multiplied by values",
    ),
)  # fmt: skip
