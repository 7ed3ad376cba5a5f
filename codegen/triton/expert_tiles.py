"""What the grouped products share: the list of row tiles, made on the device, and the product of one tile.

1. `list_tiles`: the row tiles of all experts, expert after expert, with the padding behind the last group as one more
   expert, and the experts by falling number of rows.
2. `locate`: which tile a program works on. Tiles are taken in groups of GROUP row tiles by all column tiles, columns
   outside, so that the programs running at one time share rows and weights in the cache.
3. `product`: rows of one expert times its matrix, in float32. Operands come through tensor descriptors (TMA), and
   through pointers where sizes are not aligned.

Rows of other experts that a tile reads stay in their own rows of the product and are never stored.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def list_tiles(offsets, tiles, ranking, experts, rows, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """tiles: int32 [1 + T, 2], first the number of tiles, then (expert, first row). ranking: int32 [experts]."""
    expert = tl.program_id(0)
    before = tl.zeros([], tl.int32)
    rank = tl.zeros([], tl.int32)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert, mask=expert < experts, other=rows)
    for first in range(0, experts, BLOCK):
        others = first + tl.arange(0, BLOCK)
        inside = others < experts
        ends = tl.load(offsets + others, mask=inside, other=0)
        starts = tl.load(offsets + others - 1, mask=inside & (others > 0), other=0)
        counts = ends - starts
        before += tl.sum(tl.where(inside & (others < expert), (counts + ROWS - 1) // ROWS, 0), 0)
        larger = (counts > end - start) | ((counts == end - start) & (others < expert))
        rank += tl.sum((inside & larger).to(tl.int32), 0)
    count = (end - start + ROWS - 1) // ROWS
    for tile in range(count):
        place = tiles + 2 * (1 + before + tile)
        tl.store(place, expert)
        tl.store(place + 1, start + tile * ROWS)
    if expert == experts:
        tl.store(tiles, before + count)
    else:
        tl.store(ranking + rank, expert)


@triton.jit
def locate(tile, tiles, offsets, experts, rows, column_tiles, GROUP: tl.constexpr):
    """Expert, first row, end of the expert's rows, and column tile."""
    count = tl.load(tiles)
    group = tile // (GROUP * column_tiles)
    size = tl.minimum(count - group * GROUP, GROUP)
    place = tile % (GROUP * column_tiles)
    entry = tiles + 2 * (1 + group * GROUP + place % size)
    expert = tl.load(entry)
    end = tl.load(offsets + expert, mask=expert < experts, other=rows)
    return expert, tl.load(entry + 1), end, place // size


@triton.jit
def read_weight(
    w, w_desc, expert, column, k, width, columns, TRANSPOSED: tl.constexpr, TMA: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """A tile [DEPTH, COLUMNS] of an expert's matrix: stored [columns, width], or transposed [width, columns]."""
    ks = k + tl.arange(0, DEPTH)
    places = column + tl.arange(0, COLUMNS)
    matrix = w + expert.to(tl.int64) * columns * width
    inside = (ks < width)[:, None] & (places < columns)[None, :]
    if TMA and TRANSPOSED:
        value = w_desc.load([expert, k, column]).reshape(DEPTH, COLUMNS)
    elif TMA:
        value = w_desc.load([expert * columns + column, k]).T
    elif TRANSPOSED:
        value = tl.load(matrix + ks.to(tl.int64)[:, None] * columns + places[None, :], mask=inside, other=0.0)
    else:
        value = tl.load(matrix + places.to(tl.int64)[None, :] * width + ks[:, None], mask=inside, other=0.0)
    return value


@triton.jit
def product(
    x, x_desc, w, w_desc, expert, row, end, column, second, width, columns,
    TWO: tl.constexpr, TRANSPOSED: tl.constexpr, TMA_X: tl.constexpr, TMA_W: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Products with the columns from `column` on, and (TWO) with those from `second` on; the same one twice else.

    columns: of the whole matrix. width: of a row; 0 gives zeros.
    """
    rows = row + tl.arange(0, ROWS)
    pointers = x + rows.to(tl.int64)[:, None] * width + tl.arange(0, DEPTH)[None, :]
    one = tl.zeros([ROWS, COLUMNS], tl.float32)
    two = one
    for k in tl.range(0, width, DEPTH, num_stages=STAGES):
        if TMA_X:
            left = x_desc.load([row, k])
        else:
            inside = (rows < end)[:, None] & (k + tl.arange(0, DEPTH) < width)[None, :]
            left = tl.load(pointers + k, mask=inside, other=0.0)
        right = read_weight(w, w_desc, expert, column, k, width, columns, TRANSPOSED, TMA_W, COLUMNS, DEPTH)
        one = tl.dot(left, right, one, input_precision=PRECISION)
        if TWO:
            right = read_weight(w, w_desc, expert, second, k, width, columns, TRANSPOSED, TMA_W, COLUMNS, DEPTH)
            two = tl.dot(left, right, two, input_precision=PRECISION)
    return one, two
