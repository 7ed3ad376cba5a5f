"""Bytes that the KDA kernels hold while they run, beyond inputs and results: what `kda_launch.py` allocates.

Forward: the factors of every chunk (`kda_launch.Factors`). Backward: more of them, gradients of states and outputs,
partial sums of each chunk, and the gradients ahead of the convolutions, of which those of q, k and v are there before
the results are.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from moec.codegen.triton.under_op import value_of
from moec.compiler.dialect.registry import nbytes, size_hint
from moec.compiler.lower import argument_of

CHUNK = 64
_FLOAT = torch.float32.itemsize


def forward_workspace(node: fx.Node) -> int:
    """Of a call of `moec::kda_triton`: the more of what is held at its first passes, and at the scan and behind."""
    sizes = _Sizes(node)
    common = CHUNK * (3 * sizes.keys + (1 + sizes.convolved) * sizes.values) + CHUNK * CHUNK
    sums, behind = CHUNK * sizes.keys * _FLOAT, (CHUNK + sizes.keys) * sizes.values * sizes.item
    return sizes.tiles * (common * sizes.item + sizes.keys * _FLOAT + max(sums, behind)) + _copies(node)


def backward_workspace(node: fx.Node) -> int:
    """Of a call of `moec::kda_triton_backward`: the more of what is held at its chunks, and at the convolutions."""
    sizes, names = _Sizes(node), {argument.name for argument in node.target._schema.arguments}  # type: ignore[union-attr]
    given = (value_of(argument_of(node, n)) for n in names & {"gate", "beta", "output_gate", "initial_state"})
    made = sum(nbytes(value) for value in given if value is not None)
    partials = _FLOAT * sizes.rows * (sizes.heads * sizes.parts + sizes.gates + sizes.norms)
    by_row = CHUNK * (2 + sizes.parts + (sizes.parts if sizes.scalar else 0)) + 1
    scratch = sizes.tiles * (2 * CHUNK * CHUNK * sizes.item + by_row * _FLOAT)
    factors = CHUNK * (5 * sizes.keys + (2 + sizes.convolved) * sizes.values) + 2 * CHUNK * CHUNK
    gradients = (CHUNK + sizes.keys) * sizes.values  # of the outputs and states of a chunk
    numbers = factors + sizes.keys * sizes.values + gradients
    at_chunks = sizes.tiles * (numbers * sizes.item + (CHUNK + 1) * sizes.keys * _FLOAT)
    behind = sizes.operands if sizes.convolved or sizes.grouped else 0
    behind += _FLOAT * sizes.batch * sizes.taps * sizes.conv_programs
    held = sizes.before_convolutions + made + partials + scratch + max(at_chunks, behind)
    return max(0, held - sum(nbytes(value) for value in node.meta["val"])) + _copies(node)


class _Sizes:
    """Of the arguments of a call, by the names of its schema."""

    def __init__(self, node: fx.Node) -> None:
        q, k, v, gate = (value_of(argument_of(node, name)) for name in ("q", "k", "v", "gate"))
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
        taps = [value_of(argument_of(node, name)) for name in ("conv_q", "conv_k", "conv_v")]
        self.taps = sum(size_hint(value.numel()) for value in taps if value is not None)
        self.convolved, self.scalar = int(self.taps > 0), self.gates == self.heads
        # Needs Triton, without which nothing is lowered to the kernels.
        from moec.codegen.triton.kda_arguments import launch_for

        launch = launch_for(self.keys, self.values, 0 if taps[0] is None else size_hint(taps[0].shape[1]))
        self.parts = self.keys // min(launch.keys_channels, self.keys)
        self.conv_programs = -(-self.length // (launch.conv_rows * launch.conv_repeats))


def _copies(node: fx.Node) -> int:
    """Operands with gaps are copied."""
    given = (source.meta.get("val") for source in node.all_input_nodes)
    return sum(nbytes(value) for value in given if isinstance(value, Tensor) and not value.is_contiguous())
