"""Gradients of a chunk's inputs, once the gradients of its updates and of the state it leaves are known."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from moec.codegen.triton.kda_tiles import (
    activated,
    exp2,
    from_middle,
    gate_logits,
    level_pairs,
    log_decay,
    mixed_rows,
    once,
    segments,
    shared,
    sigmoid,
    store_unit_rows,
    through_activation,
    to_border,
    unit_rows,
)


@triton.jit(do_not_specialize=["length", "chunks", "width", "value_width", "rows_of", "levels"])
def kda_backward_chunk(
    q, k, v, gate, beta, A_log, dt_bias, conv_q, conv_k, conv_v, documents,
    inverse, pairs, sums, states, updates, grad_o, grad_updates, grad_states,
    grad_q, grad_k, grad_v, grad_gate, grad_beta, partials,
    length, chunks, width, value_width, rows_of, levels, lower_bound, l2_eps, scale, columns,
    HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    C: tl.constexpr, ROWS: tl.constexpr, DIAGONAL: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr,
    SCALAR: tl.constexpr, BOUNDED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One program per (chunk, batch row and value head).

    With R = A^T dU, the right-hand side of the solve gets beta R and the system -strict_lower(R U^T): U are the
    updates, so the factors of the forward are not needed again. inverse, pairs and grad_updates are overwritten:
    what is used by every slice of channels waits there rather than in registers.

    A decay 2^(G_r - G_i) gives what it is worth to G_r and takes it from G_i, so the gradient of G is elementwise: row
    factors times their gradients, less those of the columns. Both use the rounded factors that the products used, so
    that what cancels in the sums over rows, which give the gradient of the log decays, cancels to the last bits.

    grad_q, grad_k [B, T, HV, K] and grad_v [B, T, HV, V] are those of the convolutions' results before SiLU, by value
    head; grad_gate and grad_beta have the shape of their inputs. partials [B * chunks, columns], float32, gets the
    chunk's share of the gradients of A_log at its value head and of dt_bias from column HV on.
    """
    chunk = tl.program_id(0)
    lane = tl.program_id(1).to(tl.int64)
    batch, value_head = lane // VALUE_HEADS, lane % VALUE_HEADS
    head = value_head // (VALUE_HEADS // HEADS)
    rows = chunk * C + tl.arange(0, C)
    valid = rows < length
    inside = valid[:, None]
    of_v = tl.arange(0, V)
    start = batch * length
    documents += start
    tile = lane * chunks + chunk
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    by_v = tile * C * V + row * V + of_v[None, :]
    share = partials + (batch * chunks + chunk) * columns
    sums += tile * C * K
    segment, starts = segments(documents, rows, length, PACKED)
    together = segment[:, None] == segment[None, :]
    enters = (segment == 0)[:, None]
    last = tl.max(segment, 0)
    leaves = (segment == last)[:, None]

    strength = tl.load(beta + (start + rows) * VALUE_HEADS + value_head, mask=valid, other=0.0).to(tl.float32)
    strength = tl.where(valid, sigmoid(strength), 0.0)

    # q and k, normalised: through memory, so that slices of BK channels keep the rest in registers.
    rate = tl.exp(tl.load(A_log + value_head).to(tl.float32))
    q += start * HEADS * K + head * K
    k += start * HEADS * K + head * K
    conv_q += head * K * WIDTH
    conv_k += head * K * WIDTH
    by_k = (start + rows)[:, None] * (VALUE_HEADS * K) + value_head * K
    into = (start + chunk * C) * (VALUE_HEADS * K) + value_head * K
    store_unit_rows(k, conv_k, documents, grad_k + into, VALUE_HEADS * K, chunk, length, rows_of, HEADS * K, l2_eps,
                    1.0, K, C, ROWS, WIDTH, PACKED, True)  # fmt: skip
    store_unit_rows(q, conv_q, documents, grad_q + into, VALUE_HEADS * K, chunk, length, rows_of, HEADS * K, l2_eps,
                    scale, K, C, ROWS, WIDTH, PACKED, True)  # fmt: skip

    # The solve, and v.
    v += start * VALUE_HEADS * V + value_head * V
    conv_v += value_head * V * WIDTH
    # The gradient of beta's logit is beta (1 - beta) grad_beta: beta * grad_beta is what is summed here.
    strength_grad = tl.zeros((C,), tl.float32)
    grad_keys = tl.zeros((C, C), tl.float32)
    grad_queries = tl.zeros((C, C), tl.float32)
    square = tile * C * C + row * C + column
    for part in tl.range(0, value_width, BK, num_stages=1):
        of_part = part + tl.arange(0, BK)
        by_part = tile * C * V + row * V + of_part[None, :]
        right = tl.dot(tl.trans(tl.load(inverse + square)), tl.load(grad_updates + by_part), input_precision="ieee")
        right *= strength[:, None]
        tl.debug_barrier()
        tl.store(grad_updates + by_part, right.to(DTYPE))
        mixed = mixed_rows(v, conv_v, documents, rows, length, VALUE_HEADS * V, of_part, WIDTH, PACKED)
        strength_grad += tl.sum(right * activated(mixed, WIDTH), 1)
        place = (start + rows)[:, None] * (VALUE_HEADS * V) + value_head * V + of_part[None, :]
        tl.store(grad_v + place, through_activation(right, mixed, WIDTH).to(grad_v.dtype.element_ty), mask=inside)
    tl.debug_barrier()
    for part in tl.range(0, value_width, BK, num_stages=1):
        by_part = tile * C * V + row * V + part + tl.arange(0, BK)[None, :]
        across = tl.trans(tl.load(updates + by_part))
        grad_keys = tl.dot(tl.load(grad_updates + by_part), across, grad_keys, input_precision="ieee")
        grad_queries = tl.dot(tl.load(grad_o + by_part), across, grad_queries, input_precision="ieee")
    tl.store(inverse + square, tl.where(together & (column < row), -grad_keys, 0.0).to(DTYPE))
    tl.store(pairs + square, tl.where(together & (column < row), grad_queries, 0.0).to(DTYPE))
    own = tl.sum(tl.where(row == column, grad_queries, 0.0), 1)[:, None]
    tl.debug_barrier()
    rate_grad = tl.zeros((C,), tl.float32)
    scalar_grad = tl.zeros((C,), tl.float32)
    for part in tl.range(0, width, BK, num_stages=1):
        of_part = part + tl.arange(0, BK)
        by_part = row * K + of_part[None, :]
        k_row = tl.load(grad_k + by_k + of_part[None, :], mask=inside, other=0.0).to(tl.float32)
        q_row = tl.load(grad_q + by_k + of_part[None, :], mask=inside, other=0.0).to(tl.float32)
        decay = tl.load(sums + by_part)
        dq = tl.zeros((C, BK), tl.float32)
        dk = tl.zeros((C, BK), tl.float32)
        along = tl.zeros((C, BK), tl.float32)
        kept = tl.zeros((C, BK), tl.float32)
        for level in tl.range(0, levels, num_stages=1):
            half = C >> (level + 1)
            factor = once(to_border(decay, sums, of_part, half, C, K))
            meet = level_pairs(row, column, half)
            dq, dk, along, kept = _through_pairs(
                inverse, pairs, square, meet, k_row, q_row, factor, factor, dq, dk, along, kept, DTYPE
            )
        if DIAGONAL > 1:
            exponent = from_middle(decay, sums, of_part, DIAGONAL, C, K)
            meet = row // DIAGONAL == column // DIAGONAL
            dq, dk, along, kept = _through_pairs(
                inverse, pairs, square, meet, k_row, q_row, once(exp2(exponent)), once(exp2(-exponent)), dq, dk, along, kept, DTYPE
            )

        # The entering state, read by q and k, decayed from the chunk's start.
        end = tl.load(sums + (C - 1) * K + of_part)
        factor = once(tl.where(enters, exp2(decay), 0.0))
        by_state = tile * K * V + of_part[:, None] * V + of_v[None, :]
        state = tl.load(states + by_state)
        leaving = tl.load(grad_states + by_state)
        total = tl.where(last == 0, exp2(end), 0.0)
        total *= tl.sum(state.to(tl.float32) * leaving.to(tl.float32), 1)
        state = tl.trans(state)
        through = tl.dot(tl.load(grad_o + by_v), state, input_precision="ieee") * factor
        dq += through
        along += through * q_row
        through = tl.dot(tl.load(grad_updates + by_v), state, input_precision="ieee") * -factor
        dk += through
        through *= k_row
        kept += through
        strength_grad += tl.sum(kept, 1)
        along += kept

        # The leaving state, written by k, decayed to the chunk's end.
        factor = once(tl.where(leaves, exp2(end[None, :] - decay), 0.0))
        through = tl.dot(tl.load(updates + by_v), tl.trans(leaving), input_precision="ieee") * factor
        dk += through
        through *= k_row
        along -= through
        total += tl.sum(through, 0)
        # A row's pair with itself has no decay.
        dq += own * k_row
        dk += own * q_row
        tl.debug_barrier()
        tl.store(grad_k + by_k + of_part[None, :], dk.to(DTYPE), mask=inside)
        tl.store(grad_q + by_k + of_part[None, :], dq.to(DTYPE), mask=inside)
        dg = tl.cumsum(along, 0, reverse=True) + total[None, :]
        if PACKED:
            dg = tl.where(starts[:, None], 0.0, dg)
        if SCALAR:
            scalar_grad += tl.sum(dg, 1)
        else:
            logits = gate_logits(gate, dt_bias, start, value_head, rows, length, of_part, VALUE_HEADS, K, SCALAR)
            dg, drate = _through_gate(dg, logits, rate, lower_bound, inside, BOUNDED)
            rate_grad += tl.sum(drate, 1)
            tl.store(share + VALUE_HEADS + value_head * K + of_part, tl.sum(dg, 0))
            tl.store(grad_gate + by_k + of_part[None, :], dg.to(grad_gate.dtype.element_ty), mask=inside)

    if SCALAR:
        logits = gate_logits(gate, dt_bias, start, value_head, rows, length, tl.arange(0, 1), VALUE_HEADS, K, SCALAR)
        dg, drate = _through_gate(scalar_grad[:, None], logits, rate, lower_bound, inside, BOUNDED)
        rate_grad = tl.sum(drate, 1)
        one = value_head + tl.arange(0, 1)
        tl.store(share + VALUE_HEADS + one, tl.sum(dg, 0))
        place = (start + rows)[:, None] * VALUE_HEADS + one[None, :]
        tl.store(grad_gate + place, dg.to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(share + value_head, tl.sum(rate_grad, 0))
    place = grad_beta + (start + rows) * VALUE_HEADS + value_head
    tl.store(place, (strength_grad * (1.0 - strength)).to(grad_beta.dtype.element_ty), mask=valid)

    tl.debug_barrier()
    _through_norm(grad_k + into, k, conv_k, documents, chunk, length, rows_of, HEADS * K, l2_eps, 1.0,
                  VALUE_HEADS * K, K, C, ROWS, WIDTH, PACKED)  # fmt: skip
    _through_norm(grad_q + into, q, conv_q, documents, chunk, length, rows_of, HEADS * K, l2_eps, scale,
                  VALUE_HEADS * K, K, C, ROWS, WIDTH, PACKED)  # fmt: skip


@triton.jit
def _through_pairs(grad_keys, grad_queries, square, meet, k_row, q_row, down, up, dq, dk, along, kept,
                   DTYPE: tl.constexpr):  # fmt: skip
    """Add what the pairs in `meet` give to the gradients dq and dk [C, BK].

    down and up: the decays from the meeting point to a row and from a column to it. along: to the gradient of G, apart
    from what rows of the key pairs get, which is added to `kept`, whose sum over channels is beta's share.
    """
    keys = shared(tl.where(meet, tl.load(grad_keys + square), 0.0).to(DTYPE))
    queries = shared(tl.where(meet, tl.load(grad_queries + square), 0.0).to(DTYPE))
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
def _through_gate(dg, logits, rate, lower_bound, inside, BOUNDED: tl.constexpr):
    """Gradients of the logits and, by row and channel, of A_log = log(rate), from that of the log decay."""
    if BOUNDED:
        # sigmoid(-x) rather than 1 - sigmoid(x), which is zero long before the gradient is.
        dg *= lower_bound * rate * sigmoid(rate * logits) * sigmoid(-rate * logits)
        drate = dg * logits
    else:
        drate = dg * log_decay(logits, rate, lower_bound, BOUNDED)
        dg *= -rate * sigmoid(logits)
    return tl.where(inside, dg, 0.0), tl.where(inside, drate, 0.0)


@triton.jit
def _through_norm(grads, x, taps, documents, chunk, length, rows_of, stride, eps, scale, grad_stride: tl.constexpr,
                  D: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
                  PACKED: tl.constexpr):  # fmt: skip
    """Turn a chunk's gradients of `store_unit_rows` into those of the convolution's results, in place."""
    of_d = tl.arange(0, D)
    for first in tl.range(0, rows_of, ROWS, num_stages=1):
        of_c = first + tl.arange(0, ROWS)
        rows = chunk * C + of_c
        mixed = mixed_rows(x, taps, documents, rows, length, stride, of_d, WIDTH, PACKED)
        normal, inverse = unit_rows(activated(mixed, WIDTH), eps)
        place = grads + of_c[:, None] * grad_stride + of_d[None, :]
        grad = tl.load(place, mask=(rows < length)[:, None], other=0.0).to(tl.float32)
        grad = (scale * inverse)[:, None] * (grad - normal * tl.sum(normal * grad, 1)[:, None])
        tl.debug_barrier()
        grad = through_activation(grad, mixed, WIDTH)
        tl.store(place, grad.to(grads.dtype.element_ty), mask=(rows < length)[:, None])
