"""What the KDA kernels share: how a chunk's rows are read, how decays between its rows are formed, and the solve.

A chunk is 64 rows of one value head. Between row i and a later row r lies the decay 2^(G_r - G_i), G the sum of the
base-2 log decays from the chunk's start, float32, in memory. It is never formed as 2^G_r / 2^G_i: rows meet across the
border between two neighbouring blocks of 32, 16, ... rows, and each side has one factor, from the border to the row or
from the row to the border, which is at most 1.

Where a bound on the log decay makes it safe, pairs inside a block of 16 or 32 rows meet at its middle row instead
(`DIAGONAL`); otherwise the blocks go down to single rows (`DIAGONAL` = 1).
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import os

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# No step decays by more: 2^-160 is zero in every format used, and sums of 64 steps keep 2^-11 of a step.
STEEPEST = tl.constexpr(-160.0)

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def exp2(x):
    """2^x in one instruction, denormal results as zero; the interpreter has no assembly."""
    if _INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def shared(x):
    """x, bfloat16, as a left operand of a dot that is to be read from shared memory.

    Otherwise the compiler keeps what leads to it in registers, once for every group of warps that shares the rows. An
    operation with an effect stops it; this one costs no instruction.
    """
    if _INTERPRETED:
        return x
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, is_pure=False, pack=2)


@triton.jit
def once(x):
    """x, float32, computed once and then moved to where it is needed.

    Otherwise the compiler repeats what leads to it, exponentials included, for every arrangement of the tile among the
    threads. It costs no instruction either.
    """
    if _INTERPRETED:
        return x
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], tl.float32, is_pure=False, pack=1)


@triton.jit
def sigmoid(x):
    """1 / (1 + 2^(-x log2 e)) with the approximate reciprocal: relative error about 2^-22."""
    if _INTERPRETED:
        return tl.sigmoid(x)
    below = 1.0 + exp2(x * -1.4426950408889634)
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [below], tl.float32, is_pure=True, pack=1)


@triton.jit
def mixed_rows(x, taps, documents, rows, length, stride, columns, WIDTH: tl.constexpr, PACKED: tl.constexpr):
    """Rows of x [T, stride] at `columns`, through the causal convolution if WIDTH > 0, before its activation."""
    if WIDTH == 0:
        return tl.load(x + rows[:, None] * stride + columns[None, :], mask=(rows < length)[:, None], other=0.0).to(
            tl.float32
        )
    mixed = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    if PACKED:
        document = tl.load(documents + rows, mask=rows < length, other=-1)
    for back in tl.static_range(WIDTH):
        source = rows - back
        reached = (source >= 0) & (rows < length)
        if PACKED and back > 0:
            reached = reached & (tl.load(documents + source, mask=reached, other=-2) == document)
        tap = tl.load(taps + columns * WIDTH + (WIDTH - 1 - back)).to(tl.float32)
        value = tl.load(x + source[:, None] * stride + columns[None, :], mask=reached[:, None], other=0.0)
        mixed += tap[None, :] * value.to(tl.float32)
    return mixed


@triton.jit
def activated(mixed, WIDTH: tl.constexpr):
    """SiLU after a convolution, nothing without one."""
    if WIDTH == 0:
        return mixed
    return mixed * sigmoid(mixed)


@triton.jit
def through_activation(grad, mixed, WIDTH: tl.constexpr):
    """Gradient of `mixed` from that of `activated(mixed)`."""
    if WIDTH == 0:
        return grad
    opening = sigmoid(mixed)
    return grad * opening * (1.0 + mixed * (1.0 - opening))


@triton.jit
def unit_rows(x, eps):
    """x / |x| per row and 1 / |x|, |x| = sqrt(sum x^2 + eps)."""
    inverse = tl.rsqrt(tl.sum(x * x, 1) + eps)
    return x * inverse[:, None], inverse


@triton.jit
def value_rows(v, values, start, value_head, tile, rows, length, columns, VALUE_HEADS: tl.constexpr, V: tl.constexpr,
               C: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """A chunk's values [C, columns]: v [B * T, HV * V] itself, or what `kda_prepare` made of it with convolutions."""
    if WIDTH > 0:
        return tl.load(values + tile * C * V + tl.arange(0, C)[:, None] * V + columns[None, :]).to(tl.float32)
    place = v + (start + rows)[:, None] * (VALUE_HEADS * V) + value_head * V + columns[None, :]
    return tl.load(place, mask=(rows < length)[:, None], other=0.0).to(tl.float32)


@triton.jit
def gate_logits(gate, dt_bias, start, value_head, rows, length, columns, VALUE_HEADS: tl.constexpr, K: tl.constexpr,
                SCALAR: tl.constexpr):  # fmt: skip
    """gate + dt_bias of one value head: its channels `columns`, or the one logit of the head [rows, 1] if SCALAR.

    gate [B * T, HV * K] or [B * T, HV]; start: the first row of the batch row.
    """
    stride = VALUE_HEADS
    if SCALAR:
        columns = value_head + tl.arange(0, 1)
    else:
        columns = value_head * K + columns
        stride = VALUE_HEADS * K
    place = (start + rows)[:, None] * stride + columns[None, :]
    logits = tl.load(gate + place, mask=(rows < length)[:, None], other=0.0).to(tl.float32)
    return logits + tl.load(dt_bias + columns).to(tl.float32)[None, :]


@triton.jit
def log_steps(logits, rate, lower_bound, rows, length, C: tl.constexpr, BK: tl.constexpr, BOUNDED: tl.constexpr):
    """Base-2 log decays [C, BK] of the rows, zero beyond the length."""
    decay = log_decay(logits, rate, lower_bound, BOUNDED) * LOG2E
    if not BOUNDED:
        decay = tl.maximum(decay, STEEPEST)
    return tl.broadcast_to(tl.where((rows < length)[:, None], decay, 0.0), (C, BK))


@triton.jit
def log_decay(logits, rate, lower_bound, BOUNDED: tl.constexpr):
    """Log decay, natural units; rate = exp(A_log)."""
    if BOUNDED:
        return lower_bound * sigmoid(rate * logits)
    small = tl.exp(-tl.abs(logits))
    # log(1 + x) loses the digits of a small x.
    tail = tl.where(small < 1e-3, small * (1.0 - 0.5 * small), tl.log(1.0 + small))
    return -rate * (tl.maximum(logits, 0.0) + tail)


@triton.jit
def segments(documents, rows, length, PACKED: tl.constexpr):
    """How many documents have started in the chunk, before the sequence's first aside, up to each row; the starts."""
    starts = rows < 0
    if PACKED:
        document = tl.load(documents + rows, mask=rows < length, other=-1)
        before = tl.load(documents + rows - 1, mask=(rows > 0) & (rows < length), other=-1)
        starts = (rows > 0) & (rows < length) & (document != before)
        return tl.cumsum(starts.to(tl.int32), 0), starts
    return tl.zeros_like(rows), starts


@triton.jit
def to_border(sums, at_chunk, columns, half, C: tl.constexpr, K: tl.constexpr):
    """Decays [C, BK] between each row and the border of the halves of its block of 2 half rows.

    sums: the rows' G, of which `at_chunk` [C, K] in memory holds all.
    """
    row = tl.arange(0, C)
    border = row // (2 * half) * (2 * half) + half - 1
    return exp2(-tl.abs(sums - tl.load(at_chunk + border[:, None] * K + columns[None, :])))


@triton.jit
def from_middle(sums, at_chunk, columns, SIZE: tl.constexpr, C: tl.constexpr, K: tl.constexpr):
    """Exponents [C, BK] from the middle row of each row's block of SIZE rows to the row, of either sign."""
    row = tl.arange(0, C)
    middle = row // SIZE * SIZE + SIZE // 2
    return sums - tl.load(at_chunk + middle[:, None] * K + columns[None, :])


@triton.jit
def half_factors(sums, at_chunk, columns, C: tl.constexpr, K: tl.constexpr):
    """Decays [C, BK] from the middle of the chunk to its later rows and from its earlier rows to there, else zero."""
    later = (tl.arange(0, C) >= C // 2)[:, None]
    factor = exp2(-tl.abs(sums - tl.load(at_chunk + (C // 2 - 1) * K + columns)[None, :]))
    return tl.where(later, factor, 0.0), tl.where(later, 0.0, factor)


@triton.jit
def from_quarters(sums, at_chunk, columns, C: tl.constexpr, K: tl.constexpr):
    """`from_middle` for blocks of half a chunk, whose two middle rows are loaded once."""
    first = tl.load(at_chunk + C // 4 * K + columns)[None, :]
    second = tl.load(at_chunk + C // 4 * 3 * K + columns)[None, :]
    return sums - tl.where((tl.arange(0, C) >= C // 2)[:, None], second, first)


@triton.jit
def level_pairs(row, column, half):
    """Whether `row` and `column` meet at this level: halves of one block of 2 half rows, the row in the second."""
    apart = row ^ column
    return (apart >= half) & (apart < 2 * half) & (column < row)


@triton.jit
def unit_lower_inverse(system, levels, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + system)^-1, system [SIZE, SIZE] strictly lower, by joining neighbouring blocks; levels = log2(SIZE).

    No power of the system appears, whose entries may be large where those of the inverse are not.
    """
    row = tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(level_pairs(row, column, 1), system, 0.0)
    for level in tl.range(1, levels, num_stages=1):
        corner = tl.where(level_pairs(row, column, 1 << level), system, 0.0)
        joined = tl.dot(inverse, corner, input_precision=PRECISION)
        inverse -= tl.dot(joined, inverse, input_precision=PRECISION)
    return inverse
