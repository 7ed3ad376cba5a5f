"""Memory that an op holds only while it runs, beyond its inputs and results.

1. A rule of the table `WORKSPACE`, where an implementation brings one (`register_workspace`) that fits the call.
2. An op of the dialect that runs its Python body: the body is run once on tensors of the meta device under an
   allocation count, so the answer is that of the code itself. Sizes that are data count as expected.
3. Bodies that read their data (`_BY_SIZE`) cannot run so; what they hold follows from the sizes, and inside of another
   body is left out.
4. ATen ops count none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from moec.compiler._torch_compat import OpOverload, pytree
from moec.compiler.allocations import AllocationCount, rounded
from moec.compiler.dialect.registry import BODIES, nbytes, size_hint
from moec.compiler.nodes import bound_args

Rule = Callable[[fx.Node], int]
KernelRule = Callable[[fx.Node], int | None]

WORKSPACE: dict[OpOverload, KernelRule] = {}
"""Op -> bytes it holds while it runs, by node; whoever brings a kernel adds its rule."""


def register_workspace(op: OpOverload, rule: KernelRule) -> None:
    """Say what an implementation holds while it runs; None for a call that it does not take."""
    WORKSPACE[op] = rule


class Workspaces:
    """The workspace of nodes; equal calls are measured once."""

    def __init__(self, granularity: int = 1) -> None:
        self._granularity = granularity
        self._known: dict[Any, int] = {}

    def of(self, node: fx.Node) -> int:
        """Bytes beyond inputs and results while the node's op runs."""
        op = node.target
        by_kernel, by_size = WORKSPACE.get(op), _BY_SIZE.get(op)  # type: ignore[call-overload]
        known = by_kernel(node) if by_kernel is not None else None
        if known is None and by_size is not None:
            known = by_size(node)
        if known is not None:
            return rounded(known, self._granularity)
        if op not in BODIES:
            return 0
        args = pytree.tree_map_only(fx.Node, lambda source: _on_meta(source.meta.get("val")), bound_args(node))
        key = (op, str(pytree.tree_map_only(Tensor, _key, args)))
        if key not in self._known:
            self._known[key] = self._measured(BODIES[op], args)  # type: ignore[index]
        return self._known[key]

    def _measured(self, body: Callable[..., Any], args: Any) -> int:
        with torch.no_grad(), AllocationCount(self._granularity, _BY_SIZE) as count:
            result = body(*args)
        workspace = count.peak - count.held
        del result
        return workspace


def _on_meta(value: Any) -> Any:
    """Tensors of the same sizes and strides without data; sizes by their hints."""
    if isinstance(value, Tensor):
        sizes, strides = ([size_hint(n) for n in numbers] for numbers in (value.shape, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    return [_on_meta(item) for item in value] if isinstance(value, list | tuple) else value


def _key(value: Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), value.stride(), value.dtype


def _membership(node: fx.Node) -> int:
    """torch's grouped matmul runs with the expert of each row, and a position of each row to find it by."""
    x = bound_args(node)[0].meta["val"]
    return 12 * size_hint(x.shape[0]) if x.device.type == "cuda" else 0


def _exchanged(node: fx.Node) -> int:
    """Rows once more in the order in which they travel, and three numbers for the place of each."""
    rows = max((bound_args(node)[0].meta["val"], node.meta["val"]), key=nbytes)
    return nbytes(rows) + 24 * size_hint(rows.shape[0])


def _nothing(node: fx.Node) -> int:
    return 0


def _few(node: fx.Node) -> int:
    """Some numbers per expert."""
    return nbytes(node.meta["val"])


_OPS = torch.ops.moec
_BY_SIZE: dict[OpOverload, Rule] = {
    _OPS.grouped_linear.default: _membership,
    _OPS.grouped_linear_backward.default: _membership,
    _OPS.offload.default: _nothing,
    _OPS.fetch.default: _nothing,
    _OPS.exchange_counts.default: _few,
    _OPS.exchange.default: _exchanged,
    _OPS.exchange_back.default: _exchanged,
    _OPS.exchange_padded.default: _exchanged,
    _OPS.exchange_padded_back.default: _exchanged,
}
