"""What the KDA kernels share: how a chunk's rows are read, how decays between its rows are formed, and the solve.

A chunk is 64 rows of one value head. Between row i and a later row r lies the decay exp(sum of g over i < j <= r). It
is never formed as exp(G_r) / exp(G_i): rows meet across the border between two neighbouring blocks of 32, 16, ...
rows, and each side has one factor, from the border to the row or from the row to the border. The exponents are sums
of g along those paths, computed as a 0/1 matrix times g on the tensor cores; with g <= 0 no exponent is positive, a
large negative entry at the start of a document cuts every path across it, and nothing cancels. Exponents are base 2.

Where a bound on g makes it safe, pairs inside a block of 16 rows meet at its middle row instead (`DIAGONAL` = 16);
otherwise the blocks go down to single rows (`DIAGONAL` = 1).
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

# Added to g, base 2, at the first row of a document: 2^CUT is exactly zero, and the number is finite in every format.
CUT = tl.constexpr(-9984.0)
LOG2E = tl.constexpr(1.4426950408889634)
# Places in the table of paths; the level with halves of C >> (l + 1) rows is at LEVEL + l.
START, END, MIDDLE, LEVEL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
MIDDLE_ROWS = 16


def path_table(size: int) -> torch.Tensor:
    """[3 + log2(size), size, size] of -1, 0, 1: entry r, j says how g of row j counts on row r's path.

    From the start of the chunk through r; from after r to its end; from the middle row of r's block of MIDDLE_ROWS
    (negative where the path leads up to it); from the border between the halves of r's block to r, or from after r to
    that border, for blocks of `size`, `size / 2`, ..., 2 rows.
    """
    row, via = torch.arange(size)[:, None], torch.arange(size)[None, :]
    middle = row // MIDDLE_ROWS * MIDDLE_ROWS + MIDDLE_ROWS // 2
    down, up = (via > middle) & (via <= row), (via > row) & (via <= middle)
    tables = [(via <= row).float(), (via > row).float(), down.float() - up.float()]
    half = size // 2
    while half:
        border = row // (2 * half) * (2 * half) + half
        tables.append((((via >= border) & (via <= row)) | ((via < border) & (via > row))).float())
        half //= 2
    return torch.stack(tables)


_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def exp2(x):
    """2^x in one instruction, denormal results as zero; the interpreter has no assembly."""
    if _INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


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
def store_unit_rows(x, taps, documents, into, into_stride, chunk, length, rows_of, stride, eps, scale,
                    D: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr,
                    MASKED: tl.constexpr):  # fmt: skip
    """A chunk's rows of x [T, D], through convolution and activation, normalised, times scale, to `into` [C, D].

    ROWS at a time; rows_of is C (an argument, so that the loop stays one). MASKED leaves rows beyond the length out.
    """
    of_d = tl.arange(0, D)
    for first in tl.range(0, rows_of, ROWS, num_stages=1):
        of_c = first + tl.arange(0, ROWS)
        rows = chunk * C + of_c
        mixed = mixed_rows(x, taps, documents, rows, length, stride, of_d, WIDTH, PACKED)
        normal, _ = unit_rows(activated(mixed, WIDTH), eps)
        place = into + of_c[:, None] * into_stride + of_d[None, :]
        if MASKED:
            tl.store(place, (normal * scale).to(into.dtype.element_ty), mask=(rows < length)[:, None])
        else:
            tl.store(place, (normal * scale).to(into.dtype.element_ty))


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
def path_steps(logits, rate, lower_bound, rows, length, C: tl.constexpr, BK: tl.constexpr, BOUNDED: tl.constexpr,
               DTYPE: tl.constexpr):  # fmt: skip
    """Base-2 log decays [C, BK] of the rows, zero beyond the length, in DTYPE.

    All decays of the chunk come from these rounded steps, so rounding them is a change of g by 2^-9 of itself at most
    in bfloat16, the same everywhere, which moves no decay exp(-x) by more than x exp(-x) 2^-9 < 2^-10.
    """
    decay = log_decay(logits, rate, lower_bound, BOUNDED) * LOG2E
    decay = tl.broadcast_to(tl.where((rows < length)[:, None], decay, 0.0), (C, BK))
    return decay.to(DTYPE)


@triton.jit
def cut_steps(steps, starts, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """The same, with every path across the start of a document cut."""
    if PACKED:
        return tl.where(starts[:, None], CUT, steps).to(DTYPE)
    return steps


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
def document_rows(documents, rows, length, PACKED: tl.constexpr):
    """The document of each row and whether a row starts one inside its sequence."""
    if PACKED:
        document = tl.load(documents + rows, mask=rows < length, other=-1).to(tl.int32)
        before = tl.load(documents + rows - 1, mask=(rows > 0) & (rows < length), other=-1).to(tl.int32)
        return document, (rows > 0) & (rows < length) & (document != before)
    return rows * 0, rows < 0


@triton.jit
def path_sums(paths, steps):
    """Sums of the steps [C, BK] along the paths [C, C], float32."""
    return tl.dot(paths, steps, input_precision="ieee")


@triton.jit
def load_paths(paths, which: tl.constexpr, C: tl.constexpr):
    """One matrix [C, C] of `path_table`. From memory: a register tile of each would be kept for the whole kernel."""
    return tl.load(paths + which * C * C + tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :])


@triton.jit
def level_pairs(row, column, HALF: tl.constexpr):
    """Whether `row` and `column` meet at this level: halves of one block of 2 HALF rows, the row in the second."""
    return ((row ^ column) // HALF == 1) & (column < row)


@triton.jit
def middle_pairs(row, column, document_row, document_column, SIZE: tl.constexpr, PACKED: tl.constexpr):
    """Pairs column <= row of one block of SIZE rows; documents cut here, where the paths do not."""
    pairs = (row // SIZE == column // SIZE) & (column <= row)
    if PACKED:
        pairs = pairs & (document_row == document_column)
    return pairs


@triton.jit
def unit_lower_inverse(system, SIZE: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """(I + system)^-1, system [SIZE, SIZE] strictly lower, by joining neighbouring blocks."""
    row = tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(level_pairs(row, column, 1), system, 0.0)
    for level in tl.static_range(1, LEVELS):
        corner = tl.where(level_pairs(row, column, 1 << level), system, 0.0)
        joined = tl.dot(inverse, corner, input_precision=PRECISION)
        inverse -= tl.dot(joined, inverse, input_precision=PRECISION)
    return inverse
