"""The output of each chunk with its gated norm, and the way back through both."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from moec.codegen.triton.kda_tiles import sigmoid


@triton.jit
def _opening(gate, SILU: tl.constexpr):
    """The gate's activation and its derivative."""
    open_ = sigmoid(gate)
    if SILU:
        return gate * open_, open_ * (1.0 + gate * (1.0 - open_))
    return open_, open_ * (1.0 - open_)


@triton.jit
def _read_out(queries_in, pairs, states, updates, tile, of_v, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr):
    """o = queries_in S + pairs U at the columns of_v, float32, and the tile of pairs."""
    PART: tl.constexpr = min(K, 128)  # of the state, so that it and the updates fit into shared memory
    of_c = tl.arange(0, C)
    pair = tl.load(pairs + tile * C * C + of_c[:, None] * C + of_c[None, :])
    update = tl.load(updates + tile * C * V + of_c[:, None] * V + of_v[None, :])
    o = tl.zeros((C, of_v.shape[0]), tl.float32)
    for part in tl.static_range(0, K, PART):
        of_k = part + tl.arange(0, PART)
        query = tl.load(queries_in + tile * C * K + of_c[:, None] * K + of_k[None, :])
        state = tl.load(states + tile * K * V + of_k[:, None] * V + of_v[None, :])
        o = tl.dot(query, state, o, input_precision="ieee")
    return tl.dot(pair, update, o, input_precision="ieee"), pair


@triton.jit(do_not_specialize=["length", "chunks"])
def kda_forward_output(
    queries_in, pairs, states, updates, output_gate, norm_weight, y, length, chunks, norm_eps,
    VALUE_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """One program per (chunk, batch row and value head); y [B, T, HV * V]."""
    chunk = tl.program_id(0)
    lane = tl.program_id(1).to(tl.int64)
    rows, of_v = chunk * C + tl.arange(0, C), tl.arange(0, V)
    o, _ = _read_out(queries_in, pairs, states, updates, lane * chunks + chunk, of_v, K, V, C)
    place = (lane // VALUE_HEADS * length + rows) * (VALUE_HEADS * V) + lane % VALUE_HEADS * V
    place, inside = place[:, None] + of_v[None, :], (rows < length)[:, None]
    if NORM:
        opening, _ = _opening(tl.load(output_gate + place, mask=inside, other=0.0).to(tl.float32), SILU)
        o *= tl.rsqrt(tl.sum(o * o, 1) / V + norm_eps)[:, None]
        o *= tl.load(norm_weight + of_v).to(tl.float32)[None, :] * opening
    tl.store(y + place, o.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["length", "chunks"])
def kda_backward_output(
    grad_y, queries_in, pairs, states, updates, output_gate, norm_weight, grad_output_gate, grad_o, grad_updates,
    partials, length, chunks, norm_eps, columns, first_column,
    VALUE_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    NORM: tl.constexpr, SILU: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Programs as in the forward; recomputes o, BV columns at a time, twice where they are not all of its row.

    Writes grad_output_gate [B, T, HV * V], per chunk grad_o [C, V] and grad_updates [C, V] = pairs^T grad_o, and the
    program's share of the norm weight's gradient, partials [B * chunks, columns] at first_column + its value head * V.
    """
    chunk = tl.program_id(0)
    lane = tl.program_id(1).to(tl.int64)
    tile = lane * chunks + chunk
    of_c = tl.arange(0, C)
    rows = chunk * C + of_c
    batch, value_head = lane // VALUE_HEADS, lane % VALUE_HEADS
    of_row = ((batch * length + rows) * (VALUE_HEADS * V) + value_head * V)[:, None]
    inside = (rows < length)[:, None]
    share = partials + (batch * chunks + chunk) * columns + first_column + value_head * V
    squares = tl.zeros((C,), tl.float32)
    through = tl.zeros((C,), tl.float32)
    if NORM and BV < V:
        for part in tl.range(0, V, BV, num_stages=1):
            of_v = part + tl.arange(0, BV)
            o, _ = _read_out(queries_in, pairs, states, updates, tile, of_v, K, V, C)
            grad = tl.load(grad_y + of_row + of_v[None, :], mask=inside, other=0.0).to(tl.float32)
            gate = tl.load(output_gate + of_row + of_v[None, :], mask=inside, other=0.0).to(tl.float32)
            opening, _ = _opening(gate, SILU)
            squares += tl.sum(o * o, 1)
            through += tl.sum(grad * opening * tl.load(norm_weight + of_v).to(tl.float32)[None, :] * o, 1)
    for part in tl.range(0, V, BV, num_stages=1):
        of_v = part + tl.arange(0, BV)
        place = of_row + of_v[None, :]
        o, pair = _read_out(queries_in, pairs, states, updates, tile, of_v, K, V, C)
        grad = tl.load(grad_y + place, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            gate = tl.load(output_gate + place, mask=inside, other=0.0).to(tl.float32)
            opening, slope = _opening(gate, SILU)
            weight = tl.load(norm_weight + of_v).to(tl.float32)[None, :]
            if BV == V:
                squares = tl.sum(o * o, 1)
            inverse = tl.rsqrt(squares / V + norm_eps)[:, None]
            o *= inverse
            grad_gate = grad * o * weight * slope
            tl.store(grad_output_gate + place, grad_gate.to(grad_output_gate.dtype.element_ty), mask=inside)
            grad *= opening
            tl.store(share + of_v, tl.sum(grad * o, 0))
            grad *= weight
            across = tl.sum(grad * o, 1)[:, None] if BV == V else through[:, None] * inverse
            grad = inverse * (grad - o * (across / V))
        narrow = grad.to(DTYPE)
        by_v = tile * C * V + of_c[:, None] * V + of_v[None, :]
        tl.store(grad_o + by_v, narrow)
        tl.store(grad_updates + by_v, tl.dot(tl.trans(pair), narrow, input_precision="ieee").to(DTYPE))
