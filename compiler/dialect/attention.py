"""Softmax attention: causal or not, grouped heads, unequal key and value widths, window, sinks, packed documents.

Forward, for head h of query t with its key/value head g = h // (H/G):

1. s_ts = scale * q_th . k_sg over the visible keys s;
2. lse_ht = log(sum_s exp(s_ts) + exp(sink_h)), the sink term only with sinks;
3. o_th = sum_s exp(s_ts - lse_ht) v_sg.

Backward recomputes p_ts = exp(s_ts - lse_ht) and uses delta_ht = o_th . do_th:

    ds = p * (do . v - delta + dlse),  dq = scale * ds k,  dk = scale * ds^T q,  dv = p^T do
    dsink = exp(sink - lse) * (dlse - delta), summed over tokens

Both walk over blocks of queries, so that memory stays linear in T for a fixed block budget.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moec.compiler.dialect._define import define_op, math_dtype

# Scores per block of queries: what fits a CPU's cache (2 MiB of fp32), or keeps a GPU busy (256 MiB).
CACHED_SCORES = 1 << 19
SCORES = 1 << 26
# Fewer rows than this make the matmuls inefficient.
MIN_ROWS = 64


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_ids: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attention of q [B,T,H,Dk] to k [B,T,G,Dk], v [B,T,G,Dv]; H is a multiple of G. Returns o [B,T,H,Dv], lse [B,H,T].

    document_ids: int [B,T], non-decreasing along T; a query sees its own document only. None: a row is one document.
    sinks: [H] logits that join the softmax denominator and carry no value (gpt-oss).
    window: with w > 0 query t sees keys t-w < s <= t; needs causal. 0: no window.
    o has q's dtype; lse is the natural logarithm in float32 (float64 for float64 inputs).
    Raises ValueError for heads that do not divide, mismatched shapes, or a window without causal.
    """
    return torch.ops.moec.attention(q, k, v, document_ids, sinks, scale, window, causal)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_ids: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    _check(q, k, v, window, causal)
    batch, length, heads, _ = q.shape
    dtype = math_dtype(q.dtype)
    o = q.new_empty(batch, length, heads, v.shape[3])
    lse = q.new_empty(batch, heads, length, dtype=dtype)
    keys, values = _by_head(k.to(dtype), k.shape[2]), _by_head(v.to(dtype), v.shape[2])
    for rows, cols in _blocks(q, window, causal):
        queries = _by_head(q[:, rows].to(dtype) * scale, k.shape[2])
        p, norm = _softmax(queries, keys[:, cols], _mask(queries, document_ids, rows, cols, window, causal))
        mixed = torch.bmm(p, values[:, cols])
        norm = norm.view(batch, heads, rows.stop - rows.start)
        if sinks is not None:
            total = torch.logaddexp(norm, sinks.to(dtype).view(-1, 1))
            mixed *= (norm - total).exp_().view(*mixed.shape[:2], 1)
            norm = total
        o[:, rows] = _by_token(mixed, batch, rows.stop - rows.start, heads)
        lse[..., rows] = norm
    return o, lse


def _backward(
    grad_o: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    document_ids: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, length, heads, _ = q.shape
    groups, dtype = k.shape[2], math_dtype(q.dtype)
    keys, values = _by_head(k.to(dtype), groups), _by_head(v.to(dtype), groups)
    grad_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
    shift = (o.to(dtype) * grad_o.to(dtype)).sum(-1).transpose(1, 2)
    if grad_lse is not None:
        shift = shift - grad_lse.to(dtype)
    for rows, cols in _blocks(q, window, causal):
        queries, grads = _by_head(q[:, rows].to(dtype) * scale, groups), _by_head(grad_o[:, rows].to(dtype), groups)
        p, norm = _softmax(queries, keys[:, cols], _mask(queries, document_ids, rows, cols, window, causal))
        if sinks is not None:
            p *= (norm - lse[..., rows].reshape(norm.shape)).exp_()
        grad_values[:, cols].baddbmm_(p.transpose(1, 2), grads)
        grad_p = torch.bmm(grads, values[:, cols].transpose(1, 2))
        grad_scores = grad_p.sub_(shift[..., rows].reshape(norm.shape)).mul_(p)
        grad_keys[:, cols].baddbmm_(grad_scores.transpose(1, 2), queries)
        grad_q[:, rows] = _by_token(
            torch.bmm(grad_scores, keys[:, cols]).mul_(scale), batch, rows.stop - rows.start, heads
        )
    grad_sinks = q.new_empty(0)
    if sinks is not None:
        grad_sinks = -((sinks.to(dtype).view(-1, 1) - lse).exp_() * shift).sum((0, 2)).to(sinks.dtype)
    return (
        grad_q,
        _by_token(grad_keys, batch, length, groups, k.dtype),
        _by_token(grad_values, batch, length, groups, v.dtype),
        grad_sinks,
    )


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_ids: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    _check(q, k, v, window, causal)
    batch, length, heads, _ = q.shape
    return q.new_empty(batch, length, heads, v.shape[3]), q.new_empty(batch, heads, length, dtype=math_dtype(q.dtype))


def _backward_fake(
    grad_o: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    document_ids: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_sinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), grad_sinks


def _check(q: Tensor, k: Tensor, v: Tensor, window: int, causal: bool) -> None:
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(f"moec::attention: q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit")
    if q.shape[2] % max(k.shape[2], 1):
        raise ValueError(f"moec::attention: {q.shape[2]} query heads are not a multiple of {k.shape[2]} key heads")
    if window < 0 or (window and not causal):
        raise ValueError(f"moec::attention: window={window} needs to be >= 0, and causal=True when it is not 0")


def _blocks(q: Tensor, window: int, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries and the keys that any of them can see."""
    batch, length, heads, _ = q.shape
    scores = CACHED_SCORES if q.device.type == "cpu" else SCORES
    step = max(MIN_ROWS, scores // max(1, batch * heads * length))
    for start in range(0, length if batch * heads else 0, step):
        stop = min(start + step, length)
        first = max(0, start - window + 1) if window else 0
        yield slice(start, stop), slice(first, stop if causal else length)


def _mask(
    queries: Tensor, document_ids: Tensor | None, rows: slice, cols: slice, window: int, causal: bool
) -> Tensor | None:
    """What to add to the scores: -inf where a query must not see a key, else 0; [1 or B,1,t,S]."""
    t = torch.arange(rows.start, rows.stop, device=queries.device)[:, None]
    s = torch.arange(cols.start, cols.stop, device=queries.device)[None, :]
    hidden = None
    if causal:
        hidden = (s > t)[None]
        if window:
            hidden |= s <= t - window
    if document_ids is not None:
        other = document_ids[:, rows, None] != document_ids[:, None, cols]
        hidden = other if hidden is None else other.logical_or_(hidden)
    if hidden is None:
        return None
    # One small mask that is added: masked_fill on the scores themselves costs ten times as much on a CPU.
    return queries.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf")).unsqueeze(1)


def _softmax(queries: Tensor, keys: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax of queries [B*G,R*t,D] over keys [B*G,S,D] -> [B*G,R*t,S], and its log denominator [B*G,R*t,1]."""
    scores = torch.bmm(queries, keys.transpose(1, 2))
    if mask is not None:
        batch, _, length, visible = mask.shape
        scores.view(batch, scores.shape[0] * scores.shape[1] // (batch * length), length, visible).add_(mask)
    p = scores.softmax(-1)
    # The largest probability is 1 / sum exp(score - largest score): no second pass of exponentials.
    return p, scores.amax(-1, keepdim=True) - p.amax(-1, keepdim=True).log_()


def _by_head(x: Tensor, groups: int) -> Tensor:
    """[B,t,H,D] -> [B*G,R*t,D] with H = G*R."""
    batch, length, heads, width = x.shape
    repeat = heads // groups
    split = x.reshape(batch, length, groups, repeat, width).permute(0, 2, 3, 1, 4)
    return split.reshape(batch * groups, repeat * length, width)


def _by_token(x: Tensor, batch: int, length: int, heads: int, dtype: torch.dtype | None = None) -> Tensor:
    """[B*G,R*t,D] -> [B,t,H,D], contiguous, in `dtype` if given."""
    x = x.view(batch, heads, length, x.shape[2]).transpose(1, 2)
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device).copy_(x)


_REACH = "Piecewise((Min(window, T), window > 0), (T, True))"
_PAIRS = f"(causal*(T*{_REACH} - {_REACH}*({_REACH} - 1)/2) + (1 - causal)*T**2)"

define_op(
    "attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? document_ids, Tensor? sinks, float scale, int window, bool causal)"
    " -> (Tensor o, Tensor lse)",
    _forward,
    _fake,
    backward_schema="(Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,"
    " Tensor? document_ids, Tensor? sinks, float scale, int window, bool causal)"
    " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_sinks)",
    backward=_backward,
    backward_fake=_backward_fake,
    shapes={"q": "B T H Dk", "k": "B T G Dk", "v": "B T G Dv", "document_ids": "B T", "sinks": "H"},
    flops=f"2*B*H*(Dk + Dv)*{_PAIRS}",
    backward_flops=f"2*B*H*(3*Dk + 2*Dv)*{_PAIRS}",
    source="arXiv 1706.03762; memory-linear backward arXiv 2112.05682; sinks arXiv 2309.17453",
    summary="softmax attention with grouped heads, window, sinks and packed documents",
)
