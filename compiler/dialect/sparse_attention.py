"""Attention over a selected set of tokens (DSA): the indexer's top-k, the attention itself, the indexer's loss.

All three share one form: latent keys and values common to all heads, and one list of indices per query, [B,T,S] int32
with -1 in unused slots. Entries are gathered for a block of queries at a time; gradients are added back in float32.

1. index_topk: I_ts = sum_h w_th relu(q_th . k_s) over the causal tokens of the document; the best top_k of them.
2. sparse_attention: softmax over the selected s of scale * q_th . kv_s; the value is the first columns of kv.
3. indexer_loss: KL(p || softmax I) over the selected set, p the main attention's probabilities summed over heads and
   L1-normalised. Its gradient is dI = softmax(I) - p, taken from log-softmax, and reaches the indexer alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moec.compiler.dialect._define import define_op, math_dtype

# Values gathered or scored at once: 2**24 fp32 values are 64 MiB.
BLOCK = 1 << 24


def index_topk(
    q: Tensor, k: Tensor, w: Tensor, document_ids: Tensor | None = None, *, top_k: int, relu: bool = True
) -> Tensor:
    """The best min(top_k, T) keys per query by indexer score; q [B,T,H,D], k [B,T,D], w [B,T,H] -> int32 [B,T,S].

    Candidates are s <= t of the same document; a query with fewer takes them all and leaves -1 in the last slots.
    The order within a row and the choice among ties are unspecified. No gradient (DeepSeek-V3.2, section 2).
    Raises ValueError for a top_k below 1.
    """
    return torch.ops.moec.index_topk(q, k, w, document_ids, top_k, relu)


def sparse_attention(q: Tensor, kv: Tensor, indices: Tensor, *, scale: float, value_dim: int) -> tuple[Tensor, Tensor]:
    """Latent attention of q [B,T,H,Dk] to the entries of kv [B,T,Dk] named by indices int32 [B,T,S].

    Returns o [B,T,H,value_dim] in q's dtype, the mix of the first value_dim columns of kv, and lse [B,H,T] float32
    (float64 for float64 inputs). Slots of -1 are skipped; a query without any entry gives o = 0 and lse = -inf.
    Raises ValueError for a value_dim outside [1, Dk].
    """
    return torch.ops.moec.sparse_attention(q, kv, indices, scale, value_dim)


def indexer_loss(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    indices: Tensor,
    main_q: Tensor,
    main_kv: Tensor,
    lse: Tensor,
    *,
    scale: float,
    relu: bool = True,
) -> Tensor:
    """KL(p || softmax I) per token, [B,T] float32: the indexer's training loss on the selected set.

    q [B,T,HI,DI], k [B,T,DI], w [B,T,HI]: the indexer. indices int32 [B,T,S]. main_q [B,T,H,Dk], main_kv [B,T,Dk],
    lse [B,H,T], scale: what `sparse_attention` saw and returned; they get no gradient (DeepSeek-V3.2, section 2).
    """
    return torch.ops.moec.indexer_loss(q, k, w, indices, main_q, main_kv, lse, scale, relu)


# index_topk


def _topk(q: Tensor, k: Tensor, w: Tensor, document_ids: Tensor | None, top_k: int, relu: bool) -> Tensor:
    _check_count("index_topk", "top_k", top_k, top_k)
    batch, length, heads, _ = q.shape
    dtype = math_dtype(q.dtype)
    keys = k.to(dtype).transpose(1, 2).contiguous()
    slots = min(top_k, length)
    indices = torch.full((batch, length, slots), -1, dtype=torch.int32, device=q.device)
    for rows in _blocks(length, batch * heads * length):
        cols = slice(0, rows.stop)
        dots = torch.matmul(q[:, rows].to(dtype).flatten(1, 2), keys[..., cols]).unflatten(1, (-1, heads))
        if relu:
            dots = dots.relu_()
        scores = torch.matmul(w[:, rows].to(dtype).unsqueeze(2), dots).squeeze(2)
        t = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
        hidden = torch.arange(rows.stop, device=q.device) > t
        if document_ids is not None:
            hidden = hidden | (document_ids[:, rows, None] != document_ids[:, None, cols])
        scores.masked_fill_(hidden, float("-inf"))
        best, chosen = scores.topk(min(slots, rows.stop), dim=-1)
        chosen = chosen.to(torch.int32).masked_fill_(best == float("-inf"), -1)
        indices[:, rows, : chosen.shape[-1]] = chosen
    return indices


def _topk_fake(q: Tensor, k: Tensor, w: Tensor, document_ids: Tensor | None, top_k: int, relu: bool) -> Tensor:
    _check_count("index_topk", "top_k", top_k, top_k)
    return q.new_empty(q.shape[0], q.shape[1], torch.sym_min(top_k, q.shape[1]), dtype=torch.int32)


# sparse_attention


def _attend(q: Tensor, kv: Tensor, indices: Tensor, scale: float, value_dim: int) -> tuple[Tensor, Tensor]:
    _check_count("sparse_attention", "value_dim", value_dim, kv.shape[2])
    batch, length, heads, width = q.shape
    dtype = math_dtype(q.dtype)
    o = q.new_empty(batch, length, heads, value_dim)
    lse = q.new_empty(batch, heads, length, dtype=dtype)
    table = kv.to(dtype).reshape(-1, width)
    for rows in _blocks(length, batch * indices.shape[2] * (width + heads)):
        slots, empty = _slots(indices, rows, length)
        entries = _gather(table, slots)
        scores = torch.matmul(q[:, rows].to(dtype) * scale, entries.transpose(2, 3))
        scores.masked_fill_(empty.unsqueeze(2), float("-inf"))
        norm = scores.logsumexp(-1, keepdim=True)
        p = scores.sub_(norm).exp_().masked_fill_(empty.unsqueeze(2), 0)
        o[:, rows] = torch.matmul(p, entries[..., :value_dim])
        lse[..., rows] = norm.squeeze(-1).transpose(1, 2)
    return o, lse


def _attend_backward(
    grad_o: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
    value_dim: int,
) -> tuple[Tensor, Tensor]:
    batch, length, heads, width = q.shape
    dtype = math_dtype(q.dtype)
    table = kv.to(dtype).reshape(-1, width)
    grad_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grad_table = torch.zeros_like(table)
    for rows in _blocks(length, batch * indices.shape[2] * 2 * (width + heads)):
        slots, empty = _slots(indices, rows, length)
        entries = _gather(table, slots)
        queries, grads = q[:, rows].to(dtype) * scale, grad_o[:, rows].to(dtype)
        p = _probabilities(queries, entries, empty, lse[..., rows])
        shift = (o[:, rows].to(dtype) * grads).sum(-1, keepdim=True)
        if grad_lse is not None:
            shift -= grad_lse[..., rows].to(dtype).transpose(1, 2).unsqueeze(-1)
        grad_s = torch.matmul(grads, entries[..., :value_dim].transpose(2, 3)).sub_(shift).mul_(p)
        grad_q[:, rows] = torch.matmul(grad_s, entries).mul_(scale)
        grad_entries = torch.matmul(grad_s.transpose(2, 3), queries)
        grad_entries[..., :value_dim] += torch.matmul(p.transpose(2, 3), grads)
        _add_rows(grad_table, slots, grad_entries)
    return grad_q, grad_table.view(kv.shape).to(kv.dtype)


def _attend_fake(q: Tensor, kv: Tensor, indices: Tensor, scale: float, value_dim: int) -> tuple[Tensor, Tensor]:
    _check_count("sparse_attention", "value_dim", value_dim, kv.shape[2])
    batch, length, heads, _ = q.shape
    o = q.new_empty(batch, length, heads, value_dim)
    return o, q.new_empty(batch, heads, length, dtype=math_dtype(q.dtype))


def _attend_backward_fake(
    grad_o: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
    value_dim: int,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), kv.new_empty(kv.shape)


# indexer_loss


def _loss(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    indices: Tensor,
    main_q: Tensor,
    main_kv: Tensor,
    lse: Tensor,
    scale: float,
    relu: bool,
) -> Tensor:
    batch, length, _, width = q.shape
    dtype = math_dtype(q.dtype)
    loss = q.new_empty(batch, length, dtype=dtype)
    table, main_table = k.to(dtype).reshape(-1, width), main_kv.to(dtype).reshape(-1, main_kv.shape[2])
    for rows in _blocks(length, _loss_values(q, main_q, indices)):
        slots, empty = _slots(indices, rows, length)
        target = _target(main_q[:, rows].to(dtype) * scale, main_table, slots, empty, lse[..., rows])
        dots = torch.matmul(q[:, rows].to(dtype), _gather(table, slots).transpose(2, 3))
        log_p = _log_softmax(w[:, rows].to(dtype), dots.relu_() if relu else dots, empty)
        loss[:, rows] = (torch.xlogy(target, target) - target * log_p).sum(-1)
    return loss


def _loss_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    w: Tensor,
    indices: Tensor,
    main_q: Tensor,
    main_kv: Tensor,
    lse: Tensor,
    scale: float,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    _, length, _, width = q.shape
    dtype = math_dtype(q.dtype)
    grad_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grad_w = torch.empty(w.shape, dtype=w.dtype, device=w.device)
    table, main_table = k.to(dtype).reshape(-1, width), main_kv.to(dtype).reshape(-1, main_kv.shape[2])
    grad_table = torch.zeros_like(table)
    for rows in _blocks(length, _loss_values(q, main_q, indices)):
        slots, empty = _slots(indices, rows, length)
        target = _target(main_q[:, rows].to(dtype) * scale, main_table, slots, empty, lse[..., rows])
        entries, queries, weights = _gather(table, slots), q[:, rows].to(dtype), w[:, rows].to(dtype)
        dots = torch.matmul(queries, entries.transpose(2, 3))
        active = dots.relu() if relu else dots
        p = _log_softmax(weights, active, empty).exp_().masked_fill_(empty, 0)
        grad_score = p.mul_(target.sum(-1, keepdim=True)).sub_(target).mul_(grad[:, rows].to(dtype).unsqueeze(-1))
        grad_w[:, rows] = torch.matmul(active, grad_score.unsqueeze(-1)).squeeze(-1)
        grad_dots = grad_score.unsqueeze(2) * weights.unsqueeze(-1)
        if relu:
            grad_dots.masked_fill_(dots <= 0, 0)
        grad_q[:, rows] = torch.matmul(grad_dots, entries)
        grad_entries = torch.matmul(grad_dots.transpose(2, 3), queries)
        _add_rows(grad_table, slots, grad_entries)
    return grad_q, grad_table.view(k.shape).to(k.dtype), grad_w


def _loss_fake(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    indices: Tensor,
    main_q: Tensor,
    main_kv: Tensor,
    lse: Tensor,
    scale: float,
    relu: bool,
) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], dtype=math_dtype(q.dtype))


def _loss_backward_fake(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    w: Tensor,
    indices: Tensor,
    main_q: Tensor,
    main_kv: Tensor,
    lse: Tensor,
    scale: float,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), w.new_empty(w.shape)


def _loss_values(q: Tensor, main_q: Tensor, indices: Tensor) -> int:
    """Values held per query position while its loss is computed."""
    return q.shape[0] * indices.shape[2] * (q.shape[3] + main_q.shape[3] + 2 * q.shape[2] + main_q.shape[2])


def _target(queries: Tensor, table: Tensor, slots: Tensor, empty: Tensor, lse: Tensor) -> Tensor:
    """The main attention's probabilities over the selected set, summed over heads and L1-normalised, [B,t,S].

    A head's probabilities are its softmax over the set times the mass exp(lse of the set - lse) it puts there: the
    rounding of lse then only weighs heads, where exp(score - lse) would carry it into every probability, and the
    gradient softmax(I) - p cancels all but the last digits while the indexer is close to its target.
    """
    scores = torch.matmul(queries, _gather(table, slots).transpose(2, 3)).masked_fill_(empty.unsqueeze(2), -torch.inf)
    of_set = scores.logsumexp(-1, keepdim=True)
    mass = (of_set - lse.to(scores.dtype).transpose(1, 2).unsqueeze(-1)).exp_()
    p = (scores.softmax(-1) * mass).nan_to_num_(0.0).sum(2)
    return p / p.sum(-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)


def _log_softmax(weights: Tensor, dots: Tensor, empty: Tensor) -> Tensor:
    """log softmax over the selected set of sum_h weights_h dots_h; 0 in empty slots. [B,t,H], [B,t,H,S] -> [B,t,S]."""
    scores = torch.matmul(weights.unsqueeze(2), dots).squeeze(2).masked_fill_(empty, float("-inf"))
    return scores.log_softmax(-1).masked_fill_(empty, 0)


# Shared


def _check_count(op: str, name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        expected = "at least 1" if value < 1 else f"at most {most}"
        raise ValueError(f"moec::{op}: {name}={value}, expected {expected}")


def _blocks(length: int, values: int) -> Iterator[slice]:
    """Ranges of query positions that hold at most BLOCK values, at `values` per position."""
    step = max(1, BLOCK // max(1, values))
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _slots(indices: Tensor, rows: slice, length: int) -> tuple[Tensor, Tensor]:
    """Row numbers in the flattened [B*T, ...] table (0-th row of the batch for empty slots), and the empty slots."""
    chosen = indices[:, rows].long()
    base = torch.arange(chosen.shape[0], device=chosen.device).view(-1, 1, 1) * length
    return chosen.clamp_min(0) + base, chosen < 0


def _gather(table: Tensor, slots: Tensor) -> Tensor:
    """table [B*T,D] at slots [B,t,S] -> [B,t,S,D]."""
    return table.index_select(0, slots.flatten()).view(*slots.shape, table.shape[1])


def _add_rows(table: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Add rows [B,t,S,D] to table [B*T,D] at slots [B,t,S], each sum in the order of the rows, run after run.

    On CUDA index_add_ adds in whatever order threads arrive. An accumulating index_put_ sorts the slots first, stably,
    and sums each run of equal ones in turn; on a CPU it is the one whose threads race.
    """
    if table.device.type == "cuda":
        table.index_put_((slots.flatten(),), rows.flatten(0, 2), accumulate=True)
    else:
        table.index_add_(0, slots.flatten(), rows.flatten(0, 2))


def _probabilities(queries: Tensor, entries: Tensor, empty: Tensor, lse: Tensor) -> Tensor:
    """exp(q . entry - lse), 0 in empty slots: [B,t,H,D], [B,t,S,D], [B,t,S], [B,H,t] -> [B,t,H,S]."""
    scores = torch.matmul(queries, entries.transpose(2, 3))
    scores -= lse.to(scores.dtype).transpose(1, 2).unsqueeze(-1)
    return scores.exp_().masked_fill_(empty.unsqueeze(2), 0)


define_op(
    "index_topk",
    "(Tensor q, Tensor k, Tensor w, Tensor? document_ids, int top_k, bool relu) -> Tensor indices",
    _topk,
    _topk_fake,
    shapes={"q": "B T H D", "k": "B T D", "w": "B T H", "document_ids": "B T"},
    flops="B*H*(D + 1)*T*(T + 1)",
    recompute=False,
    source="DeepSeek-V3.2, section 2",
    summary="indexer scores and the best top_k keys per query",
)

define_op(
    "sparse_attention",
    "(Tensor q, Tensor kv, Tensor indices, float scale, int value_dim) -> (Tensor o, Tensor lse)",
    _attend,
    _attend_fake,
    backward_schema="(Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor kv, Tensor indices, Tensor o, Tensor lse,"
    " float scale, int value_dim) -> (Tensor grad_q, Tensor grad_kv)",
    backward=_attend_backward,
    backward_fake=_attend_backward_fake,
    shapes={"q": "B T H Dk", "kv": "B T Dk", "indices": "B T S"},
    flops="2*B*T*S*H*(Dk + value_dim)",
    backward_flops="2*B*T*S*H*(3*Dk + 2*value_dim)",
    source="DeepSeek-V3.2, section 2",
    summary="latent attention over the selected tokens",
)

define_op(
    "indexer_loss",
    "(Tensor q, Tensor k, Tensor w, Tensor indices, Tensor main_q, Tensor main_kv, Tensor lse, float scale, bool relu)"
    " -> Tensor kl",
    _loss,
    _loss_fake,
    backward_schema="(Tensor grad_kl, Tensor q, Tensor k, Tensor w, Tensor indices, Tensor main_q, Tensor main_kv,"
    " Tensor lse, float scale, bool relu) -> (Tensor grad_q, Tensor grad_k, Tensor grad_w)",
    backward=_loss_backward,
    backward_fake=_loss_backward_fake,
    shapes={
        "q": "B T HI DI",
        "k": "B T DI",
        "w": "B T HI",
        "indices": "B T S",
        "main_q": "B T H Dk",
        "main_kv": "B T Dk",
        "lse": "B H T",
    },
    flops="2*B*T*S*(H*Dk + HI*(DI + 1))",
    backward_flops="2*B*T*S*(H*Dk + HI*(3*DI + 2))",
    source="DeepSeek-V3.2, section 2",
    summary="KL between the main attention and the indexer on the selected set",
)
