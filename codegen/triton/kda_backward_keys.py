"""Gradients of a chunk's normalised keys and queries and of its gate, once those of its pairs and states are known."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from moec.codegen.triton.kda_tiles import (
    exp2,
    from_middle,
    from_quarters,
    gate_logits,
    half_factors,
    level_pairs,
    log_decay,
    once,
    segments,
    shared,
    sigmoid,
    to_border,
)


@triton.jit(do_not_specialize=["length", "chunks", "levels", "columns"])
def kda_backward_keys(
    gate, A_log, dt_bias, documents, unit_q, unit_k, sums, grad_keys, grad_queries, diagonals, ranges, states, updates,
    grad_o, grad_updates, grad_states, grad_q, grad_k, grad_gate, by_row, partials, scalar_grads,
    length, chunks, levels, lower_bound, columns,
    VALUE_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    SHARES: tl.constexpr, DIAGONAL: tl.constexpr, PACKED: tl.constexpr, SCALAR: tl.constexpr, BOUNDED: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Programs: (chunk and block of BK channels, batch row and value head); blocks of a chunk, which read much the
    same, run at one time.

    A decay 2^(G_r - G_i) gives what it is worth to G_r and takes it from G_i, so the gradient of G is elementwise: row
    factors times their gradients, less those of the columns. Both use the rounded factors that the products used, so
    that what cancels in the sums over rows, which give the gradient of the log decays, cancels to the last bits.

    Inputs as `kda_backward_values` leaves them; what has value columns is read in blocks of BV of these. grad_q and
    grad_k [B, T, HV, K] are those of the normalised rows; by_row gets at 2 + block what the keys give to beta times its
    gradient; grad_gate as the gate. partials [B * chunks, columns], float32, gets the chunk's share of the gradients of
    dt_bias from column HV * (K / BK) on, and of A_log before it, for each value head and block. With one gate for a
    head, scalar_grads [K / BK, C], float32, gets the gradients of the log decays instead.
    """
    PARTS: tl.constexpr = K // BK
    chunk, block = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    lane = tl.program_id(1).to(tl.int64)
    batch, value_head = lane // VALUE_HEADS, lane % VALUE_HEADS
    rows = chunk * C + tl.arange(0, C)
    valid = rows < length
    inside = valid[:, None]
    start = batch * length
    documents += start
    tile = lane * chunks + chunk
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    of_part = block * BK + tl.arange(0, BK)
    sums += tile * C * K
    by_part = row * K + of_part[None, :]
    decay = tl.load(sums + by_part)
    k_row = tl.load(unit_k + tile * C * K + by_part).to(tl.float32)
    q_row = tl.load(unit_q + tile * C * K + by_part).to(tl.float32)
    dq = tl.zeros((C, BK), tl.float32)
    dk = tl.zeros((C, BK), tl.float32)
    along = tl.zeros((C, BK), tl.float32)
    kept = tl.zeros((C, BK), tl.float32)
    square = row * C + column
    grad_keys += tile * C * C
    grad_queries += tile * C * C
    if DIAGONAL == C // 2:
        down, up = half_factors(decay, sums, of_part, C, K)
        dq, dk, along, kept = _through_pairs(
            tl.load(grad_keys + square), tl.load(grad_queries + square), k_row, q_row, once(down), once(up), dq, dk,
            along, kept, DTYPE,
        )  # fmt: skip
        exponent = from_quarters(decay, sums, of_part, C, K)
        diagonals += tile * 2 * C * C + square
        dq, dk, along, kept = _through_pairs(
            tl.load(diagonals), tl.load(diagonals + C * C), k_row, q_row, once(exp2(exponent)), once(exp2(-exponent)),
            dq, dk, along, kept, DTYPE,
        )  # fmt: skip
    else:
        for level in tl.range(0, levels, num_stages=1):
            half = C >> (level + 1)
            factor = once(to_border(decay, sums, of_part, half, C, K))
            meet = level_pairs(row, column, half)
            keys = shared(tl.where(meet, tl.load(grad_keys + square), 0.0).to(DTYPE))
            queries = shared(tl.where(meet, tl.load(grad_queries + square), 0.0).to(DTYPE))
            dq, dk, along, kept = _through_pairs(
                keys, queries, k_row, q_row, factor, factor, dq, dk, along, kept, DTYPE
            )
        if DIAGONAL > 1:
            exponent = from_middle(decay, sums, of_part, DIAGONAL, C, K)
            meet = row // DIAGONAL == column // DIAGONAL
            keys = shared(tl.where(meet, tl.load(grad_keys + square), 0.0).to(DTYPE))
            queries = shared(tl.where(meet, tl.load(grad_queries + square), 0.0).to(DTYPE))
            dq, dk, along, kept = _through_pairs(
                keys, queries, k_row, q_row, once(exp2(exponent)), once(exp2(-exponent)), dq, dk, along, kept, DTYPE
            )
    range_ = tl.load(ranges + tile)
    dq *= range_
    dk *= range_
    along *= range_
    kept *= range_

    # The entering state, read by q and k, decayed from the chunk's start.
    segment, starts = segments(documents, rows, length, PACKED)
    last = tl.max(segment, 0)
    end = tl.load(sums + (C - 1) * K + of_part)
    factor = once(tl.where((segment == 0)[:, None], exp2(decay), 0.0))
    total = tl.zeros((BK,), tl.float32)
    read_q = tl.zeros((C, BK), tl.float32)
    read_k = tl.zeros((C, BK), tl.float32)
    written = tl.zeros((C, BK), tl.float32)
    for part in tl.static_range(0, V, BV):
        by_v, by_state = _places(tile, row, of_part, part, K, V, BV, C)
        state = tl.load(states + by_state)
        leaving = tl.load(grad_states + by_state)
        total += tl.sum(state.to(tl.float32) * leaving.to(tl.float32), 1)
        state = tl.trans(state)
        read_q = tl.dot(tl.load(grad_o + by_v), state, read_q, input_precision="ieee")
        read_k = tl.dot(tl.load(grad_updates + by_v), state, read_k, input_precision="ieee")
        written = tl.dot(tl.load(updates + by_v), tl.trans(leaving), written, input_precision="ieee")
    total *= tl.where(last == 0, exp2(end), 0.0)
    read_q *= factor
    dq += read_q
    along += read_q * q_row
    read_k *= -factor
    dk += read_k
    kept += read_k * k_row
    along += kept
    by_row += tile * SHARES * C + tl.arange(0, C)
    tl.store(by_row + (2 + block) * C, tl.sum(kept, 1))

    # The leaving state, written by k, decayed to the chunk's end.
    factor = once(tl.where((segment == last)[:, None], exp2(end[None, :] - decay), 0.0))
    written *= factor
    dk += written
    written *= k_row
    along -= written
    total += tl.sum(written, 0)
    # A row's pair with itself has no decay.
    own = tl.load(by_row)[:, None]
    by_k = (start + rows)[:, None] * (VALUE_HEADS * K) + value_head * K + of_part[None, :]
    tl.store(grad_k + by_k, (dk + own * q_row).to(DTYPE), mask=inside)
    tl.store(grad_q + by_k, (dq + own * k_row).to(DTYPE), mask=inside)

    dg = tl.cumsum(along, 0, reverse=True) + total[None, :]
    if PACKED:
        dg = tl.where(starts[:, None], 0.0, dg)
    if SCALAR:
        tl.store(scalar_grads + (tile * PARTS + block) * C + tl.arange(0, C), tl.sum(dg, 1))
    else:
        rate = tl.exp(tl.load(A_log + value_head).to(tl.float32))
        logits = gate_logits(gate, dt_bias, start, value_head, rows, length, of_part, VALUE_HEADS, K, SCALAR)
        dg, drate = through_gate(dg, logits, rate, lower_bound, inside, BOUNDED)
        share = partials + (batch * chunks + chunk) * columns
        tl.store(share + value_head * PARTS + block, tl.sum(tl.sum(drate, 1), 0))
        tl.store(share + VALUE_HEADS * PARTS + value_head * K + of_part, tl.sum(dg, 0))
        tl.store(grad_gate + by_k, dg.to(grad_gate.dtype.element_ty), mask=inside)


@triton.jit
def _places(tile, row, of_part, part, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr):
    """Where the value columns part .. part + BV lie, of the chunk's rows and of the channels of its state."""
    of_v = part + tl.arange(0, BV)
    return tile * C * V + row * V + of_v[None, :], tile * K * V + of_part[:, None] * V + of_v[None, :]


@triton.jit
def _through_pairs(keys, queries, k_row, q_row, down, up, dq, dk, along, kept, DTYPE: tl.constexpr):
    """Add what pairs give to the gradients dq and dk [C, BK]; keys and queries: the gradients of their sums [C, C].

    down and up: the decays from the meeting point to a row and from a column to it. along: to the gradient of G, apart
    from what rows of the key pairs get, which is added to `kept`, whose sum over channels is beta's share.
    """
    right = (k_row * up).to(DTYPE)
    left = (q_row * down).to(DTYPE)
    key_left = (k_row * down).to(DTYPE)
    through = tl.dot(queries, right, input_precision="ieee")
    dq += through * down
    along += through * left.to(tl.float32)
    through = tl.dot(keys, right, input_precision="ieee")
    dk += through * down
    kept += through * key_left.to(tl.float32)
    # Two products, each added for itself: an accumulated one would be laid out by whole rows, twice over.
    right = right.to(tl.float32)
    through = tl.dot(tl.trans(queries), left, input_precision="ieee")
    dk += through * up
    along -= through * right
    through = tl.dot(tl.trans(keys), key_left, input_precision="ieee")
    dk += through * up
    along -= through * right
    return dq, dk, along, kept


@triton.jit
def through_gate(dg, logits, rate, lower_bound, inside, BOUNDED: tl.constexpr):
    """Gradients of the logits and, by row and channel, of A_log = log(rate), from that of the log decay."""
    if BOUNDED:
        # sigmoid(-x) rather than 1 - sigmoid(x), which is zero long before the gradient is.
        dg *= lower_bound * rate * sigmoid(rate * logits) * sigmoid(-rate * logits)
        drate = dg * logits
    else:
        drate = dg * log_decay(logits, rate, lower_bound, BOUNDED)
        dg *= -rate * sigmoid(logits)
    return tl.where(inside, dg, 0.0), tl.where(inside, drate, 0.0)
