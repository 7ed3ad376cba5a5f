"""Rows of experts that are multiplied by their router weights: `rows * weights.flatten()[order].unsqueeze(-1)`.

`read_row_weights` takes such a product apart. Casts between floating point types are left out, since a kernel
multiplies in float32 and rounds once.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from moec.compiler.graph import tensor_meta
from moec.compiler.nodes import CASTS, COPIES, aten, bound_args, source_of
from moec.passes.parts import RESHAPES

_PRODUCT = aten("mul.Tensor")
_WIDENED = CASTS | COPIES | RESHAPES | aten("unsqueeze.default")
_ONES = aten("ones_like.default", "ones.default", "new_ones.default")
_FULL = aten("full.default", "full_like.default", "new_full.default")


@dataclass(frozen=True)
class RowWeights:
    """rows: what is multiplied. weights [N,k]; order: the slot of each row. inner: the product, and casts behind it."""

    rows: fx.Node
    weights: fx.Node
    order: fx.Node
    inner: tuple[fx.Node, ...]


def read_row_weights(value: fx.Node) -> RowWeights | None:
    """How `value` [R,D] is made of rows and their weights, None when it is not."""
    inner = []
    while value.target in CASTS | COPIES and _keeps_values(value):
        inner.append(value)
        value = source_of(value)
    if value.target not in _PRODUCT:
        return None
    inner.append(value)
    one, other = value.args
    for rows, factor in ((one, other), (other, one)):
        found = _looked_up(factor) if isinstance(factor, fx.Node) else None
        if isinstance(rows, fx.Node) and found is not None:
            return RowWeights(rows, *found, tuple(inner))
    return None


def are_ones(weights: fx.Node) -> bool:
    """Whether every element is 1 by how it is made."""
    while weights.target in CASTS | COPIES:
        weights = source_of(weights)
    return weights.target in _ONES or (weights.target in _FULL and bound_args(weights)[_fill(weights)] == 1)


def _fill(node: fx.Node) -> int:
    return 2 if node.target in aten("new_full.default") else 1


def _looked_up(factor: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """weights [N,k] and order of weights.flatten()[order], as [R,1]."""
    shape = tensor_meta(factor)
    if shape is None or shape.dim() != 2 or shape.shape[1] != 1:
        return None
    while factor.target in _WIDENED and _keeps_values(factor):
        factor = source_of(factor)
    found = _indexed(factor)
    if found is None:
        return None
    flat, order = found
    while flat.target in CASTS | COPIES and _keeps_values(flat):
        flat = source_of(flat)
    shape = tensor_meta(flat)
    if flat.target not in RESHAPES or shape is None or shape.dim() != 1:
        return None
    weights = source_of(flat)
    before = tensor_meta(weights)
    return (weights, order) if before is not None and before.dim() == 2 else None


def _keeps_values(cast: fx.Node) -> bool:
    """Whether nothing but the precision differs from the source."""
    metas = (tensor_meta(cast), tensor_meta(source_of(cast)))
    return all(meta is not None and meta.dtype.is_floating_point for meta in metas)


def _indexed(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """values, places of values[places] along the first dimension."""
    if node.target in aten("index.Tensor"):
        values, places = bound_args(node)
        return (values, places[0]) if len(places) == 1 and isinstance(places[0], fx.Node) else None
    if node.target in aten("index_select.default"):
        values, dim, chosen = bound_args(node)
        return (values, chosen) if dim == 0 else None
    return None
