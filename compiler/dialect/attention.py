"""Softmax attention: causal or not, grouped heads, unequal key and value widths, window, sinks, packed documents.

Forward, for head h of query t with its key/value head g = h // (H/G):

1. s_ts = scale * q_th . k_sg over the visible keys s;
2. lse_ht = log(sum_s exp(s_ts) + exp(sink_h)), the sink term only with sinks;
3. o_th = sum_s exp(s_ts - lse_ht) v_sg.

Backward recomputes p_ts = exp(s_ts - lse_ht) and uses delta_ht = o_th . do_th:

    ds = p * (do . v - delta + dlse),  dq = scale * ds k,  dk = scale * ds^T q,  dv = p^T do,  dsink = -exp(sink - lse) * delta

Both walk over blocks of queries, so that memory stays linear in T for a fixed block budget.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moec.compiler.dialect._define import define_op, math_dtype

# Scores held at once: 2**24 fp32 values are 64 MiB.
SCORES = 1 << 24


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
    groups, width = k.shape[2], v.shape[3]
    dtype = math_dtype(q.dtype)
    o = q.new_empty(batch, length, heads, width)
    lse = q.new_empty(batch, heads, length, dtype=dtype)
    keys = k.to(dtype).permute(0, 2, 3, 1).contiguous()
    values = v.to(dtype).permute(0, 2, 1, 3).contiguous()
    sink = None if sinks is None else sinks.to(dtype).view(1, groups, -1, 1)
    for rows, cols in _blocks(q, window, causal):
        scores = _scores(q[:, rows], keys[..., cols], scale)
        _hide(scores, document_ids, rows, cols, window, causal)
        peak = scores.amax(-1, keepdim=True)
        if sink is not None:
            peak = torch.maximum(peak, sink.unsqueeze(-1))
        weights = scores.sub_(peak).exp_()
        total = weights.sum(-1, keepdim=True)
        if sink is not None:
            total += (sink.unsqueeze(-1) - peak).exp_()
        mixed = _times(weights, values[:, :, cols]).div_(total)
        o[:, rows] = _merge_heads(mixed)
        lse[..., rows] = peak.add_(total.log_()).view(batch, heads, -1)
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
    groups = k.shape[2]
    dtype = math_dtype(q.dtype)
    grad_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    keys = k.to(dtype).permute(0, 2, 1, 3).contiguous()
    values = v.to(dtype).permute(0, 2, 3, 1).contiguous()
    grad_k = torch.zeros_like(keys)
    grad_v = torch.zeros_like(values.transpose(2, 3), memory_format=torch.contiguous_format)
    delta = (o.to(dtype) * grad_o.to(dtype)).sum(-1).transpose(1, 2)
    shift = delta if grad_lse is None else delta - grad_lse.to(dtype)
    for rows, cols in _blocks(q, window, causal):
        scores = _scores(q[:, rows], keys[:, :, cols].transpose(2, 3), scale)
        _hide(scores, document_ids, rows, cols, window, causal)
        shape = (batch, groups, heads // groups, -1, 1)
        p = scores.sub_(lse[..., rows].reshape(shape)).exp_()
        grads = _split_heads(grad_o[:, rows].to(dtype), groups)
        grad_v[:, :, cols] += torch.matmul(p.flatten(2, 3).transpose(2, 3), grads.flatten(2, 3))
        grad_p = _times(grads, values[..., cols])
        grad_s = grad_p.sub_(shift[..., rows].reshape(shape)).mul_(p)
        queries = _split_heads(q[:, rows].to(dtype), groups).flatten(2, 3)
        grad_k[:, :, cols] += torch.matmul(grad_s.flatten(2, 3).transpose(2, 3), queries)
        grad_q[:, rows] = _merge_heads(_times(grad_s, keys[:, :, cols]).mul_(scale))
    grad_sinks = q.new_empty(0)
    if sinks is not None:
        share = (sinks.to(dtype).view(1, -1, 1) - lse).exp_()
        grad_sinks = -(share * shift).sum((0, 2)).to(sinks.dtype)
    grad_k = grad_k.mul_(scale).transpose(1, 2).to(k.dtype)
    return grad_q, grad_k.contiguous(), grad_v.transpose(1, 2).to(v.dtype).contiguous(), grad_sinks


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
    step = max(1, SCORES // max(1, batch * heads * length))
    for start in range(0, length, step):
        stop = min(start + step, length)
        first = max(0, start - window + 1) if window else 0
        yield slice(start, stop), slice(first, stop if causal else length)


def _hide(scores: Tensor, document_ids: Tensor | None, rows: slice, cols: slice, window: int, causal: bool) -> None:
    """Set the scores [B,G,R,t,S] of keys that a query must not see to -inf, in place."""
    t = torch.arange(rows.start, rows.stop, device=scores.device)[:, None]
    s = torch.arange(cols.start, cols.stop, device=scores.device)[None, :]
    hidden = None
    if causal:
        hidden = s > t
    if window:
        hidden = hidden | (s <= t - window)
    if document_ids is not None:
        other = (document_ids[:, rows, None] != document_ids[:, None, cols])[:, None, None]
        hidden = other if hidden is None else hidden | other
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))


def _split_heads(x: Tensor, groups: int) -> Tensor:
    """[B,t,H,D] -> [B,G,R,t,D], contiguous."""
    batch, length, heads, width = x.shape
    return x.reshape(batch, length, groups, heads // groups, width).permute(0, 2, 3, 1, 4).contiguous()


def _merge_heads(x: Tensor) -> Tensor:
    """[B,G,R,t,D] -> [B,t,H,D]."""
    batch, groups, repeat, length, width = x.shape
    return x.permute(0, 3, 1, 2, 4).reshape(batch, length, groups * repeat, width)


def _times(x: Tensor, y: Tensor) -> Tensor:
    """[B,G,R,t,M] times [B,G,M,N], shared by the R heads of a group -> [B,G,R,t,N]."""
    return torch.matmul(x.flatten(2, 3), y).unflatten(2, x.shape[2:4])


def _scores(q: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Scaled scores [B,G,R,t,S] of q [B,t,H,D] with keys [B,G,D,S]."""
    return _times(_split_heads(q.to(keys.dtype), keys.shape[1]).mul_(scale), keys)


_PAIRS = "(Piecewise((Min(window, T), window > 0), (T, True)))"
_VISIBLE = f"(T*{_PAIRS} - {_PAIRS}*({_PAIRS} - 1)/2)"

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
    flops=f"2*B*H*(Dk + Dv)*{_VISIBLE}",
    backward_flops=f"2*B*H*(3*Dk + 2*Dv)*{_VISIBLE}",
    source="arXiv 1706.03762; memory-linear backward arXiv 2112.05682; sinks arXiv 2309.17453",
    summary="softmax attention with grouped heads, window, sinks and packed documents",
)
