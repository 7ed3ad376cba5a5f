"""The gated delta rule: linear attention whose state decays and whose writes are corrections.

Token by token, with a state S [K, V] per value head:

    S = exp(g_t) * S;  S = S + beta_t k_t (v_t - S^T k_t)^T;  o_t = scale * S^T q_t

In chunks, with S the entering state, q_in and k_in the rows decayed from the chunk's start, k_out those decayed to its
end, M and P the key-key and query-key sums over the pairs of rows of a chunk (`_chunks`), and A = (I + beta M)^-1:

    U = A beta v - (A beta k_in) S         what the rows write, all corrections solved at once
    o = q_in S + P U
    S' = total_decay * S + k_out^T U

Only the pass over the entering states walks from chunk to chunk; the rest runs for all chunks at once. The backward
recomputes it, walks the gradient of S' in the opposite direction,

    dU = P^T do + k_out dS';   dS = q_in^T do + total_decay * dS' - (A beta k_in)^T dU

and treats A as the solution of a linear system: with X = A beta [k_in | v] and dX = [-dU S^T | dU], the right-hand side
gets beta R, R = A^T dX, and beta M gets -R X^T below its diagonal.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moec.compiler.dialect._chunks import (
    Decays,
    Layout,
    PairGradients,
    Pairs,
    add_product,
    decay_products,
    pair_sums,
    pair_sums_backward,
)
from moec.compiler.dialect._define import define_op, math_dtype


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    document_ids: Tensor | None,
    initial_state: Tensor | None,
    scale: float,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule; returns (o [B, T, HV, V] in the dtype of v, final state [B, HV, K, V] float32).

    q, k [B, T, H, K], already normalised; v [B, T, HV, V] with HV a multiple of H, value head h reading key head
    h // (HV / H); g [B, T, HV, K] or [B, T, HV], log decays <= 0; beta [B, T, HV]; document_ids int64 [B, T],
    non-decreasing along T, or None when each row is one document; initial_state [B, HV, K, V] enters the first
    document of each row, None is zero. The final state is the one after a row's last token. `chunk`, a power of two,
    changes rounding only. Math in float32 (float64 if v is float64).
    """
    _check(q, k, v, g, beta, document_ids, initial_state, chunk)
    return torch.ops.moec.delta_rule(q, k, v, g, beta, document_ids, initial_state, scale, chunk)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    document_ids: Tensor | None,
    initial_state: Tensor | None,
    chunk: int,
) -> None:
    def fail(name: str, value: Tensor, expected: str) -> None:
        raise ValueError(f"moec::delta_rule: {name} has shape {tuple(value.shape)}, expected {expected}")

    if q.dim() != 4:
        fail("q", q, "[B, T, H, K]")
    batch, length, heads, width = q.shape
    if k.shape != q.shape:
        fail("k", k, f"{tuple(q.shape)} as q")
    if v.dim() != 4 or v.shape[:2] != q.shape[:2] or v.shape[2] % heads != 0:
        fail("v", v, f"[{batch}, {length}, a multiple of {heads}, V]")
    per_head = (batch, length, v.shape[2])
    if tuple(g.shape) not in (per_head, (*per_head, width)):
        fail("g", g, f"{per_head} or {(*per_head, width)}")
    if tuple(beta.shape) != per_head:
        fail("beta", beta, f"{per_head}")
    if document_ids is not None and document_ids.shape != q.shape[:2]:
        fail("document_ids", document_ids, f"{(batch, length)}")
    if initial_state is not None and tuple(initial_state.shape) != (batch, v.shape[2], width, v.shape[3]):
        fail("initial_state", initial_state, f"{(batch, v.shape[2], width, v.shape[3])}")
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"moec::delta_rule: chunk is {chunk}, expected a power of two")


class Prepared(NamedTuple):
    """A call up to the point where the output can be read: what forward and backward share.

    Everything is by chunk and in the math dtype. Rows beyond the length have zero q, k, v, beta and decay 1: they leave
    the state alone.
    """

    layout: Layout
    q: Tensor  # [N, C, K], scaled
    k: Tensor  # [N, C, K]
    beta: Tensor  # [N, C, 1]
    decays: Decays
    pairs: Pairs
    q_in: Tensor  # [N, C, K]: q, decayed from the chunk's start: reads the entering state
    k_out: Tensor  # [N, C, K]: k, decayed to the chunk's end: writes the leaving state
    right: Tensor  # [N, C, K + V]: k decayed from the chunk's start | v
    solution: Tensor  # [N, C, K + V]: (I + beta * key pairs)^-1 (beta * right)
    states: Tensor  # [N, K, V]: entering states
    updates: Tensor  # [N, C, V]: the rows that the keys write, after the delta correction
    final_state: Tensor  # [B, HV, K, V]

    @property
    def total(self) -> Tensor:
        """[N, D, 1]: the decay of the state over the whole chunk."""
        return self.decays.start[:, -1].unsqueeze(-1)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    document_ids: Tensor | None,
    initial_state: Tensor | None,
    scale: float,
    chunk: int,
) -> Prepared:
    """Everything before the output: pair sums, triangular solve, and the pass over the chunk states."""
    dtype, groups = math_dtype(v.dtype), v.shape[2] // q.shape[2]
    batch, length, heads = v.shape[:3]
    layout = Layout.of(batch, length, heads, chunk)
    if groups > 1:
        q, k = q.repeat_interleave(groups, 2), k.repeat_interleave(groups, 2)
    q, k, v, beta = (layout.cut(value, dtype) for value in (q, k, v, beta.unsqueeze(-1)))
    q *= scale
    decay = layout.cut(g if g.dim() == 4 else g.unsqueeze(-1), dtype).exp_()
    if document_ids is not None:
        layout.rows(decay)[:, :, 1:] *= (document_ids[:, 1:] == document_ids[:, :-1])[:, None, :, None]
    decays = decay_products(decay)
    pairs = pair_sums(k, q, beta, decays)
    right = torch.cat((k * decays.start, v), 2)
    solution = torch.bmm(pairs.inverse, right * beta)
    k_out = k * decays.end
    states, updates, final = _carry(layout, solution, k_out, decays.start[:, -1].unsqueeze(-1), initial_state)
    return Prepared(layout, q, k, beta, decays, pairs, q * decays.start, k_out, right, solution, states, updates, final)


def _carry(
    layout: Layout, solution: Tensor, k_out: Tensor, total: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The pass over chunk states: entering states [N, K, V], updates [N, C, V], and the final states [B, HV, K, V]."""
    width, values = k_out.shape[2], solution.shape[2] - k_out.shape[2]
    keys, updates = layout.serial(solution).split((width, values), -1)
    updates = updates.clone(memory_format=torch.contiguous_format)
    k_out, total = layout.serial(k_out), layout.serial(total)
    states = solution.new_empty(*updates.shape[:2], width, values)
    state = _state(initial_state, states)
    for index in range(layout.chunks):
        states[:, index] = state
        # Into a contiguous result: in place on a strided one the CPU multiplies matrix by matrix.
        update = updates[:, index] = torch.baddbmm(updates[:, index], keys[:, index], state, alpha=-1)
        state = torch.baddbmm(state * total[:, index], k_out[:, index].mT, update)
    final = state.view(layout.batch, layout.heads, width, values)
    return states.flatten(0, 1), updates.flatten(0, 1), final


def _state(given: Tensor | None, like: Tensor) -> Tensor:
    """[B, HV, K, V] or None -> a new [B * HV, K, V] of the dtype of like [B * HV, chunks, K, V]."""
    shape = (like.shape[0], *like.shape[2:])
    return like.new_zeros(shape) if given is None else given.reshape(shape).to(like.dtype, copy=True)


def read_out(prepared: Prepared, dtype: torch.dtype) -> Tensor:
    """The output [B, T, HV, V] in the given dtype."""
    from_pairs = torch.bmm(prepared.pairs.queries, prepared.updates)
    return prepared.layout.join(from_pairs.baddbmm_(prepared.q_in, prepared.states), dtype)


def gradients(
    prepared: Prepared,
    grad_o: Tensor,
    grad_final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, beta and initial_state (empty if that is None)."""
    layout, decays, width = prepared.layout, prepared.decays, q.shape[3]
    grad = layout.cut(grad_o, prepared.k.dtype)
    grad_updates, grad_states, grad_initial = _carry_backward(prepared, grad, grad_final_state)

    grad_solution = torch.cat((torch.bmm(grad_updates, prepared.states.mT).neg_(), grad_updates), 2)
    grad_right = torch.bmm(prepared.pairs.inverse.mT, grad_solution)
    grad_system = torch.bmm(grad_right, prepared.solution.mT).neg_()
    grad_beta = (grad_right * prepared.right).sum(-1) + (grad_system * prepared.pairs.keys).sum(-1)
    grad_right *= prepared.beta
    grad_system *= prepared.beta
    grad_k_in, grad_v = grad_right.split((width, v.shape[3]), -1)
    grad_q_in = torch.bmm(grad, prepared.states.mT)
    grad_k_out = torch.bmm(prepared.updates, grad_states.mT)

    grad_start, grad_end = torch.zeros_like(decays.start), torch.zeros_like(decays.start)
    add_product(grad_start, grad_q_in, prepared.q_in)
    add_product(grad_start, grad_k_in, prepared.right[..., :width])
    add_product(grad_end, grad_k_out, prepared.k_out)
    add_product(grad_start[:, -1], (prepared.states * grad_states).sum(-1), prepared.total.squeeze(-1))
    grad_k = (grad_k_in * decays.start).addcmul_(grad_k_out, decays.end)
    into = PairGradients(grad_k, grad_q_in * decays.start, grad_start, grad_end)
    grad_queries = torch.bmm(grad, prepared.updates.mT)
    grad_g = pair_sums_backward(grad_system, grad_queries, prepared.k, prepared.q, decays, into)
    into.q.mul_(scale)
    return (
        _join_groups(layout, into.q, q),
        _join_groups(layout, into.k, k),
        layout.join(grad_v, v.dtype),
        layout.join(grad_g, g.dtype).view(g.shape),
        layout.join(grad_beta, beta.dtype),
        v.new_empty(0) if initial_state is None else grad_initial.to(initial_state.dtype),
    )


def _carry_backward(prepared: Prepared, grad: Tensor, grad_final_state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the updates [N, C, V], of the leaving states [N, K, V] and of the first states [B, HV, K, V]."""
    layout = prepared.layout
    grad_updates = layout.serial(torch.bmm(prepared.pairs.queries.mT, grad))
    entering = layout.serial(torch.bmm(prepared.q_in.mT, grad))
    keys, k_out = layout.serial(prepared.solution)[..., : entering.shape[2]], layout.serial(prepared.k_out)
    total = layout.serial(prepared.total)
    leaving = torch.empty_like(entering)
    state = _state(grad_final_state, leaving)
    for index in reversed(range(layout.chunks)):
        leaving[:, index] = state
        update = grad_updates[:, index] = torch.baddbmm(grad_updates[:, index], k_out[:, index], state)
        state = torch.addcmul(entering[:, index], state, total[:, index])
        state.baddbmm_(keys[:, index].mT, update, alpha=-1)
    return grad_updates.flatten(0, 1), leaving.flatten(0, 1), state.view(prepared.final_state.shape)


def _join_groups(layout: Layout, grad: Tensor, like: Tensor) -> Tensor:
    """[N, C, K] -> [B, T, H, K], summed over the value heads that share a key head."""
    groups = layout.heads // like.shape[2]
    if groups == 1:
        return layout.join(grad, like.dtype)
    return layout.join(grad, grad.dtype).unflatten(2, (like.shape[2], groups)).sum(3).to(like.dtype)


def _delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    document_ids: Tensor | None,
    initial_state: Tensor | None,
    scale: float,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    prepared = prepare(q, k, v, g, beta, document_ids, initial_state, scale, chunk)
    return read_out(prepared, v.dtype), prepared.final_state


def _delta_rule_backward(
    grad_o: Tensor,
    grad_final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    document_ids: Tensor | None,
    initial_state: Tensor | None,
    scale: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    prepared = prepare(q, k, v, g, beta, document_ids, initial_state, scale, chunk)
    return gradients(prepared, grad_o, grad_final_state, q, k, v, g, beta, initial_state, scale)


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    document_ids: Tensor | None,
    initial_state: Tensor | None,
    scale: float,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    state = (v.shape[0], v.shape[2], q.shape[3], v.shape[3])
    return v.new_empty(v.shape), v.new_empty(state, dtype=math_dtype(v.dtype))


def _backward_fake(
    grad_o: Tensor,
    grad_final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    document_ids: Tensor | None,
    initial_state: Tensor | None,
    scale: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    first = v.new_empty(0) if initial_state is None else initial_state.new_empty(initial_state.shape)
    like_q, like_k, like_v, like_g, like_beta = (value.new_empty(value.shape) for value in (q, k, v, g, beta))
    return like_q, like_k, like_v, like_g, like_beta, first


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? document_ids, Tensor? initial_state, "
    "float scale, int chunk=64"
)

define_op(
    "delta_rule",
    f"({_ARGUMENTS}) -> (Tensor o, Tensor final_state)",
    _delta_rule,
    _fake,
    backward_schema=f"(Tensor grad_o, Tensor? grad_final_state, {_ARGUMENTS}) -> (Tensor grad_q, Tensor grad_k, "
    "Tensor grad_v, Tensor grad_g, Tensor grad_beta, Tensor grad_initial_state)",
    backward=_delta_rule_backward,
    backward_fake=_backward_fake,
    shapes={
        "q": "B T H K",
        "k": "B T H K",
        "v": "B T HV V",
        "beta": "B T HV",
        "document_ids": "B T",
        "initial_state": "B HV K V",
    },
    flops="B*T*HV*(6*K*V + chunk*(3*K + 2*V))",
    backward_flops="B*T*HV*(20*K*V + chunk*(12*K + 8*V))",
    source="Kimi Linear, arXiv:2510.26692; Gated Delta Networks, arXiv:2412.06464",
    summary="gated delta rule, chunkwise",
)
