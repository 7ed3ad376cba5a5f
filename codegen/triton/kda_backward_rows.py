"""Back through norms and activations, row by row; the gradients of beta, and of the gate where a head has one."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from moec.codegen.triton.kda_backward_keys import through_gate
from moec.codegen.triton.kda_tiles import activated, gate_logits, mixed_rows, sigmoid, through_activation, unit_rows


@triton.jit(do_not_specialize=["length", "chunks", "rows_of", "columns"])
def kda_backward_rows(
    q, k, v, gate, beta, A_log, dt_bias, conv_q, conv_k, conv_v, documents, by_row, scalar_grads,
    grad_q, grad_k, grad_v, grad_gate, grad_beta, partials, length, chunks, rows_of, lower_bound, l2_eps, scale,
    columns,
    HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr, SCALAR: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    """One program per (chunk, batch row and value head).

    grad_q, grad_k [B, T, HV, K] and grad_v [B, T, HV, V] become, in place, those of the convolutions' results before
    SiLU. by_row and scalar_grads as `kda_backward_keys` leaves them, of PARTS blocks of channels.
    """
    chunk = tl.program_id(0)
    lane = tl.program_id(1).to(tl.int64)
    batch, value_head = lane // VALUE_HEADS, lane % VALUE_HEADS
    head = value_head // (VALUE_HEADS // HEADS)
    start = batch * length
    documents += start
    tile = lane * chunks + chunk
    offset = start * HEADS * K + head * K
    into = start * VALUE_HEADS * K + value_head * K
    _through_norm(grad_q + into, q + offset, conv_q + head * K * WIDTH, documents, chunk, length, rows_of, HEADS * K,
                  l2_eps, scale, VALUE_HEADS * K, K, C, ROWS, WIDTH, PACKED)  # fmt: skip
    _through_norm(grad_k + into, k + offset, conv_k + head * K * WIDTH, documents, chunk, length, rows_of, HEADS * K,
                  l2_eps, 1.0, VALUE_HEADS * K, K, C, ROWS, WIDTH, PACKED)  # fmt: skip
    if WIDTH > 0:
        offset = start * VALUE_HEADS * V + value_head * V
        conv_v += value_head * V * WIDTH
        of_v = tl.arange(0, V)
        for first in tl.range(0, rows_of, ROWS, num_stages=1):
            rows = chunk * C + first + tl.arange(0, ROWS)
            mixed = mixed_rows(v + offset, conv_v, documents, rows, length, VALUE_HEADS * V, of_v, WIDTH, PACKED)
            place = grad_v + offset + rows[:, None] * (VALUE_HEADS * V) + of_v[None, :]
            grad = tl.load(place, mask=(rows < length)[:, None], other=0.0).to(tl.float32)
            grad = through_activation(grad, mixed, WIDTH).to(grad_v.dtype.element_ty)
            tl.store(place, grad, mask=(rows < length)[:, None])

    of_c = tl.arange(0, C)
    rows = chunk * C + of_c
    valid = rows < length
    place = (start + rows) * VALUE_HEADS + value_head
    strength = sigmoid(tl.load(beta + place, mask=valid, other=0.0).to(tl.float32))
    by_row += tile * (2 + PARTS) * C + of_c
    grad = tl.load(by_row + C)
    for part in tl.static_range(PARTS):
        grad += tl.load(by_row + (2 + part) * C)
    # beta (1 - beta) times the gradient of beta, of which the sums hold beta times it.
    tl.store(grad_beta + place, (grad * (1.0 - strength)).to(grad_beta.dtype.element_ty), mask=valid)
    if SCALAR:
        dg = tl.load(scalar_grads + tile * PARTS * C + of_c)
        for part in tl.static_range(1, PARTS):
            dg += tl.load(scalar_grads + (tile * PARTS + part) * C + of_c)
        rate = tl.exp(tl.load(A_log + value_head).to(tl.float32))
        logits = gate_logits(gate, dt_bias, start, value_head, rows, length, of_c, VALUE_HEADS, K, SCALAR)
        dg, drate = through_gate(dg[:, None], logits, rate, lower_bound, valid[:, None], BOUNDED)
        one = value_head + tl.arange(0, 1)
        share = partials + (batch * chunks + chunk) * columns
        tl.store(share + value_head * PARTS, tl.sum(tl.sum(drate, 1), 0))
        for part in tl.static_range(1, PARTS):
            tl.store(share + value_head * PARTS + part, 0.0)
        tl.store(share + VALUE_HEADS * PARTS + one, tl.sum(dg, 0))
        place = (start + rows)[:, None] * VALUE_HEADS + one[None, :]
        tl.store(grad_gate + place, dg.to(grad_gate.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _through_norm(grads, x, taps, documents, chunk, length, rows_of, stride, eps, scale, grad_stride: tl.constexpr,
                  D: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
                  PACKED: tl.constexpr):  # fmt: skip
    """Turn a chunk's gradients of scale x / |x| into those of the convolution's results, in place."""
    of_d = tl.arange(0, D)
    for first in tl.range(0, rows_of, ROWS, num_stages=1):
        rows = chunk * C + first + tl.arange(0, ROWS)
        mixed = mixed_rows(x, taps, documents, rows, length, stride, of_d, WIDTH, PACKED)
        normal, inverse = unit_rows(activated(mixed, WIDTH), eps)
        place = grads + rows[:, None] * grad_stride + of_d[None, :]
        grad = tl.load(place, mask=(rows < length)[:, None], other=0.0).to(tl.float32)
        grad = (scale * inverse)[:, None] * (grad - normal * tl.sum(normal * grad, 1)[:, None])
        grad = through_activation(grad, mixed, WIDTH)
        tl.store(place, grad.to(grads.dtype.element_ty), mask=(rows < length)[:, None])
