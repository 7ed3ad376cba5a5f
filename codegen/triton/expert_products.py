"""Grouped products of rows with one matrix per expert, and what is done to a tile before it is stored.

1. `expert_linear`: y[r] = W[e] x[r] + b[e]; TWO: as two products of half the columns.
2. `expert_up`: the up projection and its activation; the pre-activation is stored or not.

Every program computes one tile of the list (`expert_tiles.py`); one of at most half of the rows is computed as a tile
of half the size. Rows behind the last group get zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moec.codegen.triton.expert_tiles import locate, product


@triton.jit
def expert_linear(
    x, x_desc, x_small, w, w_desc, bias, y, offsets, tiles, experts, rows, width, columns,
    BIASED: tl.constexpr, TRANSPOSED: tl.constexpr, TMA_X: tl.constexpr, TMA_W: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    column_tiles = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0)
    if tile < tl.load(tiles) * column_tiles:
        expert, row, end, n = locate(tile, tiles, offsets, experts, rows, column_tiles, GROUP)
        if end - row <= ROWS // 2:
            _linear_tile(
                x, x_small, w, w_desc, bias, y, expert, row, end, n * COLUMNS, experts, width, columns, BIASED,
                TRANSPOSED, TMA_X, TMA_W, ROWS // 2, COLUMNS, DEPTH, STAGES, PRECISION, TWO,
            )  # fmt: skip
        else:
            _linear_tile(
                x, x_desc, w, w_desc, bias, y, expert, row, end, n * COLUMNS, experts, width, columns, BIASED,
                TRANSPOSED, TMA_X, TMA_W, ROWS, COLUMNS, DEPTH, STAGES, PRECISION, TWO,
            )  # fmt: skip


@triton.jit
def _linear_tile(
    x, x_desc, w, w_desc, bias, y, expert, row, end, column, experts, width, columns, BIASED: tl.constexpr,
    TRANSPOSED: tl.constexpr, TMA_X: tl.constexpr, TMA_W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = COLUMNS // 2 if TWO else COLUMNS
    one, two = product(
        x, x_desc, w, w_desc, expert, row, end, column, column + WIDE, tl.where(expert < experts, width, 0), columns,
        TWO, TRANSPOSED, TMA_X, TMA_W, ROWS, WIDE, DEPTH, STAGES, PRECISION,
    )  # fmt: skip
    if BIASED:
        one += _bias(bias, expert, experts, column, columns, columns, WIDE)[None, :]
    _store(y, one, row, end, column, columns, columns, ROWS, WIDE)
    if TWO:
        if BIASED:
            two += _bias(bias, expert, experts, column + WIDE, columns, columns, WIDE)[None, :]
        _store(y, two, row, end, column + WIDE, columns, columns, ROWS, WIDE)


@triton.jit
def expert_up(
    x, x_desc, x_small, w, w_desc, bias, order, weights, pre, act, offsets, tiles, experts, rows, width, hidden,
    FORWARD: tl.constexpr, PARTS: tl.constexpr, INTERLEAVED: tl.constexpr, KEEP: tl.constexpr, BIASED: tl.constexpr,
    WEIGHTED: tl.constexpr, TRANSPOSED: tl.constexpr, TMA_X: tl.constexpr, TMA_W: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """hidden: columns of act. COLUMNS: of the product in one tile, PARTS times those of act."""
    column_tiles = tl.cdiv(hidden, COLUMNS // PARTS)
    tile = tl.program_id(0)
    if tile < tl.load(tiles) * column_tiles:
        expert, row, end, n = locate(tile, tiles, offsets, experts, rows, column_tiles, GROUP)
        if end - row <= ROWS // 2:
            _up_tile(
                x, x_small, w, w_desc, bias, order, weights, pre, act, expert, row, end, n, experts, width, hidden,
                FORWARD, PARTS, INTERLEAVED, KEEP, BIASED, WEIGHTED, TRANSPOSED, TMA_X, TMA_W, ROWS // 2, COLUMNS,
                DEPTH, STAGES, PRECISION,
            )  # fmt: skip
        else:
            _up_tile(
                x, x_desc, w, w_desc, bias, order, weights, pre, act, expert, row, end, n, experts, width, hidden,
                FORWARD, PARTS, INTERLEAVED, KEEP, BIASED, WEIGHTED, TRANSPOSED, TMA_X, TMA_W, ROWS, COLUMNS, DEPTH,
                STAGES, PRECISION,
            )  # fmt: skip


@triton.jit
def _up_tile(
    x, x_desc, w, w_desc, bias, order, weights, pre, act, expert, row, end, n, experts, width, hidden,
    FORWARD: tl.constexpr, PARTS: tl.constexpr, INTERLEAVED: tl.constexpr, KEEP: tl.constexpr, BIASED: tl.constexpr,
    WEIGHTED: tl.constexpr, TRANSPOSED: tl.constexpr, TMA_X: tl.constexpr, TMA_W: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    HALVES: tl.constexpr = PARTS == 2 and not INTERLEAVED
    WIDE: tl.constexpr = COLUMNS // 2 if HALVES else COLUMNS
    columns = PARTS * hidden
    column = n * WIDE
    count = hidden if HALVES else columns
    one, two = product(
        x, x_desc, w, w_desc, expert, row, end, column, hidden + column, tl.where(expert < experts, width, 0), columns,
        HALVES, TRANSPOSED, TMA_X, TMA_W, ROWS, WIDE, DEPTH, STAGES, PRECISION,
    )  # fmt: skip
    if BIASED:
        one += _bias(bias, expert, experts, column, count, columns, WIDE)[None, :]
        if HALVES:
            two += _bias(bias + hidden, expert, experts, column, count, columns, WIDE)[None, :]
    # The activation starts from the rounded product: a recomputed one is the same.
    one = one.to(act.dtype.element_ty)
    if KEEP:
        _store(pre, one, row, end, column, count, columns, ROWS, WIDE)
    if HALVES:
        two = two.to(act.dtype.element_ty)
        if KEEP:
            _store(pre + hidden, two, row, end, column, count, columns, ROWS, WIDE)
        result = FORWARD(one.to(tl.float32), two.to(tl.float32))
    elif PARTS == 2:
        gate, up = one.to(tl.float32).reshape(ROWS, WIDE // 2, 2).split()
        result = FORWARD(gate, up)
    else:
        result = FORWARD(one.to(tl.float32))
    if WEIGHTED:
        places = row + tl.arange(0, ROWS)
        slots = tl.load(order + places, mask=places < end, other=0)
        result *= tl.load(weights + slots).to(tl.float32)[:, None]
    result = tl.where(expert < experts, result, 0.0)
    _store(act, result, row, end, n * (COLUMNS // PARTS), hidden, hidden, ROWS, COLUMNS // PARTS)


@triton.jit
def _bias(bias, expert, experts, column, count, stride, COLUMNS: tl.constexpr):
    """The bias of a tile's columns, zero for the padding. stride: from expert to expert."""
    columns = column + tl.arange(0, COLUMNS)
    inside = columns < tl.where(expert < experts, count, 0)
    return tl.load(bias + expert.to(tl.int64) * stride + columns, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(y, value, row, end, column, count, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """`count` columns of rows that are `stride` apart."""
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    places = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    inside = (rows < end)[:, None] & (columns < count)[None, :]
    tl.store(y + places, value.to(y.dtype.element_ty), mask=inside)
