"""Pass normalize: one spelling for each thing, so that later patterns have one spelling to know. Values stay bitwise.

1. Metadata assertions are dropped.
2. In-place ops on fresh values become functional (`inplace.py`).
3. Ops are rewritten by the table `FOLDS`, op -> rule, until nothing changes: casts, copies, views, slices and
   transposes that change nothing disappear; every other cast is `aten.to.dtype`, every view `aten.reshape` (which,
   unlike view, also works when a rewrite has changed strides), every permute of two dimensions a `transpose`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from moec.compiler.aliases import last_writes
from moec.compiler.graph import Unit, tensor_meta
from moec.compiler.nodes import CASTS, Targets, aten, bound_args, source_of, target_name
from moec.compiler.pass_manager import Change, Pass, PassContext, Report
from moec.passes.inplace import make_functional
from moec.passes.rewrite import Rewriter, erase_dead

_DETACH = aten("detach.default")
_ASSERTIONS = aten("_assert_tensor_metadata.default")


class Normalize(Pass):
    """See the module docstring."""

    name = "normalize"
    stage = "captured"
    provides = ("normal_form",)
    routine = "plain operators without effect dropped, others brought into one form"

    def run(self, unit: Unit, context: PassContext) -> Report:
        report = Report()
        counts: Counter[str] = Counter()
        for node in unit.graph.nodes:
            if node.target in _ASSERTIONS:
                counts[f"{target_name(node)} dropped"] += 1
                unit.graph.erase_node(node)
        counts += make_functional(unit.graph, report)
        _fold(unit.graph, counts)
        report.matches += [Change("", f"{count} x {what}") for what, count in sorted(counts.items())]
        return report


def _fold(graph: fx.Graph, counts: Counter[str]) -> None:
    pinned = last_writes(graph)
    waiting = [node for node in graph.nodes if node.op == "call_function"]
    gone: set[fx.Node] = set()
    for node in waiting:
        rule = FOLDS.get(node.target)
        if rule is None or node in gone or node in pinned:
            continue
        rewriter = Rewriter(graph, [node], node)
        value = rule(node, rewriter)
        if value is None or value is node:
            continue
        counts[f"{target_name(node)} {'dropped' if value not in rewriter.created else 'in normal form'}"] += 1
        node.replace_all_uses_with(value)
        inputs = node.all_input_nodes
        graph.erase_node(node)
        gone |= {node} | erase_dead(graph, [*inputs, *rewriter.created])
        # The new node may fold further; it only depends on nodes that are folded already.
        waiting += [created for created in rewriter.created if created not in gone and created.target in FOLDS]


Fold = Callable[[fx.Node, Rewriter], fx.Node | None]


def _fold_cast(node: fx.Node, rewriter: Rewriter) -> fx.Node | None:
    source = source_of(node)
    after, before = tensor_meta(node), tensor_meta(source)
    if after is None or before is None or after.device != before.device or after.layout != before.layout:
        return None
    if after.dtype == before.dtype:
        # A requested memory format is a copy, as long as it is not the one the value has.
        if after.is_contiguous() and not before.is_contiguous():
            return rewriter.call(torch.ops.aten.contiguous.default, source)
        return source
    if node.target is torch.ops.aten.to.dtype and len(node.args) == 2 and not node.kwargs:
        return None
    return rewriter.call(torch.ops.aten.to.dtype, source, after.dtype)


def _fold_same_value(node: fx.Node, rewriter: Rewriter) -> fx.Node | None:
    return source_of(node)


def _fold_same_shape(node: fx.Node, rewriter: Rewriter) -> fx.Node | None:
    return source_of(node) if _same_shape(node) else None


def _fold_contiguous(node: fx.Node, rewriter: Rewriter) -> fx.Node | None:
    before = tensor_meta(source_of(node))
    plain = bound_args(node)[1] is torch.contiguous_format
    return source_of(node) if plain and before is not None and before.is_contiguous() else None


def _fold_detach(node: fx.Node, rewriter: Rewriter) -> fx.Node | None:
    source = source_of(node)
    tensor = tensor_meta(source)
    constant = tensor is not None and not tensor.is_floating_point() and not tensor.is_complex()
    return source if source.target in _DETACH or constant else None


def _fold_view(node: fx.Node, rewriter: Rewriter) -> fx.Node | None:
    """reshape(reshape(x)) is reshape(x); view, unflatten, flatten and view_as are reshapes."""
    source, sizes = source_of(node), _sizes(node)
    if _same_shape(node):
        return source
    inner = source_of(source) if source.target is torch.ops.aten.reshape.default else source
    if sizes is None or (inner is source and node.target is torch.ops.aten.reshape.default):
        return None
    return rewriter.call(torch.ops.aten.reshape.default, inner, sizes)


def _sizes(node: fx.Node) -> list[Any] | None:
    """The target sizes of a view: those it names, else those of its result, with -1 for one that is symbolic."""
    if node.target in aten("view.default", "reshape.default", "_unsafe_view.default"):
        return list(node.args[1])  # type: ignore[arg-type]
    tensor = tensor_meta(node)
    sizes = [] if tensor is None else [size if isinstance(size, int) else -1 for size in tensor.shape]
    return sizes if tensor is not None and sizes.count(-1) <= 1 else None


def _fold_slice(node: fx.Node, rewriter: Rewriter) -> fx.Node | None:
    """Whole slices go; the start is a number, since a symbolic length leaves it out."""
    source, along, start, end, step = bound_args(node)
    if step == 1 and _same_shape(node):
        return source_of(node)
    return rewriter.call(torch.ops.aten.slice.Tensor, source, along, 0, end, step) if start is None else None


def _fold_transpose(node: fx.Node, rewriter: Rewriter) -> fx.Node | None:
    source, pair = source_of(node), swapped_dims(node)
    if pair is None:
        return None
    if pair[0] == pair[1]:
        return source
    if source.target is torch.ops.aten.transpose.int and swapped_dims(source) == pair:
        return source_of(source)
    if node.target is torch.ops.aten.transpose.int and node.args[1:] == pair:
        return None
    return rewriter.call(torch.ops.aten.transpose.int, source, *pair)


def swapped_dims(node: fx.Node) -> tuple[int, int] | None:
    """The two dimensions, in order, that a transpose, t, mT or permute exchanges; None when it does not swap two."""
    tensor = tensor_meta(node)
    if tensor is None:
        return None
    rank = tensor.dim()
    if node.target in aten("transpose.int", "swapaxes.default", "swapdims.default"):
        pair: Any = node.args[1:3]
        first, second = sorted(value % rank for value in pair)
        return first, second
    if node.target in aten("permute.default"):
        dims: Any = node.args[1]
        order = [value % rank for value in dims]
        moved = [position for position, value in enumerate(order) if value != position]
        return (moved[0], moved[1]) if len(moved) == 2 else (0, 0) if not moved else None
    if node.target in aten("t.default", "mT.default", "numpy_T.default"):
        return (rank - 2, rank - 1) if rank == 2 or node.target in aten("mT.default") else None
    return None


def _fold_unsqueeze(node: fx.Node, rewriter: Rewriter) -> fx.Node | None:
    """unsqueeze(squeeze(x)) of the same dimension of size one is x."""
    source = source_of(node)
    if source.target not in aten("squeeze.dim"):
        return None
    inner, result = tensor_meta(source_of(source)), tensor_meta(node)
    return source_of(source) if inner is not None and result is not None and inner.shape == result.shape else None


def _fold_dropout(node: fx.Node, rewriter: Rewriter) -> fx.Node | None:
    source, probability, training = bound_args(node)
    return source if probability == 0.0 or not training else None


def _fold_identity(neutral: int) -> Fold:
    """x * 1, x / 1; x + 0, x - 0 for integers only, since -0.0 + 0 is 0.0."""

    def fold(node: fx.Node, rewriter: Rewriter) -> fx.Node | None:
        source, other = node.args[:2]
        after = tensor_meta(node)
        before = tensor_meta(source) if isinstance(source, fx.Node) else None
        if before is None or after is None or isinstance(other, fx.Node) or other != neutral or len(node.kwargs):
            return None
        exact = neutral == 1 or not before.is_floating_point()
        return source_of(node) if exact and before.dtype == after.dtype else None

    return fold


def _same_shape(node: fx.Node) -> bool:
    after, before = tensor_meta(node), tensor_meta(source_of(node))
    return after is not None and before is not None and before.dim() == after.dim() and before.shape == after.shape


def _table(*rules: tuple[Targets, Fold]) -> dict[Any, Fold]:
    return {target: rule for targets, rule in rules for target in targets}


FOLDS: dict[Any, Fold] = _table(
    (CASTS, _fold_cast),
    (aten("alias.default", "lift_fresh_copy.default"), _fold_same_value),
    (aten("contiguous.default"), _fold_contiguous),
    (_DETACH, _fold_detach),
    (
        aten(
            "view.default",
            "reshape.default",
            "_unsafe_view.default",
            "unflatten.int",
            "flatten.using_ints",
            "view_as.default",
            "reshape_as.default",
        ),
        _fold_view,
    ),
    (aten("expand.default", "expand_as.default"), _fold_same_shape),
    (aten("slice.Tensor"), _fold_slice),
    (
        aten(
            "transpose.int",
            "swapaxes.default",
            "swapdims.default",
            "permute.default",
            "t.default",
            "mT.default",
            "numpy_T.default",
        ),
        _fold_transpose,
    ),
    (aten("unsqueeze.default"), _fold_unsqueeze),
    (aten("dropout.default"), _fold_dropout),
    (aten("mul.Tensor", "div.Tensor"), _fold_identity(1)),
    (aten("add.Tensor", "sub.Tensor"), _fold_identity(0)),
)
