"""The gated delta rule (linear attention with a per-channel or per-head decay), in chunks.

Token by token, with a state S [K, V] per value head:

    S = exp(g_t) * S;  S = S + beta_t k_t (v_t - S^T k_t)^T;  o_t = scale * S^T q_t

Here everything but the pass over chunk states runs for all chunks at once. Within a chunk the decay between two tokens
is a product of `exp(g)` over the tokens between them. The products are built by doubling, from neighbours up to half
chunks, so that no exponent is ever positive, nothing is divided, and gates of any strength are safe. A document start
is a decay of exactly zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

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


class _Layout(NamedTuple):
    """How [B, T, heads, ...] is cut into chunks: [N, C, ...] with N = B * heads * chunks per row."""

    batch: int
    length: int
    heads: int
    chunks: int
    size: int

    @property
    def count(self) -> int:
        return self.batch * self.heads * self.chunks

    def cut(self, value: Tensor, dtype: torch.dtype, fill: float = 0.0) -> Tensor:
        """[B, T, heads, ...] -> a new [N, C, ...]; rows beyond the length hold `fill`."""
        shape = (self.batch, self.heads, self.chunks * self.size, *value.shape[3:])
        out = value.new_full(shape, fill, dtype=dtype)
        out[:, :, : self.length] = value.transpose(1, 2)
        return out.view(self.count, self.size, *value.shape[3:])

    def rows(self, value: Tensor) -> Tensor:
        """[N, C, ...] -> view [B, heads, T, ...] without the padding."""
        shape = (self.batch, self.heads, self.chunks * self.size, *value.shape[2:])
        return value.reshape(shape)[:, :, : self.length]

    def join(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """[N, C, ...] -> a contiguous [B, T, heads, ...]."""
        return self.rows(value).transpose(1, 2).to(dtype).contiguous()

    def serial(self, value: Tensor) -> Tensor:
        """[N, ...] -> view [B * heads, chunks, ...]."""
        return value.view(self.batch * self.heads, self.chunks, *value.shape[1:])


class _Chunked(NamedTuple):
    """The inputs by chunk, in the math dtype; D is K, or 1 for per-head decays.

    Rows beyond the length have zero q, k, v, beta and decay 1: they leave the state alone.
    """

    layout: _Layout
    kq: Tensor  # [N, C, 2, K]: k, and scale * q
    v: Tensor  # [N, C, V]
    decay: Tensor  # [N, C, D]: exp(g), and 0 at the start of every document but a row's first
    beta: Tensor  # [N, C, 1]


def _split(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    document_ids: Tensor | None,
    scale: float,
    chunk: int,
) -> _Chunked:
    batch, length, heads, width = q.shape
    value_heads, dtype = v.shape[2], math_dtype(v.dtype)
    size = min(chunk, 1 << max(length - 1, 0).bit_length())
    layout = _Layout(batch, length, value_heads, -(-length // size), size)

    kq = q.new_zeros((batch, heads, value_heads // heads, layout.chunks * size, 2, width), dtype=dtype)
    kq[:, :, :, :length, 0] = k.transpose(1, 2).unsqueeze(2)
    kq[:, :, :, :length, 1] = q.transpose(1, 2).unsqueeze(2)
    kq[..., 1, :] *= scale
    decay = layout.cut(g if g.dim() == 4 else g.unsqueeze(-1), dtype).exp_()
    if document_ids is not None:
        layout.rows(decay).mul_(_not_a_start(document_ids, dtype)[:, None, :, None])
    return _Chunked(
        layout,
        kq.view(layout.count, size, 2, width),
        layout.cut(v, dtype),
        decay,
        layout.cut(beta.unsqueeze(-1), dtype),
    )


def _not_a_start(document_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, T]: 0 at the first token of every document but the row's first, else 1."""
    inside = torch.ones(document_ids.shape, dtype=dtype, device=document_ids.device)
    inside[:, 1:] = document_ids[:, 1:] == document_ids[:, :-1]
    return inside


class _Decays(NamedTuple):
    """Decay products inside blocks of each size 1, 2, 4, ... C; the last entry spans the chunk."""

    before: list[Tensor]  # [N, C, D]: from just before the block to after row r: prod of decay over first..r
    after: list[Tensor]  # [N, C, D]: from after row r to the end of the block: prod of decay over r+1..last


def _double(decay: Tensor) -> _Decays:
    before, after = [decay], [torch.ones_like(decay)]
    size = 1
    while size < decay.shape[1]:
        first_before, second_before = _halves(before[-1], size)
        first_after, second_after = _halves(after[-1], size)
        wider_before, wider_after = torch.empty_like(decay), torch.empty_like(decay)
        out_first, out_second = _halves(wider_before, size)
        out_first.copy_(first_before)
        torch.mul(second_before, first_before[:, :, -1:], out=out_second)
        out_first, out_second = _halves(wider_after, size)
        torch.mul(first_after, second_before[:, :, -1:], out=out_first)
        out_second.copy_(second_after)
        before.append(wider_before)
        after.append(wider_after)
        size *= 2
    return _Decays(before, after)


def _halves(value: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """[N, C, ...] -> views of the first and second halves of all blocks of 2 * size rows, [N, C / 2size, size, ...]."""
    blocks = value.view(value.shape[0], value.shape[1] // (2 * size), 2, size, *value.shape[2:])
    return blocks[:, :, 0], blocks[:, :, 1]


def _pair_blocks(pairs: Tensor, size: int) -> Tensor:
    """[N, C, 2, C] -> view [N, C / 2size, size, 2, size]: rows of second halves against columns of first halves."""
    count, rows = pairs.shape[:2]
    step = 2 * size
    return pairs.as_strided(
        (count, rows // step, size, 2, size),
        (rows * 2 * rows, step * 2 * rows + step, 2 * rows, rows, 1),
        pairs.storage_offset() + size * 2 * rows,
    )


def _pairs(kq: Tensor, decays: _Decays) -> Tensor:
    """[N, C, 2, C]: k_r . decay(r, i) k_i for i < r, and q_r . decay(r, i) k_i for i <= r; zero elsewhere."""
    count, rows, _, width = kq.shape
    pairs = kq.new_zeros(count, rows, 2, rows)
    pairs[:, :, 1].diagonal(dim1=1, dim2=2).copy_((kq[:, :, 0] * kq[:, :, 1]).sum(-1))
    size = 1
    for before, after in zip(decays.before[:-1], decays.after[:-1], strict=True):
        left = _halves(kq, size)[1] * _halves(before, size)[1].unsqueeze(-2)
        right = _halves(kq, size)[0][..., 0, :] * _halves(after, size)[0]
        blocks = left.view(-1, 2 * size, width) @ right.view(-1, size, width).mT
        _pair_blocks(pairs, size).copy_(blocks.view(count, -1, size, 2, size))
        size *= 2
    return pairs


def _pairs_backward(
    grad: Tensor, kq: Tensor, decays: _Decays, grad_before: Tensor, grad_after: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of kq and of g from those of the pairs and of the logarithms of the whole-chunk decays.

    The second runs the doubling of the logarithms backwards, consuming grad_before and grad_after.
    """
    rows, width = kq.shape[1], kq.shape[3]
    diagonal = grad[:, :, 1].diagonal(dim1=1, dim2=2).unsqueeze(-1)
    grad_kq = torch.stack((kq[:, :, 1] * diagonal, kq[:, :, 0] * diagonal), 2)
    size = rows // 2
    for before, after in zip(decays.before[-2::-1], decays.after[-2::-1], strict=True):
        first, second = _halves(kq, size)
        row_decay, column_decay = _halves(before, size)[1].unsqueeze(-2), _halves(after, size)[0]
        left, right = second * row_decay, first[..., 0, :] * column_decay
        grad_blocks = _pair_blocks(grad, size).reshape(-1, 2 * size, size)
        grad_left = (grad_blocks @ right.view(-1, size, width)).view(left.shape)
        grad_right = (grad_blocks.mT @ left.view(-1, 2 * size, width)).view(right.shape)

        first_before, second_before = _halves(grad_before, size)
        first_after, _ = _halves(grad_after, size)
        first_before[:, :, -1] += second_before.sum(2)
        second_before[:, :, -1] += first_after.sum(2)
        second_before += _over_decay((left * grad_left).sum(-2), before.shape[2])
        first_after += _over_decay(right * grad_right, before.shape[2])

        grad_first, grad_second = _halves(grad_kq, size)
        grad_first[..., 0, :] += grad_right.mul_(column_decay)
        grad_second += grad_left.mul_(row_decay)
        size //= 2
    return grad_kq, grad_before


def _over_decay(value: Tensor, width: int) -> Tensor:
    """Sum the channels that share one decay."""
    return value if value.shape[-1] == width else value.sum(-1, keepdim=True)


class _Solved(NamedTuple):
    """What the chunks contribute, before their entering states are known."""

    decays: _Decays
    pairs: Tensor  # [N, C, 2, C]
    system: Tensor  # [N, C, C]: I + beta * key pairs, unit lower triangular
    reader: Tensor  # [N, C, 2, K]: k and scale * q, decayed from the chunk's start
    writer: Tensor  # [N, C, K]: k, decayed to the chunk's end
    right: Tensor  # [N, C, K + V]: decayed k | v
    solution: Tensor  # [N, C, K + V]: system^-1 (beta * right)

    @property
    def total(self) -> Tensor:
        """[N, D, 1]: the decay of the state over the whole chunk."""
        return self.decays.before[-1][:, -1].unsqueeze(-1)


def _solve(chunked: _Chunked) -> _Solved:
    decays = _double(chunked.decay)
    pairs = _pairs(chunked.kq, decays)
    system = pairs[:, :, 0] * chunked.beta
    reader = chunked.kq * decays.before[-1].unsqueeze(2)
    writer = chunked.kq[:, :, 0] * decays.after[-1]
    right = torch.cat((reader[:, :, 0], chunked.v), 2)
    solution = torch.linalg.solve_triangular(system, right * chunked.beta, upper=False, unitriangular=True)
    return _Solved(decays, pairs, system, reader, writer, right, solution)


def _carry(chunked: _Chunked, solved: _Solved, initial_state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The pass over chunk states: entering states [N, K, V], updates [N, C, V] and the final states [B * HV, K, V]."""
    layout, (width, values) = chunked.layout, (solved.writer.shape[2], chunked.v.shape[2])
    keys, total = layout.serial(solved.solution[..., :width].contiguous()), layout.serial(solved.total)
    updates, writer = layout.serial(solved.solution[..., width:].contiguous()), layout.serial(solved.writer)
    states = chunked.v.new_empty(layout.batch * layout.heads, layout.chunks, width, values)
    state = _state(initial_state, states[:, 0])
    for index in range(layout.chunks):
        states[:, index] = state
        update = updates[:, index].baddbmm_(keys[:, index], state, alpha=-1)
        state = torch.baddbmm(state * total[:, index], writer[:, index].mT, update)
    return states.flatten(0, 1), updates.flatten(0, 1), state


def _state(given: Tensor | None, like: Tensor) -> Tensor:
    """[B, HV, K, V] or None -> a new [B * HV, K, V] in the math dtype."""
    return torch.zeros_like(like) if given is None else given.reshape(like.shape).to(like.dtype, copy=True)


def delta_forward(
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
    chunked = _split(q, k, v, g, beta, document_ids, scale, chunk)
    solved = _solve(chunked)
    states, updates, state = _carry(chunked, solved, initial_state)
    out = torch.baddbmm(solved.reader[:, :, 1] @ states, solved.pairs[:, :, 1], updates)
    return chunked.layout.join(out, v.dtype), state.view(v.shape[0], v.shape[2], q.shape[3], v.shape[3])


def delta_backward(
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
    chunked = _split(q, k, v, g, beta, document_ids, scale, chunk)
    layout, kq, width = chunked.layout, chunked.kq, q.shape[3]
    solved = _solve(chunked)
    states, updates, _ = _carry(chunked, solved, initial_state)
    grad = layout.cut(grad_o, kq.dtype)

    grad_updates, grad_states, grad_state = _carry_backward(grad, grad_final_state, chunked, solved)
    grad_solution = torch.cat((grad_updates @ states.mT.neg(), grad_updates), 2)
    grad_right = torch.linalg.solve_triangular(solved.system.mT, grad_solution, upper=True, unitriangular=True)
    grad_system = -(grad_right @ solved.solution.mT)
    grad_beta = (grad_right * solved.right).sum(-1) + (grad_system * solved.pairs[:, :, 0]).sum(-1)
    grad_right *= chunked.beta

    grad_reader = torch.stack((grad_right[..., :width], grad @ states.mT), 2)
    grad_writer = updates @ grad_states.mT
    depth = chunked.decay.shape[2]
    grad_before = _over_decay((solved.reader * grad_reader).sum(2), depth)
    grad_total = (states * grad_states).sum(-1) * solved.total.squeeze(-1)
    grad_before[:, -1] += _over_decay(grad_total, depth)
    grad_after = _over_decay(solved.writer * grad_writer, depth)
    grad_pairs = torch.stack((grad_system * chunked.beta, grad @ updates.mT), 2)
    grad_kq, grad_g = _pairs_backward(grad_pairs, kq, solved.decays, grad_before, grad_after)
    grad_kq += grad_reader * solved.decays.before[-1].unsqueeze(2)
    grad_kq[:, :, 0] += grad_writer * solved.decays.after[-1]

    grad_k, grad_q = (layout.rows(grad_kq[:, :, index]) for index in (0, 1))
    return (
        _join_groups(grad_q * scale, q),
        _join_groups(grad_k, k),
        layout.join(grad_right[..., width:], v.dtype),
        layout.join(grad_g, g.dtype).view(g.shape),
        layout.join(grad_beta, beta.dtype),
        v.new_empty(0) if initial_state is None else grad_state.view(initial_state.shape).to(initial_state.dtype),
    )


def _carry_backward(
    grad: Tensor, grad_final_state: Tensor | None, chunked: _Chunked, solved: _Solved
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the updates [N, C, V], of the leaving states [N, K, V] and of the first states [B * HV, K, V]."""
    layout, width = chunked.layout, solved.writer.shape[2]
    grad_updates = layout.serial(solved.pairs[:, :, 1].mT @ grad)
    from_reads = layout.serial(solved.reader[:, :, 1].mT @ grad)
    keys, writer = layout.serial(solved.solution[..., :width].contiguous()), layout.serial(solved.writer)
    total = layout.serial(solved.total)
    grad_states = torch.empty_like(from_reads)
    state = _state(grad_final_state, grad_states[:, 0])
    for index in reversed(range(layout.chunks)):
        grad_states[:, index] = state
        update = grad_updates[:, index].baddbmm_(writer[:, index], state)
        state = torch.addcmul(from_reads[:, index], state, total[:, index])
        state.baddbmm_(keys[:, index].mT, update, alpha=-1)
    return grad_updates.flatten(0, 1), grad_states.flatten(0, 1), state


def _join_groups(grad: Tensor, like: Tensor) -> Tensor:
    """[B, HV, T, K] -> [B, T, H, K], summed over the value heads that share a key head."""
    batch, length, heads, width = like.shape
    grouped = grad.reshape(batch, heads, grad.shape[1] // heads, length, width).sum(2)
    return grouped.transpose(1, 2).to(like.dtype).contiguous()


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
    delta_forward,
    _fake,
    backward_schema=f"(Tensor grad_o, Tensor? grad_final_state, {_ARGUMENTS}) -> (Tensor grad_q, Tensor grad_k, "
    "Tensor grad_v, Tensor grad_g, Tensor grad_beta, Tensor grad_initial_state)",
    backward=delta_backward,
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
