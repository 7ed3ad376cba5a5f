"""Back through the three convolutions of KDA, from the gradients before SiLU to those of inputs and taps."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["length", "blocks"])
def kda_backward_conv(
    grad_mixed_q, grad_mixed_k, grad_mixed_v, q, k, v, conv_q, conv_k, conv_v, grad_q, grad_k, grad_v, documents,
    partials, length, blocks, repeats,
    HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Programs: (block of `repeats` * ROWS rows, head of q, then of k, then of v, batch row).

    grad_mixed_q and grad_mixed_k [B, T, HV, K] are summed over the value heads of a head. partials
    [B * blocks, (2 H K + HV V) WIDTH], float32, gets the block's share of the taps' gradients in the layout of conv_q,
    conv_k, conv_v one after the other.
    """
    block, part, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    columns: tl.constexpr = (2 * HEADS * K + VALUE_HEADS * V) * WIDTH
    share = partials + (batch * blocks + block) * columns
    documents += batch * length
    if part < HEADS:
        _one_head(
            grad_mixed_q, q, conv_q, grad_q, share, documents, block, batch, part, length, repeats,
            HEADS, VALUE_HEADS, K, ROWS, WIDTH, PACKED,
        )  # fmt: skip
    elif part < 2 * HEADS:
        _one_head(
            grad_mixed_k, k, conv_k, grad_k, share + HEADS * K * WIDTH, documents, block, batch, part - HEADS, length,
            repeats, HEADS, VALUE_HEADS, K, ROWS, WIDTH, PACKED,
        )  # fmt: skip
    else:
        _one_head(
            grad_mixed_v, v, conv_v, grad_v, share + 2 * HEADS * K * WIDTH, documents, block, batch, part - 2 * HEADS,
            length, repeats, VALUE_HEADS, VALUE_HEADS, V, ROWS, WIDTH, PACKED,
        )  # fmt: skip


@triton.jit
def _one_head(
    grad_mixed, x, taps, grad_x, share, documents, block, batch, head, length, repeats,
    HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    of_d = tl.arange(0, D)
    taps += (head * D + of_d) * WIDTH
    share += (head * D + of_d) * WIDTH
    x += batch * length * HEADS * D + head * D + of_d[None, :]
    grad_x += batch * length * HEADS * D + head * D + of_d[None, :]
    GROUPS: tl.constexpr = VALUE_HEADS // HEADS
    grad_mixed += batch * length * VALUE_HEADS * D + head * GROUPS * D + of_d[None, :]
    # One sum for each tap, reduced over the rows at the end; rows are read again for every four taps.
    for first in tl.static_range(0, WIDTH, 4):
        sum_0 = tl.zeros((ROWS, D), tl.float32)
        sum_1 = tl.zeros((ROWS, D), tl.float32)
        sum_2 = tl.zeros((ROWS, D), tl.float32)
        sum_3 = tl.zeros((ROWS, D), tl.float32)
        for step in range(repeats):
            rows = (block * repeats + step) * ROWS + tl.arange(0, ROWS)
            inside = rows < length
            value = tl.load(x + rows[:, None] * (HEADS * D), mask=inside[:, None], other=0.0).to(tl.float32)
            total = tl.zeros((ROWS, D), tl.float32)
            for back in tl.static_range(first, WIDTH if first == 0 else min(first + 4, WIDTH)):
                later = rows + back
                reached = inside & (later < length)
                if PACKED and back > 0:
                    document = tl.load(documents + rows, mask=inside, other=-1)
                    reached = reached & (tl.load(documents + later, mask=reached, other=-2) == document)
                grad = tl.zeros((ROWS, D), tl.float32)
                for group in tl.static_range(GROUPS):
                    source = grad_mixed + later[:, None] * (VALUE_HEADS * D) + group * D
                    grad += tl.load(source, mask=reached[:, None], other=0.0).to(tl.float32)
                if first == 0:
                    total += tl.load(taps + WIDTH - 1 - back).to(tl.float32)[None, :] * grad
                if back == first:
                    sum_0 += grad * value
                elif back == first + 1:
                    sum_1 += grad * value
                elif back == first + 2:
                    sum_2 += grad * value
                elif back == first + 3:
                    sum_3 += grad * value
            if first == 0:
                place = grad_x + rows[:, None] * (HEADS * D)
                tl.store(place, total.to(grad_x.dtype.element_ty), mask=inside[:, None])
        tap = share + WIDTH - 1 - first
        tl.store(tap, tl.sum(sum_0, 0))
        if first + 1 < WIDTH:
            tl.store(tap - 1, tl.sum(sum_1, 0))
        if first + 2 < WIDTH:
            tl.store(tap - 2, tl.sum(sum_2, 0))
        if first + 3 < WIDTH:
            tl.store(tap - 3, tl.sum(sum_3, 0))
