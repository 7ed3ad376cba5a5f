"""Back through the solve: gradients of values and of the pairs, once those of the updates are known."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from moec.codegen.triton.kda_tiles import segments, sigmoid, value_rows


@triton.jit(do_not_specialize=["length", "chunks", "value_width"])
def kda_backward_values(
    v, beta, documents, values, inverse, pairs, updates, grad_o, grad_updates, diagonals, grad_v, by_row, ranges,
    length, chunks, value_width,
    VALUE_HEADS: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, SHARES: tl.constexpr,
    DIAGONAL: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One program per (chunk, batch row and value head).

    With R = A^T dU, the right-hand side of the solve gets beta R and the system -strict_lower(R U^T): U are the
    updates, so the factors of the forward are not needed again. Overwrites grad_updates with beta R, inverse with the
    gradient of the decayed key-key sums and pairs with that of the query-key sums, both below the diagonal and divided
    by ranges [B * HV, chunks], the power of two that leaves no entry above 1. diagonals [2, C, C] gets the parts of
    both within blocks of DIAGONAL rows, if that is half a chunk. grad_v [B, T, HV, V] is that of the values, after
    SiLU.
    by_row [SHARES, C], float32, gets at 0 the gradients of a row's pair with itself and at 1 what the values give to
    beta times its gradient.
    """
    chunk = tl.program_id(0)
    lane = tl.program_id(1).to(tl.int64)
    batch, value_head = lane // VALUE_HEADS, lane % VALUE_HEADS
    rows = chunk * C + tl.arange(0, C)
    valid = rows < length
    start = batch * length
    documents += start
    tile = lane * chunks + chunk
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    segment, _ = segments(documents, rows, length, PACKED)
    square = tile * C * C + row * C + column
    strength = tl.load(beta + (start + rows) * VALUE_HEADS + value_head, mask=valid, other=0.0).to(tl.float32)
    strength = tl.where(valid, sigmoid(strength), 0.0)
    strength_grad = tl.zeros((C,), tl.float32)
    for part in tl.range(0, value_width, BK, num_stages=1):
        of_part = part + tl.arange(0, BK)
        by_part = tile * C * V + row * V + of_part[None, :]
        right = tl.dot(tl.trans(tl.load(inverse + square)), tl.load(grad_updates + by_part), input_precision="ieee")
        right *= strength[:, None]
        tl.debug_barrier()
        tl.store(grad_updates + by_part, right.to(DTYPE))
        value = value_rows(v, values, start, value_head, tile, rows, length, of_part, VALUE_HEADS, V, C, WIDTH)
        strength_grad += tl.sum(right * value, 1)
        place = (start + rows)[:, None] * (VALUE_HEADS * V) + value_head * V + of_part[None, :]
        tl.store(grad_v + place, right.to(grad_v.dtype.element_ty), mask=valid[:, None])
    tl.debug_barrier()
    grad_keys = tl.zeros((C, C), tl.float32)
    grad_queries = tl.zeros((C, C), tl.float32)
    for part in tl.range(0, value_width, BK, num_stages=1):
        by_part = tile * C * V + row * V + part + tl.arange(0, BK)[None, :]
        across = tl.trans(tl.load(updates + by_part))
        grad_keys = tl.dot(tl.load(grad_updates + by_part), across, grad_keys, input_precision="ieee")
        grad_queries = tl.dot(tl.load(grad_o + by_part), across, grad_queries, input_precision="ieee")
    by_row += tile * SHARES * C + tl.arange(0, C)
    tl.store(by_row, tl.sum(tl.where(row == column, grad_queries, 0.0), 1))
    tl.store(by_row + C, strength_grad)
    below = (segment[:, None] == segment[None, :]) & (column < row)
    grad_keys = tl.where(below, -grad_keys, 0.0)
    grad_queries = tl.where(below, grad_queries, 0.0)
    largest = tl.max(tl.max(tl.maximum(tl.abs(grad_keys), tl.abs(grad_queries)), 1), 0)
    # Between 2^-100 and 2^100, so that the quotient is exact and neither it nor the power leaves the range.
    range_ = tl.exp2(tl.ceil(tl.log2(tl.minimum(tl.maximum(largest, 7.9e-31), 1.2e30))))
    tl.store(ranges + tile, range_)
    grad_keys = (grad_keys / range_).to(DTYPE)
    grad_queries = (grad_queries / range_).to(DTYPE)
    tl.store(inverse + square, grad_keys)
    tl.store(pairs + square, grad_queries)
    if DIAGONAL == C // 2:
        within = row // DIAGONAL == column // DIAGONAL
        diagonals += tile * 2 * C * C + row * C + column
        tl.store(diagonals, tl.where(within, grad_keys, 0.0).to(DTYPE))
        tl.store(diagonals + C * C, tl.where(within, grad_queries, 0.0).to(DTYPE))
