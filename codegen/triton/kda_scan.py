"""The two serial passes: states from chunk to chunk, and their gradients back.

States between calls, [B * HV, K, V], are read and written as they stand in registers, float32; those kept for other
kernels are in DTYPE.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["chunks"])
def kda_forward_scan(
    keys_in, values_in, keys_out, totals, states, updates, initial_state, final_state, chunks,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DTYPE: tl.constexpr, STAGES: tl.constexpr,
    INITIAL: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """Programs: (block of BV value columns, batch row and value head).

    Writes the state entering each chunk, states [K, V], and what its rows write, updates [C, V]. Starts from
    initial_state if INITIAL, else from zero; writes the state behind the last chunk, final_state, if FINAL.
    """
    of_k, of_c = tl.arange(0, K), tl.arange(0, C)
    of_v = tl.program_id(0) * BV + tl.arange(0, BV)
    lane = tl.program_id(1).to(tl.int64)
    by_state = lane * K * V + of_k[:, None] * V + of_v[None, :]
    state = tl.zeros((K, BV), tl.float32)
    if INITIAL:
        state += tl.load(initial_state + by_state).to(tl.float32)
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        tile = lane * chunks + chunk
        by_k = tile * C * K + of_c[:, None] * K + of_k[None, :]
        by_v = tile * C * V + of_c[:, None] * V + of_v[None, :]
        entering = state.to(DTYPE)
        tl.store(states + tile * K * V + of_k[:, None] * V + of_v[None, :], entering)
        read = tl.dot(tl.load(keys_in + by_k), entering, input_precision="ieee")
        update = (tl.load(values_in + by_v).to(tl.float32) - read).to(DTYPE)
        tl.store(updates + by_v, update)
        state *= tl.load(totals + tile * K + of_k)[:, None]
        state = tl.dot(tl.trans(tl.load(keys_out + by_k)), update, state, input_precision="ieee")
    if FINAL:
        tl.store(final_state + by_state, state)


@triton.jit(do_not_specialize=["chunks"])
def kda_backward_scan(
    keys_in, keys_out, queries_in, totals, grad_o, grad_updates, grad_states, grad_final, grad_initial, chunks,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DTYPE: tl.constexpr, STAGES: tl.constexpr,
    INITIAL: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """Programs as in the forward scan, from the last chunk to the first.

    grad_updates [C, V] holds what the chunk's own outputs gave its updates and receives the whole gradient; writes the
    gradient of the state leaving each chunk, grad_states [K, V]. Starts from grad_final if FINAL, else from zero;
    writes the gradient of the state before the first chunk, grad_initial, if INITIAL.
    """
    of_k, of_c = tl.arange(0, K), tl.arange(0, C)
    of_v = tl.program_id(0) * BV + tl.arange(0, BV)
    lane = tl.program_id(1).to(tl.int64)
    by_state = lane * K * V + of_k[:, None] * V + of_v[None, :]
    state = tl.zeros((K, BV), tl.float32)
    if FINAL:
        state += tl.load(grad_final + by_state).to(tl.float32)
    for step in tl.range(0, chunks, num_stages=STAGES):
        tile = lane * chunks + chunks - 1 - step
        by_k = tile * C * K + of_c[:, None] * K + of_k[None, :]
        by_v = tile * C * V + of_c[:, None] * V + of_v[None, :]
        leaving = state.to(DTYPE)
        tl.store(grad_states + tile * K * V + of_k[:, None] * V + of_v[None, :], leaving)
        update = tl.load(grad_updates + by_v).to(tl.float32)
        update = tl.dot(tl.load(keys_out + by_k), leaving, update, input_precision="ieee").to(DTYPE)
        state *= tl.load(totals + tile * K + of_k)[:, None]
        state = tl.dot(tl.trans(tl.load(queries_in + by_k)), tl.load(grad_o + by_v), state, input_precision="ieee")
        state -= tl.dot(tl.trans(tl.load(keys_in + by_k)), update, input_precision="ieee")
        tl.store(grad_updates + by_v, update)
    if INITIAL:
        tl.store(grad_initial + by_state, state.to(grad_initial.dtype.element_ty))
