"""First pass over the inputs, row by row: convolutions, SiLU, norms, and sums of log decays."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from moec.codegen.triton.kda_tiles import activated, gate_logits, log_steps, mixed_rows, unit_rows


@triton.jit(do_not_specialize=["length", "chunks", "width", "value_width", "rows_of"])
def kda_prepare(
    q, k, v, gate, A_log, dt_bias, conv_q, conv_k, conv_v, documents, unit_q, unit_k, values, sums,
    length, chunks, width, value_width, rows_of, lower_bound, l2_eps, scale,
    HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    C: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr, SCALAR: tl.constexpr,
    BOUNDED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One program per (chunk, batch row and value head); writes, per chunk, zero beyond the length:

    unit_q = scale q / |q| and unit_k = k / |k| [C, K], values [C, V] if there are convolutions, all in DTYPE, and
    sums [C, K] = G, the base-2 log decay from the chunk's start through each row, float32.
    """
    chunk = tl.program_id(0)
    lane = tl.program_id(1).to(tl.int64)
    batch, value_head = lane // VALUE_HEADS, lane % VALUE_HEADS
    head = value_head // (VALUE_HEADS // HEADS)
    start = batch * length
    documents += start
    tile = lane * chunks + chunk
    offset = start * HEADS * K + head * K
    _unit_rows(q + offset, conv_q + head * K * WIDTH, documents, unit_q + tile * C * K, chunk, length, rows_of,
               HEADS * K, l2_eps, scale, K, C, ROWS, WIDTH, PACKED, DTYPE)  # fmt: skip
    _unit_rows(k + offset, conv_k + head * K * WIDTH, documents, unit_k + tile * C * K, chunk, length, rows_of,
               HEADS * K, l2_eps, 1.0, K, C, ROWS, WIDTH, PACKED, DTYPE)  # fmt: skip
    if WIDTH > 0:
        v += start * VALUE_HEADS * V + value_head * V
        of_v = tl.arange(0, V)
        for first in tl.range(0, rows_of, ROWS, num_stages=1):
            of_c = first + tl.arange(0, ROWS)
            mixed = mixed_rows(v, conv_v + value_head * V * WIDTH, documents, chunk * C + of_c, length, VALUE_HEADS * V,
                               of_v, WIDTH, PACKED)  # fmt: skip
            place = values + tile * C * V + of_c[:, None] * V + of_v[None, :]
            tl.store(place, activated(mixed, WIDTH).to(DTYPE))
    rows = chunk * C + tl.arange(0, C)
    rate = tl.exp(tl.load(A_log + value_head).to(tl.float32))
    for part in tl.range(0, width, BK, num_stages=1):
        of_part = part + tl.arange(0, BK)
        logits = gate_logits(gate, dt_bias, start, value_head, rows, length, of_part, VALUE_HEADS, K, SCALAR)
        steps = log_steps(logits, rate, lower_bound, rows, length, C, BK, BOUNDED)
        place = sums + tile * C * K + tl.arange(0, C)[:, None] * K + of_part[None, :]
        tl.store(place, tl.cumsum(steps, 0))


@triton.jit
def _unit_rows(x, taps, documents, into, chunk, length, rows_of, stride, eps, scale, D: tl.constexpr, C: tl.constexpr,
               ROWS: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """A chunk's rows of x [T, D], through convolution and activation, normalised, times scale, to `into` [C, D]."""
    of_d = tl.arange(0, D)
    for first in tl.range(0, rows_of, ROWS, num_stages=1):
        of_c = first + tl.arange(0, ROWS)
        mixed = mixed_rows(x, taps, documents, chunk * C + of_c, length, stride, of_d, WIDTH, PACKED)
        normal, _ = unit_rows(activated(mixed, WIDTH), eps)
        tl.store(into + of_c[:, None] * D + of_d[None, :], (normal * scale).to(DTYPE))
