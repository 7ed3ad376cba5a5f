"""First pass over the inputs: everything of a chunk that does not depend on the state."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from moec.codegen.triton.kda_tiles import (
    END,
    LEVEL,
    MIDDLE,
    START,
    activated,
    cut_steps,
    document_rows,
    exp2,
    gate_logits,
    level_pairs,
    load_paths,
    middle_pairs,
    mixed_rows,
    path_steps,
    path_sums,
    sigmoid,
    store_unit_rows,
    unit_lower_inverse,
)


@triton.jit(do_not_specialize=["length", "chunks", "width", "value_width", "rows_of"])
def kda_forward_chunk(
    q, k, v, gate, beta, A_log, dt_bias, conv_q, conv_k, conv_v, documents, paths,
    keys_in, values_in, keys_out, queries_in, pairs, inverse, totals,
    length, chunks, width, value_width, rows_of, lower_bound, l2_eps, scale,
    HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    C: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr, DIAGONAL: tl.constexpr, WIDTH: tl.constexpr,
    PACKED: tl.constexpr, SCALAR: tl.constexpr, BOUNDED: tl.constexpr, STORE_INVERSE: tl.constexpr,
    PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One program per (chunk, batch row and value head); writes, per chunk, in DTYPE unless said otherwise:

    keys_in [C, K] = A beta k exp(G) and values_in [C, V] = A beta v, with A = (I + beta M)^-1 and M the decayed
    key-key sums below the diagonal; keys_out [C, K] = k exp(G_end - G); queries_in [C, K] = scale q exp(G);
    pairs [C, C], the decayed query-key sums; inverse [C, C] = A if STORE_INVERSE; totals [K] = exp(G_end), float32.
    LEVELS = log2(C).
    """
    chunk = tl.program_id(0)
    lane = tl.program_id(1).to(tl.int64)
    batch, value_head = lane // VALUE_HEADS, lane % VALUE_HEADS
    head = value_head // (VALUE_HEADS // HEADS)
    rows = chunk * C + tl.arange(0, C)
    valid = rows < length
    start = batch * length
    documents += start
    tile = lane * chunks + chunk
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    document, starts = document_rows(documents, rows, length, PACKED)

    # Normalised rows go through memory, which stays in the cache: slices of BK channels keep the rest in registers.
    offset = start * HEADS * K + head * K
    store_unit_rows(k + offset, conv_k + head * K * WIDTH, documents, keys_in + tile * C * K, K, chunk, length, rows_of,
                    HEADS * K, l2_eps, 1.0, K, C, ROWS, WIDTH, PACKED, False)  # fmt: skip
    store_unit_rows(q + offset, conv_q + head * K * WIDTH, documents, queries_in + tile * C * K, K, chunk, length,
                    rows_of, HEADS * K, l2_eps, scale, K, C, ROWS, WIDTH, PACKED, False)  # fmt: skip
    tl.debug_barrier()

    rate = tl.exp(tl.load(A_log + value_head).to(tl.float32))
    key_pairs = tl.zeros((C, C), tl.float32)
    query_pairs = tl.zeros((C, C), tl.float32)
    for part in tl.range(0, width, BK, num_stages=1):
        of_part = part + tl.arange(0, BK)
        by_part = tile * C * K + row * K + of_part[None, :]
        k_row = tl.load(keys_in + by_part).to(tl.float32)
        q_row = tl.load(queries_in + by_part).to(tl.float32)
        logits = gate_logits(gate, dt_bias, start, value_head, rows, length, of_part, VALUE_HEADS, K, SCALAR)
        steps = path_steps(logits, rate, lower_bound, rows, length, C, BK, BOUNDED, DTYPE)
        if DIAGONAL > 1:
            exponent = path_sums(load_paths(paths, MIDDLE, C), steps)
            right = tl.trans((k_row * exp2(-exponent)).to(DTYPE))
            meet = middle_pairs(row, column, document[:, None], document[None, :], DIAGONAL, PACKED)
            factor = exp2(exponent)
            sums = tl.dot((k_row * factor).to(DTYPE), right, input_precision="ieee")
            key_pairs += tl.where(meet & (column < row), sums, 0.0)
            query_pairs += tl.where(meet, tl.dot((q_row * factor).to(DTYPE), right, input_precision="ieee"), 0.0)
        else:
            query_pairs += tl.where(row == column, tl.sum(q_row * k_row, 1)[:, None], 0.0)
        steps = cut_steps(steps, starts, DTYPE, PACKED)
        for level in tl.static_range(LEVELS):
            HALF = C >> (level + 1)
            if HALF >= DIAGONAL:
                factor = exp2(path_sums(load_paths(paths, LEVEL + level, C), steps))
                left = (k_row * factor).to(DTYPE)
                right = tl.trans(left)
                meet = level_pairs(row, column, HALF)
                key_pairs += tl.where(meet, tl.dot(left, right, input_precision="ieee"), 0.0)
                left = (q_row * factor).to(DTYPE)
                query_pairs += tl.where(meet, tl.dot(left, right, input_precision="ieee"), 0.0)
        factor = exp2(path_sums(load_paths(paths, START, C), steps))
        tl.debug_barrier()
        tl.store(queries_in + by_part, (q_row * factor).to(DTYPE))
        tl.store(keys_in + by_part, (k_row * factor).to(DTYPE))
        factor = exp2(path_sums(load_paths(paths, END, C), steps))
        tl.store(keys_out + by_part, (k_row * factor).to(DTYPE))
        total = exp2(tl.sum(steps.to(tl.float32), 0))
        tl.store(totals + tile * K + of_part, total)
    square = tile * C * C + row * C + column
    tl.store(pairs + square, query_pairs.to(DTYPE))

    strength = tl.load(beta + (start + rows) * VALUE_HEADS + value_head, mask=valid, other=0.0).to(tl.float32)
    strength = tl.where(valid, sigmoid(strength), 0.0)
    solve = unit_lower_inverse(strength[:, None] * key_pairs, C, LEVELS, PRECISION).to(DTYPE)
    if STORE_INVERSE:
        tl.store(inverse + square, solve)
    tl.debug_barrier()
    for part in tl.range(0, width, BK, num_stages=1):
        by_part = tile * C * K + row * K + part + tl.arange(0, BK)[None, :]
        right = (strength[:, None] * tl.load(keys_in + by_part).to(tl.float32)).to(DTYPE)
        solved = tl.dot(solve, right, input_precision="ieee").to(DTYPE)
        tl.debug_barrier()
        tl.store(keys_in + by_part, solved)
    v += start * VALUE_HEADS * V + value_head * V
    conv_v += value_head * V * WIDTH
    for part in tl.range(0, value_width, BK, num_stages=1):
        of_part = part + tl.arange(0, BK)
        mixed = mixed_rows(v, conv_v, documents, rows, length, VALUE_HEADS * V, of_part, WIDTH, PACKED)
        right = (strength[:, None] * activated(mixed, WIDTH)).to(DTYPE)
        solved = tl.dot(solve, right, input_precision="ieee").to(DTYPE)
        tl.store(values_in + tile * C * V + row * V + of_part[None, :], solved)
