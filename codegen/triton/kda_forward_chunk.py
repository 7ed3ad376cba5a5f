"""Everything of a chunk that does not depend on the state."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from moec.codegen.triton.kda_tiles import (
    exp2,
    from_middle,
    from_quarters,
    half_factors,
    level_pairs,
    segments,
    shared,
    sigmoid,
    to_border,
    unit_lower_inverse,
    value_rows,
)


@triton.jit(do_not_specialize=["length", "chunks", "width", "value_width", "levels", "solve_levels"])
def kda_forward_chunk(
    v, beta, documents, unit_q, unit_k, values, sums,
    keys_in, values_in, keys_out, queries_in, pairs, inverse, totals,
    length, chunks, width, value_width, levels, solve_levels,
    VALUE_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    DIAGONAL: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr, STORE_INVERSE: tl.constexpr,
    PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One program per (chunk, batch row and value head); writes, per chunk, in DTYPE unless said otherwise:

    keys_in [C, K] = A beta k exp(G) and values_in [C, V] = A beta v, with A = (I + beta M)^-1 and M the decayed
    key-key sums below the diagonal; keys_out [C, K] = k exp(G_end - G); queries_in [C, K] = scale q exp(G);
    pairs [C, C], the decayed query-key sums; inverse [C, C] = A if STORE_INVERSE; totals [K] = exp(G_end), or 0 where
    a document ends inside the chunk, float32. keys_in and queries_in may be unit_k and unit_q.

    Pairs meet at `levels` levels of halves, and within blocks of DIAGONAL rows at their middle; solve_levels = log2(C).
    Counts of loops are arguments, so that a loop stays one.
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
    together = segment[:, None] == segment[None, :]
    last = tl.max(segment, 0)
    unit_k += tile * C * K
    unit_q += tile * C * K
    keys_in += tile * C * K
    queries_in += tile * C * K
    keys_out += tile * C * K
    sums += tile * C * K

    key_pairs = tl.zeros((C, C), tl.float32)
    query_pairs = tl.zeros((C, C), tl.float32)
    own = tl.zeros((C,), tl.float32)
    for part in tl.range(0, width, BK, num_stages=1):
        of_part = part + tl.arange(0, BK)
        by_part = row * K + of_part[None, :]
        k_row = tl.load(unit_k + by_part).to(tl.float32)
        q_row = tl.load(unit_q + by_part).to(tl.float32)
        decay = tl.load(sums + by_part)
        if DIAGONAL == C // 2:
            down, up = half_factors(decay, sums, of_part, C, K)
            right = tl.trans((k_row * up).to(DTYPE))
            key_pairs = tl.dot(shared((k_row * down).to(DTYPE)), right, key_pairs, input_precision="ieee")
            query_pairs = tl.dot(shared((q_row * down).to(DTYPE)), right, query_pairs, input_precision="ieee")
            exponent = from_quarters(decay, sums, of_part, C, K)
        else:
            for level in tl.range(0, levels, num_stages=1):
                half = C >> (level + 1)
                factor = to_border(decay, sums, of_part, half, C, K)
                left = shared((k_row * factor).to(DTYPE))
                right = tl.trans(left)
                meet = level_pairs(row, column, half)
                key_pairs += tl.where(meet, tl.dot(left, right, input_precision="ieee"), 0.0)
                left = shared((q_row * factor).to(DTYPE))
                query_pairs += tl.where(meet, tl.dot(left, right, input_precision="ieee"), 0.0)
            exponent = from_middle(decay, sums, of_part, DIAGONAL, C, K)
        if DIAGONAL > 1:
            down = exp2(exponent)
            right = tl.trans((k_row * exp2(-exponent)).to(DTYPE))
            meet = row // DIAGONAL == column // DIAGONAL
            key_pairs += tl.where(meet, tl.dot(shared((k_row * down).to(DTYPE)), right, input_precision="ieee"), 0.0)
            query_pairs += tl.where(meet, tl.dot(shared((q_row * down).to(DTYPE)), right, input_precision="ieee"), 0.0)
        else:
            own += tl.sum(q_row * k_row, 1)
        end = tl.load(sums + (C - 1) * K + of_part)
        tl.store(totals + tile * K + of_part, tl.where(last == 0, exp2(end), 0.0))
        factor = tl.where((segment == last)[:, None], exp2(end[None, :] - decay), 0.0)
        tl.store(keys_out + by_part, (k_row * factor).to(DTYPE))
        factor = tl.where((segment == 0)[:, None], exp2(decay), 0.0)
        tl.debug_barrier()
        tl.store(queries_in + by_part, (q_row * factor).to(DTYPE))
        tl.store(keys_in + by_part, (k_row * factor).to(DTYPE))
    key_pairs = tl.where(together & (column < row), key_pairs, 0.0)
    query_pairs = tl.where(together & (column <= row), query_pairs, 0.0)
    if DIAGONAL == 1:
        query_pairs += tl.where(row == column, own[:, None], 0.0)
    square = tile * C * C + row * C + column
    tl.store(pairs + square, query_pairs.to(DTYPE))

    strength = tl.load(beta + (start + rows) * VALUE_HEADS + value_head, mask=valid, other=0.0).to(tl.float32)
    strength = tl.where(valid, sigmoid(strength), 0.0)
    solve = unit_lower_inverse(strength[:, None] * key_pairs, solve_levels, C, PRECISION).to(DTYPE)
    if STORE_INVERSE:
        tl.store(inverse + square, solve)
    tl.debug_barrier()
    for part in tl.range(0, width, BK, num_stages=1):
        by_part = row * K + part + tl.arange(0, BK)[None, :]
        right = (strength[:, None] * tl.load(keys_in + by_part).to(tl.float32)).to(DTYPE)
        solved = tl.dot(solve, right, input_precision="ieee").to(DTYPE)
        tl.debug_barrier()
        tl.store(keys_in + by_part, solved)
    for part in tl.range(0, value_width, BK, num_stages=1):
        of_part = part + tl.arange(0, BK)
        right = value_rows(v, values, start, value_head, tile, rows, length, of_part, VALUE_HEADS, V, C, WIDTH)
        right = (strength[:, None] * right).to(DTYPE)
        solved = tl.dot(solve, right, input_precision="ieee").to(DTYPE)
        tl.store(values_in + tile * C * V + row * V + of_part[None, :], solved)
