"""Which part of which tensor a node is: slices, chunks, splits and selections read as one thing."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from moec.compiler.graph import tensor_meta
from moec.compiler.nodes import Targets, aten, bound_args, origin

SLICES = aten("slice.Tensor", "narrow.default")
SPLITS = aten("chunk.default", "split.Tensor", "split_with_sizes.default", "unsafe_chunk.default")
RESHAPES = aten("reshape.default", "view.default", "_unsafe_view.default", "flatten.using_ints")
_SLICE = aten("slice.Tensor")
_TO_THE_END = 2**63 - 1


@dataclass(frozen=True)
class Part:
    """Elements start, start + step, ... (`length` of them) of dimension `dim` (counted from 0) of `source`."""

    source: fx.Node
    dim: int
    start: int
    length: int
    step: int
    size: int


def part_of(node: fx.Node) -> Part | None:
    """The part that a slice or one result of a split is; None for other nodes and for symbolic sizes."""
    node = origin(node)
    if node.op != "call_function":
        return None
    if node.target in SLICES:
        return _slice(node)
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node) and node.args[0].target in SPLITS:
        return _split(node.args[0], node.args[1])  # type: ignore[arg-type]
    return None


def parts_of(source: fx.Node, targets: Targets = SLICES | SPLITS) -> list[tuple[fx.Node, Part]]:
    """All parts that are taken of `source`, directly, in graph order."""
    found = []
    for user in source.users:
        if user.op != "call_function" or user.target not in targets or user.args[0] is not source:
            continue
        for node in [user] if user.target in SLICES else list(user.users):
            part = part_of(node)
            if part is not None:
                found.append((node, part))
    return sorted(found, key=lambda pair: pair[0])


def _slice(node: fx.Node) -> Part | None:
    source, dim, start, end, *step = bound_args(node)
    size = _size(source, dim)
    if size is None or not all(isinstance(value, int | None) for value in (start, end)):
        return None
    if node.target not in _SLICE:
        return Part(source, dim % _rank(source), start % size if size else 0, end, 1, size)
    first, last, _ = slice(start, None if end == _TO_THE_END else end).indices(size)
    stride = int(step[0])
    return Part(source, dim % _rank(source), first, max(0, -(-(last - first) // stride)), stride, size)


def _split(split: fx.Node, index: int) -> Part | None:
    source = split.args[0]
    outputs = split.meta.get("val")
    if not isinstance(source, fx.Node) or outputs is None:
        return None
    dim = bound_args(split)[2] % _rank(source)
    size = _size(source, dim)
    lengths = [output.shape[dim] for output in outputs]
    if size is None or not all(isinstance(length, int) for length in lengths):
        return None
    return Part(source, dim, sum(lengths[:index]), lengths[index], 1, size)


def _rank(node: fx.Node) -> int:
    tensor = tensor_meta(node)
    return 0 if tensor is None else tensor.dim()


def _size(node: fx.Node, dim: int) -> int | None:
    tensor = tensor_meta(node)
    size = None if tensor is None else tensor.shape[dim]
    return size if isinstance(size, int) else None
