"""The launches of the KDA kernels: work tensors, grids, and how forward and backward share their first passes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moec.codegen.triton.kda_arguments import CHUNK, Inputs, Launch, constants_for, levels_above, present
from moec.codegen.triton.kda_backward_conv import kda_backward_conv
from moec.codegen.triton.kda_backward_keys import kda_backward_keys
from moec.codegen.triton.kda_backward_rows import kda_backward_rows
from moec.codegen.triton.kda_backward_values import kda_backward_values
from moec.codegen.triton.kda_forward_chunk import kda_forward_chunk
from moec.codegen.triton.kda_output import kda_backward_output, kda_forward_output
from moec.codegen.triton.kda_prepare import kda_prepare
from moec.codegen.triton.kda_scan import kda_backward_scan, kda_forward_scan
from moec.codegen.triton.kda_sums import SUM_COLUMNS, SUM_ROWS, kda_sums

LEVELS = CHUNK.bit_length() - 1


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


def forward(inputs: Inputs, launch: Launch | None = None) -> Tensor:
    """y [B, T, HV * V] of `moec::kda`: four launches."""
    return _forward(inputs, launch, None)


def forward_with_state(inputs: Inputs, launch: Launch | None = None) -> tuple[Tensor, Tensor]:
    """y [B, T, HV * V] and the final state [B, HV, K, V], float32, of `moec::kda_with_state`."""
    final = inputs.states()
    return _forward(inputs, launch, final), final


def _forward(inputs: Inputs, launch: Launch | None, final: Tensor | None) -> Tensor:
    inputs, launch = inputs.contiguous(), launch or inputs.launch
    y = torch.empty_like(inputs.v)
    if y.numel() == 0:
        _hand_over(inputs.initial_state, final)
        return y
    factors = _factors(inputs, launch, final, keep=False)
    q = inputs.q
    kda_forward_output[(inputs.chunks, q.shape[0] * inputs.value_heads)](
        factors.queries_in, factors.pairs, factors.states, factors.updates, present(inputs.output_gate, q),
        present(inputs.norm_weight, q), y, q.shape[1], inputs.chunks, inputs.norm_eps,
        **constants_for(kda_forward_output, inputs), num_warps=launch.output_warps,
    )  # fmt: skip
    return y


def backward(grad_y: Tensor, inputs: Inputs, launch: Launch | None = None) -> tuple[Tensor, ...]:
    """The gradients that `moec::kda_backward` returns."""
    return backward_with_state(grad_y, None, inputs, launch)[:-1]


def backward_with_state(
    grad_y: Tensor, grad_final: Tensor | None, inputs: Inputs, launch: Launch | None = None
) -> tuple[Tensor, ...]:
    """The gradients that `moec::kda_with_state_backward` returns, grad_final [B, HV, K, V] that of the final state."""
    inputs, grad_y, launch = inputs.contiguous(), grad_y.contiguous(), launch or inputs.launch
    (batch, length, _), heads = inputs.q.shape, inputs.value_heads
    width, value_width = inputs.key_width, inputs.value_width
    initial = inputs.initial_state
    grad_initial = inputs.v.new_empty(0) if initial is None else torch.empty_like(initial)
    if inputs.v.numel() == 0:
        given = (value if isinstance(value, Tensor) else inputs.v.new_empty(0) for value in inputs[:12])
        _hand_over(grad_final, grad_initial)
        return *(torch.zeros_like(value) for value in given), grad_initial
    q, v, chunks, grid = inputs.q, inputs.v, inputs.chunks, (inputs.chunks, batch * heads)
    factors = _factors(inputs, launch, None, keep=True)
    parts = width // min(launch.keys_channels, width)
    shares = heads * parts + inputs.gate.shape[2]
    norm_shares = heads * value_width if inputs.norm_weight is not None else 0
    partials = torch.empty(batch * chunks, shares + norm_shares, device=q.device, dtype=torch.float32)

    # What the first pass wrote for the forward scan is read by now, except what the reverse scan needs.
    grad_updates, grad_o = factors.values_in, torch.empty_like(factors.values_in)
    grad_output_gate = v.new_empty(0) if inputs.output_gate is None else torch.empty_like(inputs.output_gate)
    kda_backward_output[grid](
        grad_y, factors.queries_in, factors.pairs, factors.states, factors.updates, present(inputs.output_gate, q),
        present(inputs.norm_weight, q), grad_output_gate, grad_o, grad_updates, partials, length, chunks,
        inputs.norm_eps, partials.shape[1], shares, **constants_for(kda_backward_output, inputs),
        BV=min(launch.back_output_columns, value_width), num_warps=launch.back_output_warps,
    )  # fmt: skip
    grad_states = torch.empty_like(factors.states)
    block = min(launch.scan_columns, value_width)
    kda_backward_scan[(value_width // block, batch * heads)](
        factors.keys_in, factors.keys_out, factors.queries_in, factors.totals, grad_o, grad_updates, grad_states,
        q if grad_final is None else grad_final.contiguous(), grad_initial, chunks,
        **constants_for(kda_backward_scan, inputs), FINAL=grad_final is not None, BV=block, STAGES=launch.scan_stages,
        num_warps=launch.scan_warps,
    )  # fmt: skip
    grad_q, grad_k = (q.new_empty(batch, length, heads * width) for _ in range(2))
    grad_v, grad_gate, grad_beta = (torch.empty_like(value) for value in (v, inputs.gate, inputs.beta))
    documents = present(inputs.document_ids, q)

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(batch * heads, chunks, *shape, device=q.device, dtype=dtype)

    diagonals, ranges, by_row = scratch(2, CHUNK, CHUNK, dtype=q.dtype), scratch(), scratch(2 + parts, CHUNK)
    scalar_grads = scratch(parts, CHUNK) if inputs.scalar else ranges
    kda_backward_values[grid](
        v, inputs.beta, documents, factors.values, factors.inverse, factors.pairs, factors.updates, grad_o,
        grad_updates, diagonals, grad_v, by_row, ranges, length, chunks, value_width,
        **constants_for(kda_backward_values, inputs), SHARES=2 + parts, BK=min(launch.values_channels, value_width),
        num_warps=launch.values_warps,
    )  # fmt: skip
    kda_backward_keys[(chunks * parts, batch * heads)](
        inputs.gate, inputs.A_log, inputs.dt_bias, documents, factors.unit_q, factors.unit_k, factors.sums,
        factors.inverse, factors.pairs, diagonals, ranges, factors.states, factors.updates, grad_o, grad_updates,
        grad_states, grad_q, grad_k, grad_gate, by_row, partials, scalar_grads, length, chunks, levels_above(inputs),
        inputs.lower_bound, partials.shape[1], **constants_for(kda_backward_keys, inputs), SHARES=2 + parts,
        BK=width // parts, BV=min(launch.keys_columns, value_width), num_warps=launch.keys_warps,
        maxnreg=launch.keys_registers,
    )  # fmt: skip
    kda_backward_rows[grid](
        *inputs[:7], *_convolutions(inputs), documents, by_row, scalar_grads, grad_q, grad_k, grad_v, grad_gate,
        grad_beta, partials, length, chunks, CHUNK, inputs.lower_bound, inputs.l2_eps, inputs.scale, partials.shape[1],
        **constants_for(kda_backward_rows, inputs), PARTS=parts, ROWS=launch.rows_rows, num_warps=launch.rows_warps,
    )  # fmt: skip
    del factors, grad_states, grad_o, grad_updates
    grads, tap_partials = _through_convolutions(inputs, (grad_q, grad_k, grad_v), launch)
    sums = _sums(inputs, partials, tap_partials, parts)
    return *grads, grad_gate, grad_beta, *sums[:2], *sums[3:], grad_output_gate, sums[2], grad_initial


def _hand_over(given: Tensor | None, taken: Tensor | None) -> None:
    """Without tokens, a state and its gradient pass through."""
    if taken is not None and taken.numel():
        taken.zero_() if given is None else taken.copy_(given)


def _factors(inputs: Inputs, launch: Launch, final: Tensor | None, keep: bool) -> Factors:
    """The passes over the inputs and the scan, which fills `final` if that is given; `keep` what the backward needs."""
    q, v, lanes, chunks = inputs.q, inputs.v, inputs.q.shape[0] * inputs.value_heads, inputs.chunks
    length, width, value_width = q.shape[1], inputs.key_width, inputs.value_width
    grid, documents = (chunks, lanes), present(inputs.document_ids, q)

    def tile(*shape: int, dtype: torch.dtype = q.dtype) -> Tensor:
        return torch.empty(lanes, chunks, *shape, device=q.device, dtype=dtype)

    unit_q, unit_k, sums = tile(CHUNK, width), tile(CHUNK, width), tile(CHUNK, width, dtype=torch.float32)
    values = v if inputs.conv_v is None else tile(CHUNK, value_width)
    kda_prepare[grid](
        q, inputs.k, v, inputs.gate, inputs.A_log, inputs.dt_bias, *_convolutions(inputs), documents, unit_q, unit_k,
        values, sums, length, chunks, width, value_width, CHUNK, inputs.lower_bound, inputs.l2_eps, inputs.scale,
        **constants_for(kda_prepare, inputs), BK=min(launch.prepare_channels, width), ROWS=launch.prepare_rows,
        num_warps=launch.prepare_warps,
    )  # fmt: skip
    keys_in, queries_in = (tile(CHUNK, width), tile(CHUNK, width)) if keep else (unit_k, unit_q)
    keys_out, values_in = tile(CHUNK, width), tile(CHUNK, value_width)
    pairs, inverse, totals = tile(CHUNK, CHUNK), tile(CHUNK, CHUNK) if keep else q, tile(width, dtype=torch.float32)
    kda_forward_chunk[grid](
        v, inputs.beta, documents, unit_q, unit_k, values, sums, keys_in, values_in, keys_out, queries_in, pairs,
        inverse, totals, length, chunks, width, value_width, levels_above(inputs), LEVELS,
        **constants_for(kda_forward_chunk, inputs), BK=min(launch.chunk_channels, width, value_width),
        STORE_INVERSE=keep, PRECISION=launch.inverse_precision if q.dtype != torch.float32 else "ieee",
        num_warps=launch.chunk_warps, maxnreg=launch.chunk_registers,
    )  # fmt: skip
    if not keep:
        del sums
        sums = totals
    updates, states = tile(CHUNK, value_width), tile(width, value_width)
    block = min(launch.scan_columns, value_width)
    kda_forward_scan[(value_width // block, lanes)](
        keys_in, values_in, keys_out, totals, states, updates, present(inputs.initial_state, q), present(final, q),
        chunks, **constants_for(kda_forward_scan, inputs), FINAL=final is not None, BV=block,
        STAGES=launch.scan_stages, num_warps=launch.scan_warps,
    )  # fmt: skip
    return Factors(
        unit_q, unit_k, values, sums, keys_in, values_in, keys_out, queries_in, pairs, inverse, totals, states, updates
    )


def _through_convolutions(
    inputs: Inputs, grads: tuple[Tensor, Tensor, Tensor], launch: Launch
) -> tuple[list[Tensor], Tensor]:
    """Gradients of q, k, v, and the taps' partial sums by block of rows (empty without convolutions)."""
    batch, length, _ = inputs.q.shape
    heads, value_heads, width = inputs.heads, inputs.value_heads, inputs.key_width
    if inputs.conv_q is None or inputs.conv_k is None or inputs.conv_v is None:
        grad_q, grad_k = (
            grad if heads == value_heads else grad.view(batch, length, heads, -1, width).sum(3).flatten(2)
            for grad in grads[:2]
        )
        return [grad_q, grad_k, grads[2]], inputs.q.new_empty(0)
    taps = (inputs.conv_q, inputs.conv_k, inputs.conv_v)
    outputs = [torch.empty_like(value) for value in inputs[:3]]  # type: ignore[arg-type]
    blocks = -(-length // (launch.conv_rows * launch.conv_repeats))
    columns = sum(value.numel() for value in taps)
    partials = torch.empty(batch * blocks, columns, device=inputs.q.device, dtype=torch.float32)
    kda_backward_conv[(blocks, 2 * heads + value_heads, batch)](
        *grads, *inputs[:3], *taps, *outputs, present(inputs.document_ids, inputs.q), partials, length, blocks,
        launch.conv_repeats, **constants_for(kda_backward_conv, inputs), ROWS=launch.conv_rows,
        num_warps=launch.conv_warps,
    )  # fmt: skip
    return outputs, partials


def _sums(inputs: Inputs, partials: Tensor, tap_partials: Tensor, parts: int) -> list[Tensor]:
    """Gradients of A_log, dt_bias, norm weight and taps, empty for what is not given."""
    shared = (inputs.A_log, inputs.dt_bias, inputs.norm_weight, inputs.conv_q, inputs.conv_k, inputs.conv_v)
    sums = [inputs.q.new_empty(0) if value is None else torch.empty_like(value) for value in shared]
    blocks = -(-max(value.numel() for value in sums) // SUM_COLUMNS)
    kda_sums[(blocks, len(sums))](
        partials, tap_partials, *sums, partials.shape[0], tap_partials.shape[0], **constants_for(kda_sums, inputs),
        PARTS=parts, GATES=inputs.gate.shape[2], COLUMNS=SUM_COLUMNS, ROWS=SUM_ROWS, num_warps=8,
    )  # fmt: skip
    return sums


def _convolutions(inputs: Inputs) -> list[Tensor]:
    """The taps, q in place of each that is absent."""
    return [present(taps, inputs.q) for taps in (inputs.conv_q, inputs.conv_k, inputs.conv_v)]
