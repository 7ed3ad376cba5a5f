"""The launches of the KDA kernels: work tensors, grids, and how forward and backward share their first passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from moec.codegen.triton.kda_backward_conv import kda_backward_conv
from moec.codegen.triton.kda_backward_keys import kda_backward_keys
from moec.codegen.triton.kda_backward_rows import kda_backward_rows
from moec.codegen.triton.kda_backward_values import kda_backward_values
from moec.codegen.triton.kda_forward_chunk import kda_forward_chunk
from moec.codegen.triton.kda_output import kda_backward_output, kda_forward_output
from moec.codegen.triton.kda_prepare import kda_prepare
from moec.codegen.triton.kda_scan import kda_backward_scan, kda_forward_scan

CHUNK = 64
LEVELS = 6
# Pairs of a block of rows meet at its middle while half the block decays by no more than this, base e: e^80 is finite.
MIDDLE_LIMIT = 80.0


@dataclass(frozen=True)
class Launch:
    """Warps and tile widths of every kernel, chosen on an H200; they change speed only."""

    prepare_warps: int = 4
    prepare_channels: int = 64
    prepare_rows: int = 32
    chunk_warps: int = 8
    chunk_channels: int = 32
    chunk_registers: int | None = 128
    scan_columns: int = 32
    scan_warps: int = 4
    scan_stages: int = 3
    output_warps: int = 4
    values_warps: int = 8
    values_channels: int = 64
    keys_warps: int = 8
    keys_channels: int = 32
    keys_registers: int | None = 128
    rows_warps: int = 4
    rows_rows: int = 32
    conv_rows: int = 32
    conv_repeats: int = 16
    conv_warps: int = 4
    inverse_precision: str = "tf32"


LAUNCH = Launch()


class Inputs(NamedTuple):
    """Arguments of `moec::kda`, in the order of its schema."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    beta: Tensor
    A_log: Tensor
    dt_bias: Tensor
    conv_q: Tensor | None
    conv_k: Tensor | None
    conv_v: Tensor | None
    output_gate: Tensor | None
    norm_weight: Tensor | None
    document_ids: Tensor | None
    heads: int
    value_heads: int
    gate_kind: str
    lower_bound: float
    l2_eps: float
    norm_eps: float
    output_activation: str
    scale: float
    chunk: int

    @property
    def key_width(self) -> int:
        return self.q.shape[2] // self.heads

    @property
    def value_width(self) -> int:
        return self.v.shape[2] // self.value_heads

    @property
    def chunks(self) -> int:
        return -(-self.q.shape[1] // CHUNK)

    @property
    def taps(self) -> int:
        return 0 if self.conv_q is None else self.conv_q.shape[1]

    @property
    def scalar(self) -> bool:
        return self.gate.shape[2] == self.value_heads

    def contiguous(self) -> Inputs:
        return Inputs._make(value.contiguous() if isinstance(value, Tensor) else value for value in self)


class Factors(NamedTuple):
    """What the passes before the output leave, [B * HV, chunks, ...]: kda_prepare, kda_forward_chunk, and the scan."""

    unit_q: Tensor
    unit_k: Tensor
    values: Tensor
    sums: Tensor
    keys_in: Tensor
    values_in: Tensor
    keys_out: Tensor
    queries_in: Tensor
    pairs: Tensor
    inverse: Tensor
    totals: Tensor
    states: Tensor
    updates: Tensor


def forward(inputs: Inputs, launch: Launch = LAUNCH) -> Tensor:
    """y [B, T, HV * V] of `moec::kda`: four launches."""
    inputs = inputs.contiguous()
    y = torch.empty_like(inputs.v)
    if y.numel() == 0:
        return y
    factors = _factors(inputs, launch, keep=False)
    q = inputs.q
    kda_forward_output[(inputs.chunks, q.shape[0] * inputs.value_heads)](
        factors.queries_in, factors.pairs, factors.states, factors.updates, _or(inputs.output_gate, q),
        _or(inputs.norm_weight, q), y, q.shape[1], inputs.chunks, inputs.norm_eps, **_output_constants(inputs),
        num_warps=launch.output_warps,
    )  # fmt: skip
    return y


def backward(grad_y: Tensor, inputs: Inputs, launch: Launch = LAUNCH) -> tuple[Tensor, ...]:
    """The gradients that `moec::kda_backward` returns."""
    inputs, grad_y = inputs.contiguous(), grad_y.contiguous()
    (batch, length, _), heads = inputs.q.shape, inputs.value_heads
    width, value_width = inputs.key_width, inputs.value_width
    if inputs.v.numel() == 0:
        given = (value if isinstance(value, Tensor) else inputs.v.new_empty(0) for value in inputs[:12])
        return tuple(torch.zeros_like(value) for value in given)
    q, v, chunks, grid = inputs.q, inputs.v, inputs.chunks, (inputs.chunks, batch * heads)
    factors = _factors(inputs, launch, keep=True)
    parts = width // min(launch.keys_channels, width)
    shares = heads * parts + inputs.gate.shape[2]
    norm_shares = heads * value_width if inputs.norm_weight is not None else 0
    partials = torch.empty(batch * chunks, shares + norm_shares, device=q.device, dtype=torch.float32)

    # What the first pass wrote for the forward scan is read by now, except what the reverse scan needs.
    grad_updates, grad_o = factors.values_in, torch.empty_like(factors.values_in)
    grad_output_gate = v.new_empty(0) if inputs.output_gate is None else torch.empty_like(inputs.output_gate)
    kda_backward_output[grid](
        grad_y, factors.queries_in, factors.pairs, factors.states, factors.updates, _or(inputs.output_gate, q),
        _or(inputs.norm_weight, q), grad_output_gate, grad_o, grad_updates, partials, length, chunks, inputs.norm_eps,
        partials.shape[1], shares, **_output_constants(inputs), DTYPE=_dtype(q), num_warps=launch.output_warps,
    )  # fmt: skip
    grad_states = torch.empty_like(factors.states)
    block = min(launch.scan_columns, value_width)
    kda_backward_scan[(value_width // block, batch * heads)](
        factors.keys_in, factors.keys_out, factors.queries_in, factors.totals, grad_o, grad_updates, grad_states,
        chunks, K=width, V=value_width, BV=block, C=CHUNK, DTYPE=_dtype(q), STAGES=launch.scan_stages,
        num_warps=launch.scan_warps,
    )  # fmt: skip
    grad_q, grad_k = (q.new_empty(batch, length, heads * width) for _ in range(2))
    grad_v, grad_gate, grad_beta = (torch.empty_like(value) for value in (v, inputs.gate, inputs.beta))
    constants, documents = _chunk_constants(inputs), _or(inputs.document_ids, q)
    constants |= {"SHARES": 2 + parts, "PARTS": parts}

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(batch * heads, chunks, *shape, device=q.device, dtype=dtype)

    diagonals, ranges, by_row = scratch(2, CHUNK, CHUNK, dtype=q.dtype), scratch(), scratch(2 + parts, CHUNK)
    scalar_grads = scratch(parts, CHUNK) if inputs.scalar else ranges
    kda_backward_values[grid](
        v, inputs.beta, documents, factors.values, factors.inverse, factors.pairs, factors.updates, grad_o,
        grad_updates, diagonals, grad_v, by_row, ranges, length, chunks, value_width,
        **_taken(kda_backward_values, constants), BK=min(launch.values_channels, value_width),
        num_warps=launch.values_warps,
    )  # fmt: skip
    kda_backward_keys[(chunks * parts, batch * heads)](
        inputs.gate, inputs.A_log, inputs.dt_bias, documents, factors.unit_q, factors.unit_k, factors.sums,
        factors.inverse, factors.pairs, diagonals, ranges, factors.states, factors.updates, grad_o, grad_updates,
        grad_states, grad_q, grad_k, grad_gate, by_row, partials, scalar_grads, length, chunks,
        _levels(constants["DIAGONAL"]), inputs.lower_bound, partials.shape[1], **_taken(kda_backward_keys, constants),
        BK=width // parts, num_warps=launch.keys_warps, maxnreg=launch.keys_registers,
    )  # fmt: skip
    kda_backward_rows[grid](
        *inputs[:7], *_convolutions(inputs), documents, by_row, scalar_grads, grad_q, grad_k, grad_v, grad_gate,
        grad_beta, partials, length, chunks, CHUNK, inputs.lower_bound, inputs.l2_eps, inputs.scale, partials.shape[1],
        **_taken(kda_backward_rows, constants), ROWS=launch.rows_rows, num_warps=launch.rows_warps,
    )  # fmt: skip
    del factors, grad_states, grad_o, grad_updates
    grads, grad_taps = _through_convolutions(inputs, (grad_q, grad_k, grad_v), launch)
    grad_A_log, grad_dt_bias, grad_norm = partials.sum(0).split((heads * parts, inputs.gate.shape[2], norm_shares))
    grad_A_log = grad_A_log.view(heads, parts).sum(1)
    grad_norm_weight = (
        v.new_empty(0)
        if inputs.norm_weight is None
        else grad_norm.view(heads, value_width).sum(0).to(inputs.norm_weight.dtype)
    )
    # Fresh tensors: results of an op may not share storage.
    return (
        *grads,
        grad_gate,
        grad_beta,
        grad_A_log.to(inputs.A_log.dtype, copy=True),
        grad_dt_bias.to(inputs.dt_bias.dtype, copy=True),
        *grad_taps,
        grad_output_gate,
        grad_norm_weight,
    )


def _factors(inputs: Inputs, launch: Launch, keep: bool) -> Factors:
    """The passes over the inputs and the scan; `keep` what the backward needs."""
    q, v, lanes, chunks = inputs.q, inputs.v, inputs.q.shape[0] * inputs.value_heads, inputs.chunks
    length, width, value_width = q.shape[1], inputs.key_width, inputs.value_width
    grid, documents, constants = (chunks, lanes), _or(inputs.document_ids, q), _chunk_constants(inputs)

    def tile(*shape: int, dtype: torch.dtype = q.dtype) -> Tensor:
        return torch.empty(lanes, chunks, *shape, device=q.device, dtype=dtype)

    unit_q, unit_k, sums = tile(CHUNK, width), tile(CHUNK, width), tile(CHUNK, width, dtype=torch.float32)
    values = v if inputs.conv_v is None else tile(CHUNK, value_width)
    kda_prepare[grid](
        q, inputs.k, v, inputs.gate, inputs.A_log, inputs.dt_bias, *_convolutions(inputs), documents, unit_q, unit_k,
        values, sums, length, chunks, width, value_width, CHUNK, inputs.lower_bound, inputs.l2_eps, inputs.scale,
        **_taken(kda_prepare, constants), BK=min(launch.prepare_channels, width), ROWS=launch.prepare_rows,
        num_warps=launch.prepare_warps,
    )  # fmt: skip
    keys_in, queries_in = (tile(CHUNK, width), tile(CHUNK, width)) if keep else (unit_k, unit_q)
    keys_out, values_in = tile(CHUNK, width), tile(CHUNK, value_width)
    pairs, inverse, totals = tile(CHUNK, CHUNK), tile(CHUNK, CHUNK) if keep else q, tile(width, dtype=torch.float32)
    kda_forward_chunk[grid](
        v, inputs.beta, documents, unit_q, unit_k, values, sums, keys_in, values_in, keys_out, queries_in, pairs,
        inverse, totals, length, chunks, width, value_width, _levels(constants["DIAGONAL"]), LEVELS,
        **_taken(kda_forward_chunk, constants), BK=min(launch.chunk_channels, width, value_width), STORE_INVERSE=keep,
        PRECISION=launch.inverse_precision if q.dtype != torch.float32 else "ieee", num_warps=launch.chunk_warps,
        maxnreg=launch.chunk_registers,
    )  # fmt: skip
    if not keep:
        del sums
        sums = totals
    updates, states = tile(CHUNK, value_width), tile(width, value_width)
    block = min(launch.scan_columns, value_width)
    kda_forward_scan[(value_width // block, lanes)](
        keys_in, values_in, keys_out, totals, states, updates, chunks, K=width, V=value_width, BV=block, C=CHUNK,
        DTYPE=_dtype(q), STAGES=launch.scan_stages, num_warps=launch.scan_warps,
    )  # fmt: skip
    return Factors(
        unit_q, unit_k, values, sums, keys_in, values_in, keys_out, queries_in, pairs, inverse, totals, states, updates
    )


def _through_convolutions(
    inputs: Inputs, grads: tuple[Tensor, Tensor, Tensor], launch: Launch
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of q, k, v and of the taps (empty without convolutions)."""
    batch, length, _ = inputs.q.shape
    heads, value_heads, width, value_width = inputs.heads, inputs.value_heads, inputs.key_width, inputs.value_width
    if inputs.conv_q is None or inputs.conv_k is None or inputs.conv_v is None:
        grad_q, grad_k = (
            grad if heads == value_heads else grad.view(batch, length, heads, -1, width).sum(3).flatten(2)
            for grad in grads[:2]
        )
        return [grad_q, grad_k, grads[2]], [inputs.q.new_empty(0) for _ in range(3)]
    taps = (inputs.conv_q, inputs.conv_k, inputs.conv_v)
    outputs = [torch.empty_like(value) for value in inputs[:3]]  # type: ignore[arg-type]
    blocks = -(-length // (launch.conv_rows * launch.conv_repeats))
    sizes = [value.numel() for value in taps]
    partials = torch.empty(batch * blocks, sum(sizes), device=inputs.q.device, dtype=torch.float32)
    kda_backward_conv[(blocks, 2 * heads + value_heads, batch)](
        *grads, *inputs[:3], *taps, *outputs, _or(inputs.document_ids, inputs.q), partials, length, blocks,
        launch.conv_repeats, HEADS=heads, VALUE_HEADS=value_heads, K=width, V=value_width, ROWS=launch.conv_rows,
        WIDTH=inputs.taps, PACKED=inputs.document_ids is not None,
        num_warps=launch.conv_warps,
    )  # fmt: skip
    sums = partials.sum(0).split(sizes)
    return outputs, [s.view(value.shape).to(value.dtype, copy=True) for s, value in zip(sums, taps, strict=True)]


def _convolutions(inputs: Inputs) -> list[Tensor]:
    """The taps, q in place of each that is absent."""
    return [_or(taps, inputs.q) for taps in (inputs.conv_q, inputs.conv_k, inputs.conv_v)]


def _levels(diagonal: int) -> int:
    """Levels of halves above those blocks."""
    return (CHUNK // diagonal).bit_length() - 1


def _diagonal(inputs: Inputs) -> int:
    """Rows of the blocks whose pairs meet at the middle row, 1 for none."""
    if inputs.gate_kind != "bounded":
        return 1
    return next((rows for rows in (32, 16) if rows // 2 * abs(inputs.lower_bound) <= MIDDLE_LIMIT), 1)


def _chunk_constants(inputs: Inputs) -> dict[str, Any]:
    return {
        "HEADS": inputs.heads,
        "VALUE_HEADS": inputs.value_heads,
        "K": inputs.key_width,
        "V": inputs.value_width,
        "C": CHUNK,
        "DIAGONAL": _diagonal(inputs),
        "WIDTH": inputs.taps,
        "PACKED": inputs.document_ids is not None,
        "SCALAR": inputs.scalar,
        "BOUNDED": inputs.gate_kind == "bounded",
        "DTYPE": _dtype(inputs.q),
    }


def _taken(kernel: Any, constants: dict[str, Any]) -> dict[str, Any]:
    """The constants that a kernel has."""
    return {name: value for name, value in constants.items() if name in kernel.arg_names}


def _output_constants(inputs: Inputs) -> dict[str, Any]:
    return {
        "VALUE_HEADS": inputs.value_heads,
        "K": inputs.key_width,
        "V": inputs.value_width,
        "C": CHUNK,
        "NORM": inputs.norm_weight is not None,
        "SILU": inputs.output_activation == "silu",
    }


def _or(value: Tensor | None, other: Tensor) -> Tensor:
    return other if value is None else value


def _dtype(value: Tensor) -> tl.dtype:
    return {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[value.dtype]
