"""Bytes that the KDA kernels hold while they run, beyond inputs and results: what `kda_launch.py` allocates.

Forward: the factors of every chunk (`kda_launch.Factors`). Backward: the same with the inverse, gradients of states and
outputs, partial sums of each chunk, and the gradients ahead of the convolutions, of which those of q, k and v are there
before the results are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from moec.compiler.dialect.registry import nbytes, size_hint
from moec.compiler.lower import argument_of

CHUNK = 64
CONV_ROWS = 512
"""Rows of one program of the convolutions' backward (`kda_launch.Launch`)."""


def forward_workspace(node: fx.Node) -> int:
    """Of a call of `moec::kda_triton`."""
    return _Sizes(node).factors(inverse=False) + _copies(node)


def backward_workspace(node: fx.Node) -> int:
    """Of a call of `moec::kda_triton_backward`: the more of what is held at its chunks, and at the convolutions."""
    sizes, given = _Sizes(node), {n: _value(argument_of(node, n)) for n in ("gate", "beta", "output_gate", "conv_q")}
    through = sizes.before_convolutions
    made = sum(nbytes(given[name]) for name in ("gate", "beta", "output_gate") if given[name] is not None)
    partials = 4 * sizes.rows * (sizes.heads + sizes.gates + sizes.norms)
    at_chunks = (
        sizes.factors(inverse=True) + sizes.tiles * (CHUNK * sizes.values + sizes.keys * sizes.values) * sizes.item
    )
    behind = 0
    if given["conv_q"] is not None:
        behind = sizes.operands + 4 * sizes.batch * -(-sizes.length // CONV_ROWS) * sizes.taps
    elif sizes.grouped:
        behind = sizes.operands
    held = through + made + partials + max(at_chunks, behind)
    results = sum(nbytes(value) for value in node.meta["val"])
    return max(0, held - results) + _copies(node)


class _Sizes:
    """Of the arguments of a call, by the names of its schema."""

    def __init__(self, node: fx.Node) -> None:
        q, k, v, gate = (_value(argument_of(node, name)) for name in ("q", "k", "v", "gate"))
        key_heads, self.heads = int(argument_of(node, "heads")), int(argument_of(node, "value_heads"))
        self.batch, self.length, width = (size_hint(size) for size in q.shape)
        self.keys, self.values = width // key_heads, size_hint(v.shape[2]) // self.heads
        self.rows = self.batch * -(-self.length // CHUNK)
        self.tiles = self.rows * self.heads
        self.gates = size_hint(gate.shape[2])
        self.norms = self.heads * self.values if argument_of(node, "norm_weight") is not None else 0
        self.grouped = key_heads != self.heads
        self.item = q.element_size()
        self.operands = nbytes(q) + nbytes(k) + nbytes(v)
        self.before_convolutions = self.batch * self.length * self.heads * (2 * self.keys + self.values) * self.item
        taps = [_value(argument_of(node, name)) for name in ("conv_q", "conv_k", "conv_v")]
        self.taps = sum(size_hint(value.numel()) for value in taps if value is not None)

    def factors(self, *, inverse: bool) -> int:
        square = (2 if inverse else 1) * CHUNK * CHUNK
        numbers = CHUNK * (3 * self.keys + 2 * self.values) + square + self.keys * self.values
        return self.tiles * (numbers * self.item + self.keys * torch.float32.itemsize)


def _copies(node: fx.Node) -> int:
    """Operands with gaps are copied."""
    given = (source.meta.get("val") for source in node.all_input_nodes)
    return sum(nbytes(value) for value in given if isinstance(value, Tensor) and not value.is_contiguous())


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument
