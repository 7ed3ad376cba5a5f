"""Gradients of what all tokens share, from the partial sums that the kernels leave: one launch for all of them."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

# 32 bytes of a row of partial sums, the least that memory gives, and rows enough to keep it busy.
SUM_COLUMNS = 8
SUM_ROWS = 256


@triton.jit(do_not_specialize=["rows", "tap_rows"])
def kda_sums(
    partials, tap_partials, grad_A_log, grad_dt_bias, grad_norm, grad_conv_q, grad_conv_k, grad_conv_v, rows, tap_rows,
    HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PARTS: tl.constexpr,
    GATES: tl.constexpr, NORM: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Programs: (block of COLUMNS results, one of A_log, dt_bias, norm weight and the three convolutions' taps).

    partials [rows, VALUE_HEADS * PARTS + GATES + VALUE_HEADS * V], float32: for each chunk the shares of A_log by value
    head and block of channels, of dt_bias, and of the norm weight by value head if NORM. tap_partials
    [tap_rows, (2 HEADS K + VALUE_HEADS V) WIDTH], float32, if WIDTH > 0. The order of a sum depends on the number of
    its terms alone; results are rounded once, to the dtype of the gradient.
    """
    block, part = tl.program_id(0), tl.program_id(1)
    A_SHARES: tl.constexpr = VALUE_HEADS * PARTS
    SHARES: tl.constexpr = A_SHARES + GATES
    STRIDE: tl.constexpr = SHARES + VALUE_HEADS * V if NORM else SHARES
    Q_TAPS: tl.constexpr = HEADS * K * WIDTH
    V_TAPS: tl.constexpr = VALUE_HEADS * V * WIDTH
    TAPS: tl.constexpr = 2 * Q_TAPS + V_TAPS
    if part == 0:
        _sum(partials, grad_A_log, block, rows, STRIDE, PARTS, 1, PARTS, VALUE_HEADS, COLUMNS, ROWS)
    elif part == 1:
        _sum(partials + A_SHARES, grad_dt_bias, block, rows, STRIDE, 1, 0, 1, GATES, COLUMNS, ROWS)
    elif part == 2:
        if NORM:
            _sum(partials + SHARES, grad_norm, block, rows, STRIDE, VALUE_HEADS, V, 1, V, COLUMNS, ROWS)
    elif WIDTH > 0:
        if part == 3:
            _sum(tap_partials, grad_conv_q, block, tap_rows, TAPS, 1, 0, 1, Q_TAPS, COLUMNS, ROWS)
        elif part == 4:
            _sum(tap_partials + Q_TAPS, grad_conv_k, block, tap_rows, TAPS, 1, 0, 1, Q_TAPS, COLUMNS, ROWS)
        else:
            _sum(tap_partials + 2 * Q_TAPS, grad_conv_v, block, tap_rows, TAPS, 1, 0, 1, V_TAPS, COLUMNS, ROWS)


@triton.jit
def _sum(
    source, into, block, rows, STRIDE: tl.constexpr, INNER: tl.constexpr, INNER_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr, COUNT: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Results block * COLUMNS .. of COUNT, each the sum of INNER terms of every row; result c starts at column
    c * COLUMN_STRIDE of a row, its terms are INNER_STRIDE apart."""
    of = block * COLUMNS + tl.arange(0, COLUMNS)
    if block * COLUMNS < COUNT:
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in tl.range(0, rows * INNER, ROWS):
            term = first + tl.arange(0, ROWS)
            place = (term // INNER).to(tl.int64) * STRIDE + term % INNER * INNER_STRIDE
            known = (term < rows * INNER)[:, None] & (of < COUNT)[None, :]
            total += tl.load(source + place[:, None] + (of * COLUMN_STRIDE)[None, :], mask=known, other=0.0)
        tl.store(into + of, tl.sum(total, 0).to(into.dtype.element_ty), mask=of < COUNT)
