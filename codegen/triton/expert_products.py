"""Grouped products of rows with one matrix per expert, and what is done to a tile before it is stored.

1. `expert_linear`: y[r] = W[e] x[r] + b[e].
2. `expert_up`: the up projection and its activation; the pre-activation is stored or not.
3. `expert_down_backward`: the gradient of the pre-activation through the down projection. With t = W_down^T grad of the
   token: the router weight p has the gradient t . act, act has p t. So the rows of the down projection are not needed.

Every program takes tiles from the list in a fixed order; a tile of at most half of the rows is computed as one of
half the size. Rows behind the last group get zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moec.codegen.triton.expert_tiles import locate, product

# Columns whose activation's gradient is computed at a time: more need more registers than there are.
CHUNK = tl.constexpr(64)


@triton.jit
def expert_linear(
    x, x_desc, x_small, w, w_desc, bias, y, offsets, tiles, experts, rows, width, columns,
    BIASED: tl.constexpr, TRANSPOSED: tl.constexpr, TMA_X: tl.constexpr, TMA_W: tl.constexpr, SMALL: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    column_tiles = tl.cdiv(columns, COLUMNS)
    total = tl.load(tiles) * column_tiles
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=FLATTEN):
        expert, row, end, n = locate(tile, tiles, offsets, experts, rows, column_tiles, GROUP)
        if SMALL and end - row <= ROWS // 2:
            _linear_tile(
                x, x_small, w, w_desc, bias, y, expert, row, end, n * COLUMNS, experts, width, columns, BIASED,
                TRANSPOSED, TMA_X, TMA_W, ROWS // 2, COLUMNS, DEPTH, STAGES, PRECISION,
            )  # fmt: skip
        else:
            _linear_tile(
                x, x_desc, w, w_desc, bias, y, expert, row, end, n * COLUMNS, experts, width, columns, BIASED,
                TRANSPOSED, TMA_X, TMA_W, ROWS, COLUMNS, DEPTH, STAGES, PRECISION,
            )  # fmt: skip


@triton.jit
def _linear_tile(
    x, x_desc, w, w_desc, bias, y, expert, row, end, column, experts, width, columns, BIASED: tl.constexpr,
    TRANSPOSED: tl.constexpr, TMA_X: tl.constexpr, TMA_W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    one, _ = product(
        x, x_desc, x, w, w_desc, expert, row, end, column, column, tl.where(expert < experts, width, 0), columns, 1,
        False, False, TRANSPOSED, TMA_X, TMA_W, ROWS, COLUMNS, DEPTH, STAGES, PRECISION,
    )  # fmt: skip
    if BIASED:
        one += _bias(bias, expert, experts, column, columns, COLUMNS)[None, :]
    _store(y, one, row, end, column, columns, ROWS, COLUMNS)


@triton.jit
def expert_up(
    x, x_desc, x_small, order, w, w_desc, bias, weights, pre, act, offsets, tiles, experts, rows, width, hidden, choices,
    FORWARD: tl.constexpr, PARTS: tl.constexpr, INTERLEAVED: tl.constexpr, KEEP: tl.constexpr, BIASED: tl.constexpr,
    WEIGHTED: tl.constexpr, GATHERED: tl.constexpr, TRANSPOSED: tl.constexpr, TMA_X: tl.constexpr, TMA_W: tl.constexpr,
    SMALL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """hidden: columns of act. COLUMNS: of the product in one tile, PARTS times those of act."""
    column_tiles = tl.cdiv(hidden, COLUMNS // PARTS)
    total = tl.load(tiles) * column_tiles
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=FLATTEN):
        expert, row, end, n = locate(tile, tiles, offsets, experts, rows, column_tiles, GROUP)
        if SMALL and end - row <= ROWS // 2:
            _up_tile(
                x, x_small, order, w, w_desc, bias, weights, pre, act, expert, row, end, n, experts, width, hidden,
                choices, FORWARD, PARTS, INTERLEAVED, KEEP, BIASED, WEIGHTED, GATHERED, TRANSPOSED, TMA_X, TMA_W,
                ROWS // 2, COLUMNS, DEPTH, STAGES, PRECISION,
            )  # fmt: skip
        else:
            _up_tile(
                x, x_desc, order, w, w_desc, bias, weights, pre, act, expert, row, end, n, experts, width, hidden,
                choices, FORWARD, PARTS, INTERLEAVED, KEEP, BIASED, WEIGHTED, GATHERED, TRANSPOSED, TMA_X, TMA_W,
                ROWS, COLUMNS, DEPTH, STAGES, PRECISION,
            )  # fmt: skip


@triton.jit
def _up_tile(
    x, x_desc, order, w, w_desc, bias, weights, pre, act, expert, row, end, n, experts, width, hidden, choices,
    FORWARD: tl.constexpr, PARTS: tl.constexpr, INTERLEAVED: tl.constexpr, KEEP: tl.constexpr, BIASED: tl.constexpr,
    WEIGHTED: tl.constexpr, GATHERED: tl.constexpr, TRANSPOSED: tl.constexpr, TMA_X: tl.constexpr, TMA_W: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    HALVES: tl.constexpr = PARTS == 2 and not INTERLEAVED
    WIDE: tl.constexpr = COLUMNS // 2 if HALVES else COLUMNS
    columns = PARTS * hidden
    column = n * WIDE
    one, two = product(
        x, x_desc, order, w, w_desc, expert, row, end, column, hidden + column, tl.where(expert < experts, width, 0),
        columns, choices, HALVES, GATHERED, TRANSPOSED, TMA_X, TMA_W, ROWS, WIDE, DEPTH, STAGES, PRECISION,
    )  # fmt: skip
    if BIASED:
        one += _bias(bias, expert, experts, column, hidden if HALVES else columns, WIDE, columns)[None, :]
        if HALVES:
            two += _bias(bias + hidden, expert, experts, column, hidden, WIDE, columns)[None, :]
    kept = pre if KEEP else act
    one = one.to(act.dtype.element_ty)
    if HALVES:
        two = two.to(act.dtype.element_ty)
        if KEEP:
            _store_part(kept, one, row, end, column, hidden, columns, ROWS, WIDE)
            _store_part(kept + hidden, two, row, end, column, hidden, columns, ROWS, WIDE)
        result = FORWARD(one.to(tl.float32), two.to(tl.float32))
    else:
        if KEEP:
            _store(kept, one, row, end, column, columns, ROWS, WIDE)
        if PARTS == 2:
            gate, up = one.to(tl.float32).reshape(ROWS, WIDE // 2, 2).split()
            result = FORWARD(gate, up)
        else:
            result = FORWARD(one.to(tl.float32))
    if WEIGHTED:
        result *= _router_weights(weights, order, row, end, ROWS)[:, None]
    result = tl.where(expert < experts, result, 0.0)
    _store(act, result, row, end, n * (COLUMNS // PARTS), hidden, ROWS, COLUMNS // PARTS)


@triton.jit
def expert_down_backward(
    x, x_desc, x_small, order, w, w_desc, weights, pre, grad_pre, act, parts, offsets, tiles, experts, rows, width,
    hidden, choices, BACKWARD: tl.constexpr, PARTS: tl.constexpr, INTERLEAVED: tl.constexpr, WEIGHTED: tl.constexpr,
    GATHERED: tl.constexpr, TRANSPOSED: tl.constexpr, TMA_X: tl.constexpr, TMA_W: tl.constexpr, SMALL: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """x: gradient of the output. parts: float32 [rows, column tiles], a router weight's gradient in parts."""
    column_tiles = tl.cdiv(hidden, COLUMNS)
    total = tl.load(tiles) * column_tiles
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=FLATTEN):
        expert, row, end, n = locate(tile, tiles, offsets, experts, rows, column_tiles, GROUP)
        if SMALL and end - row <= ROWS // 2:
            _down_backward_tile(
                x, x_small, order, w, w_desc, weights, pre, grad_pre, act, parts, expert, row, end, n, experts, width,
                hidden, choices, BACKWARD, PARTS, INTERLEAVED, WEIGHTED, GATHERED, TRANSPOSED, TMA_X, TMA_W, ROWS // 2,
                COLUMNS, DEPTH, STAGES, PRECISION,
            )  # fmt: skip
        else:
            _down_backward_tile(
                x, x_desc, order, w, w_desc, weights, pre, grad_pre, act, parts, expert, row, end, n, experts, width,
                hidden, choices, BACKWARD, PARTS, INTERLEAVED, WEIGHTED, GATHERED, TRANSPOSED, TMA_X, TMA_W, ROWS,
                COLUMNS, DEPTH, STAGES, PRECISION,
            )  # fmt: skip


@triton.jit
def _down_backward_tile(
    x, x_desc, order, w, w_desc, weights, pre, grad_pre, act, parts, expert, row, end, n, experts, width, hidden,
    choices, BACKWARD: tl.constexpr, PARTS: tl.constexpr, INTERLEAVED: tl.constexpr, WEIGHTED: tl.constexpr,
    GATHERED: tl.constexpr, TRANSPOSED: tl.constexpr, TMA_X: tl.constexpr, TMA_W: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    column = n * COLUMNS
    one, _ = product(
        x, x_desc, order, w, w_desc, expert, row, end, column, column, tl.where(expert < experts, width, 0), hidden,
        choices, False, GATHERED, TRANSPOSED, TMA_X, TMA_W, ROWS, COLUMNS, DEPTH, STAGES, PRECISION,
    )  # fmt: skip
    weight = tl.full([ROWS], 1.0, tl.float32)
    if WEIGHTED:
        weight = _router_weights(weights, order, row, end, ROWS)
    total = tl.zeros([ROWS], tl.float32)
    if COLUMNS > CHUNK:
        for half in tl.static_range(2):
            part = _half(one, half, ROWS, COLUMNS)
            if COLUMNS > 2 * CHUNK:
                for quarter in tl.static_range(2):
                    first = column + half * (COLUMNS // 2) + quarter * (COLUMNS // 4)
                    total += _through_activation(
                        _half(part, quarter, ROWS, COLUMNS // 2), weight, pre, grad_pre, act, expert, row, end, first,
                        experts, hidden, BACKWARD, PARTS, INTERLEAVED, ROWS, COLUMNS // 4,
                    )  # fmt: skip
            else:
                total += _through_activation(
                    part, weight, pre, grad_pre, act, expert, row, end, column + half * (COLUMNS // 2), experts, hidden,
                    BACKWARD, PARTS, INTERLEAVED, ROWS, COLUMNS // 2,
                )  # fmt: skip
    else:
        total += _through_activation(
            one, weight, pre, grad_pre, act, expert, row, end, column, experts, hidden, BACKWARD, PARTS, INTERLEAVED,
            ROWS, COLUMNS,
        )  # fmt: skip
    if WEIGHTED:
        rows = row + tl.arange(0, ROWS)
        tl.store(parts + rows.to(tl.int64) * tl.cdiv(hidden, COLUMNS) + n, total, mask=rows < end)


@triton.jit
def _half(x, which: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    left, right = x.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1).split()
    return left if which == 0 else right


@triton.jit
def _through_activation(
    grad, weight, pre, grad_pre, act, expert, row, end, column, experts, hidden, BACKWARD: tl.constexpr,
    PARTS: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Stores the gradient of the pre-activation and the weighted activation; returns the row sums of grad times it."""
    known = expert < experts
    rows = (row + tl.arange(0, ROWS)).to(tl.int64)
    if PARTS == 1:
        value = _load(pre, row, end, column, hidden, hidden, ROWS, COLUMNS).to(tl.float32)
        result, grad_value = BACKWARD(value, grad * weight[:, None])
        _store(grad_pre, tl.where(known, grad_value, 0.0), row, end, column, hidden, ROWS, COLUMNS)
    elif INTERLEAVED:
        both = _load(pre, row, end, 2 * column, 2 * hidden, 2 * hidden, ROWS, 2 * COLUMNS).to(tl.float32)
        gate, up = both.reshape(ROWS, COLUMNS, 2).split()
        result, grad_gate, grad_up = BACKWARD(gate, up, grad * weight[:, None])
        both = tl.join(grad_gate, grad_up).reshape(ROWS, 2 * COLUMNS)
        _store(grad_pre, tl.where(known, both, 0.0), row, end, 2 * column, 2 * hidden, ROWS, 2 * COLUMNS)
    else:
        gate = _load(pre, row, end, column, hidden, 2 * hidden, ROWS, COLUMNS).to(tl.float32)
        up = _load(pre + hidden, row, end, column, hidden, 2 * hidden, ROWS, COLUMNS).to(tl.float32)
        result, grad_gate, grad_up = BACKWARD(gate, up, grad * weight[:, None])
        _store_part(grad_pre, tl.where(known, grad_gate, 0.0), row, end, column, hidden, 2 * hidden, ROWS, COLUMNS)
        _store_part(
            grad_pre + hidden, tl.where(known, grad_up, 0.0), row, end, column, hidden, 2 * hidden, ROWS, COLUMNS
        )
    inside = (rows < tl.where(known, end, 0))[:, None] & (column + tl.arange(0, COLUMNS) < hidden)[None, :]
    result = tl.where(inside, result, 0.0).to(act.dtype.element_ty).to(tl.float32)
    _store(act, result * weight[:, None], row, end, column, hidden, ROWS, COLUMNS)
    return tl.sum(tl.where(inside, grad, 0.0) * result, 1)


@triton.jit
def _router_weights(weights, order, row, end, ROWS: tl.constexpr):
    rows = row + tl.arange(0, ROWS)
    return tl.load(weights + tl.load(order + rows, mask=rows < end, other=0)).to(tl.float32)


@triton.jit
def _bias(bias, expert, experts, column, count, COLUMNS: tl.constexpr, stride=None):
    """The bias of a tile's columns, zero for the padding. stride: from expert to expert, `count` if not given."""
    columns = column + tl.arange(0, COLUMNS)
    row = bias + expert.to(tl.int64) * (count if stride is None else stride)
    return tl.load(row + columns, mask=columns < tl.where(expert < experts, count, 0), other=0.0).to(tl.float32)


@triton.jit
def _load(x, row, end, column, count, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    places = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(x + places, mask=(rows < end)[:, None] & (columns < count)[None, :], other=0.0)


@triton.jit
def _store(y, value, row, end, column, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    _store_part(y, value, row, end, column, columns, columns, ROWS, COLUMNS)


@triton.jit
def _store_part(y, value, row, end, column, count, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """`count` columns of rows that are `stride` apart."""
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    places = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    inside = (rows < end)[:, None] & (columns < count)[None, :]
    tl.store(y + places, value.to(y.dtype.element_ty), mask=inside)
