"""Kernels of the counts for quantile balancing, in float32; counts are whole numbers, so their order is no matter.

1. `route_threshold`, one program a token: the (k+1)-th largest of score plus bias.
2. `route_count`, one program for EXPERTS experts: it walks over all tokens and counts threshold minus score in uniform
   bins, so that no two programs count into the same place, and nothing is added in global memory.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def route_threshold(logits, bias, threshold, experts, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """RANK: k + 1, or `experts` where there are no more. BLOCK: a power of two from `experts` on."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < experts
    scores = tl.sigmoid(tl.load(logits + token * experts + columns, mask=inside, other=0.0).to(tl.float32))
    left = tl.where(inside, scores + tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32), float("-inf"))
    best = tl.max(left, 0)
    for _ in range(RANK - 1):
        left = tl.where(columns == tl.argmax(left, 0), float("-inf"), left)
        best = tl.max(left, 0)
    tl.store(threshold + token, best)


@triton.jit
def route_count(
    logits, bias, threshold, counts, tokens, experts, bins, BLOCK: tl.constexpr, BINS: tl.constexpr,
    EXPERTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """counts int64 [experts, bins]. BLOCK, BINS: powers of two from `experts` and `bins` on."""
    every = tl.arange(0, BLOCK)
    shifts = tl.load(bias + every, mask=every < experts, other=0.0).to(tl.float32)
    low = tl.min(tl.where(every < experts, shifts, float("inf")), 0)
    high = tl.max(tl.where(every < experts, shifts, float("-inf")), 0)
    width = (high - low + 2) / bins
    members = tl.arange(0, EXPERTS)
    columns = tl.program_id(0) * EXPERTS + members
    total = tl.zeros([EXPERTS * BINS], tl.int32)
    for first in range(0, tokens, TOKENS):
        rows = first + tl.arange(0, TOKENS)
        known = (rows < tokens)[:, None] & (columns < experts)[None, :]
        places = rows.to(tl.int64)[:, None] * experts + columns[None, :]
        scores = tl.sigmoid(tl.load(logits + places, mask=known, other=0.0).to(tl.float32))
        above = tl.load(threshold + rows, mask=rows < tokens, other=0.0)[:, None] - scores
        found = tl.minimum(tl.maximum(((above - (low - 1)) / width).to(tl.int32), 0), bins - 1)
        found = (members[None, :] * BINS + found).reshape(TOKENS * EXPERTS)
        total += tl.histogram(found, EXPERTS * BINS, mask=known.reshape(TOKENS * EXPERTS))
    result = total.reshape(EXPERTS, BINS).to(tl.int64)
    places = tl.arange(0, BINS)
    inside = (columns < experts)[:, None] & (places < bins)[None, :]
    tl.store(counts + columns.to(tl.int64)[:, None] * bins + places[None, :], result, mask=inside)
