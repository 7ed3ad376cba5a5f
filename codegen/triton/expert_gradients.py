"""Gradients of the experts' matrices and biases: products whose inner dimension is an expert's rows.

1. `expert_weight_gradient`: dW[e] = sum over rows of left[r] right[r]^T. Experts with most rows come first.
   Whole blocks of rows come through tensor descriptors; the last block, which other experts' rows follow, through
   masked pointers.
2. `expert_bias_gradient`: the sum of an expert's rows.

3. `clear_unused`: zeros for the matrices of experts without rows, which a library may leave as they were.

An expert without rows gets zeros (or keeps what it is added to). Sums are float32, in the order of the rows.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def expert_weight_gradient(
    left, left_desc, right, right_desc, result, offsets, ranking, height, width, TMA: tl.constexpr, ADD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """left [R, height], right [R, width] -> result [E, height, width]."""
    row_tiles, column_tiles = tl.cdiv(height, ROWS), tl.cdiv(width, COLUMNS)
    tile = tl.program_id(0)
    expert = tl.load(ranking + tile // (row_tiles * column_tiles))
    place = tile % (row_tiles * column_tiles)
    group = place // (GROUP * column_tiles)
    size = tl.minimum(row_tiles - group * GROUP, GROUP)
    place = place % (GROUP * column_tiles)
    m, n = (group * GROUP + place % size) * ROWS, place // size * COLUMNS
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    if not ADD or end > start:
        value = tl.zeros([ROWS, COLUMNS], tl.float32)
        whole = start
        if TMA:
            whole = start + (end - start) // DEPTH * DEPTH
            for row in tl.range(start, whole, DEPTH, num_stages=STAGES):
                value = tl.dot(left_desc.load([row, m]).T, right_desc.load([row, n]), value)
        in_left, in_right = m + tl.arange(0, ROWS) < height, n + tl.arange(0, COLUMNS) < width
        from_left = left + m + tl.arange(0, ROWS)[None, :]
        from_right = right + n + tl.arange(0, COLUMNS)[None, :]
        for row in tl.range(whole, end, DEPTH, num_stages=1):
            rows = (row + tl.arange(0, DEPTH)).to(tl.int64)[:, None]
            x = tl.load(from_left + rows * height, mask=(rows < end) & in_left[None, :], other=0.0)
            y = tl.load(from_right + rows * width, mask=(rows < end) & in_right[None, :], other=0.0)
            value = tl.dot(x.T, y, value, input_precision=PRECISION)
        # In two halves: what is added to would not fit beside the whole sum.
        halves = value.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1).split()
        for half in tl.static_range(2):
            _store_half(
                halves[half], result, expert, m, n + half * (COLUMNS // 2), height, width, ADD, ROWS, COLUMNS // 2
            )


@triton.jit
def _store_half(
    value, result, expert, m, n, height, width, ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    rows, columns = m + tl.arange(0, ROWS), n + tl.arange(0, COLUMNS)
    places = (expert.to(tl.int64) * height + rows)[:, None] * width + columns[None, :]
    inside = (rows < height)[:, None] & (columns < width)[None, :]
    if ADD:
        value += tl.load(result + places, mask=inside, other=0.0)
    tl.store(result + places, value.to(result.dtype.element_ty), mask=inside)


@triton.jit
def expert_bias_gradient(
    x, order, weights, result, offsets, width, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    expert = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    total = tl.zeros([COLUMNS], tl.float32)
    for row in range(start, end, ROWS):
        rows = row + tl.arange(0, ROWS)
        known = rows < end
        places = rows.to(tl.int64)[:, None] * width + columns[None, :]
        value = tl.load(x + places, mask=known[:, None] & (columns < width)[None, :], other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + tl.load(order + rows, mask=known, other=0))[:, None].to(tl.float32)
        total += tl.sum(value, 0)
    tl.store(result + expert * width + columns, total.to(result.dtype.element_ty), mask=columns < width)


@triton.jit
def clear_unused(result, offsets, size, BLOCK: tl.constexpr):
    """result [E, size]; programs are [E, any number]."""
    expert = tl.program_id(0).to(tl.int64)
    if tl.load(offsets + expert) == tl.load(offsets + expert - 1, mask=expert > 0, other=0):
        zeros = tl.zeros([BLOCK], result.dtype.element_ty)
        for first in range(tl.program_id(1) * BLOCK, size, tl.num_programs(1) * BLOCK):
            places = first + tl.arange(0, BLOCK)
            tl.store(result + expert * size + places, zeros, mask=places < size)
