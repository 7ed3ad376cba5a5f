"""Kernels of routing, one program a token, in float32.

1. `route_choose`: scores, groups, the best k of score plus bias, and their weights. The best are taken one after the
   other; of equal ones the expert with the lower number.
2. `route_gradient`: the gradient of a token's logits, zero where an expert has no part in it.
"""

from __future__ import annotations

import triton
import triton.language as tl

# How a score comes from a logit: by itself, by all of them, or by those that were chosen.
SIGMOID, SOFTMAX, AFTER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _scores(logits, inside, SCORE: tl.constexpr):
    """Scores of a row; whatever is outside of it gets any number."""
    if SCORE == SIGMOID:
        result = tl.sigmoid(logits)
    elif SCORE == SOFTMAX:
        powers = tl.where(inside, tl.exp(logits - tl.max(tl.where(inside, logits, float("-inf")), 0)), 0.0)
        result = powers / tl.sum(powers, 0)
    else:
        result = logits
    return result


@triton.jit
def _softmax_of_chosen(chosen, known):
    powers = tl.where(known, tl.exp(chosen - tl.max(tl.where(known, chosen, float("-inf")), 0)), 0.0)
    return powers / tl.sum(powers, 0)


@triton.jit
def _within_best_groups(
    choice, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST: tl.constexpr, BLOCK: tl.constexpr
):
    """choice with -inf outside the groups whose BEST largest entries have the largest sum."""
    SIZE: tl.constexpr = BLOCK // GROUPS
    members = choice.reshape(GROUPS, SIZE)
    ranking, first = tl.max(members, 1, return_indices=True)
    if BEST == 2 and SIZE > 1:
        others = tl.where(tl.arange(0, SIZE)[None, :] == first[:, None], float("-inf"), members)
        ranking += tl.max(others, 1)
    groups = tl.arange(0, GROUPS)
    kept = groups < 0
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.argmax(ranking, 0)
        kept = kept | (groups == best)
        ranking = tl.where(groups == best, float("-inf"), ranking)
    return tl.where(kept[:, None], members, float("-inf")).reshape(BLOCK)


@triton.jit
def route_choose(
    logits, bias, weights, indices, experts, scale, epsilon, TOP_K: tl.constexpr, SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr, BIASED: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """BLOCK, CHOICES: powers of two from `experts` and TOP_K on; with groups BLOCK is `experts`."""
    token = tl.program_id(0).to(tl.int64)
    columns, places = tl.arange(0, BLOCK), tl.arange(0, CHOICES)
    inside = columns < experts
    scores = _scores(tl.load(logits + token * experts + columns, mask=inside, other=0.0).to(tl.float32), inside, SCORE)
    choice = scores
    if BIASED:
        choice += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    choice = tl.where(inside, choice, float("-inf"))
    if GROUPS > 1:
        choice = _within_best_groups(choice, GROUPS, TOP_GROUPS, 2 if BIASED else 1, BLOCK)
    chosen = tl.zeros([CHOICES], tl.float32)
    numbers = tl.zeros([CHOICES], tl.int32)
    taken = columns < 0
    for place in range(TOP_K):
        best = tl.minimum(tl.argmax(tl.where(taken, float("-inf"), choice), 0), experts - 1)
        taken = taken | (columns == best)
        score = tl.sum(tl.where(columns == best, scores, 0.0), 0)
        chosen = tl.where(places == place, score, chosen)
        numbers = tl.where(places == place, best, numbers)
    known = places < TOP_K
    if SCORE == AFTER:
        chosen = _softmax_of_chosen(chosen, known)
    if RENORMALIZE:
        chosen /= tl.sum(tl.where(known, chosen, 0.0), 0) + epsilon
    tl.store(weights + token * TOP_K + places, (chosen * scale).to(weights.dtype.element_ty), mask=known)
    tl.store(indices + token * TOP_K + places, numbers.to(tl.int64), mask=known)


@triton.jit
def route_gradient(
    grad_weights, logits, indices, grad_logits, experts, scale, epsilon, TOP_K: tl.constexpr, SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr, BLOCK: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns, places = tl.arange(0, BLOCK), tl.arange(0, CHOICES)
    inside, known = columns < experts, places < TOP_K
    row = logits + token * experts
    numbers = tl.load(indices + token * TOP_K + places, mask=known, other=0)
    grad = scale * tl.load(grad_weights + token * TOP_K + places, mask=known, other=0.0).to(tl.float32)
    chosen = tl.load(row + numbers, mask=known, other=0.0).to(tl.float32)
    if SCORE == SOFTMAX:
        values = tl.load(row + columns, mask=inside, other=0.0).to(tl.float32)
        scores = _scores(values, inside, SCORE)
        largest = tl.max(tl.where(inside, values, float("-inf")), 0)
        chosen = tl.exp(chosen - largest) / tl.sum(tl.where(inside, tl.exp(values - largest), 0.0), 0)
    elif SCORE == SIGMOID:
        chosen = tl.sigmoid(chosen)
    else:
        chosen = _softmax_of_chosen(chosen, known)
    chosen = tl.where(known, chosen, 0.0)
    if RENORMALIZE:
        total = tl.sum(chosen, 0) + epsilon
        grad = (grad - tl.sum(grad * chosen, 0) / total) / total
    if SCORE == SIGMOID:
        grad = grad * chosen * (1 - chosen)
    elif SCORE == SOFTMAX:
        grad = grad * chosen
    else:
        grad = chosen * (grad - tl.sum(grad * chosen, 0))
    result = tl.zeros([BLOCK], tl.float32)
    if SCORE == SOFTMAX:
        result -= scores * tl.sum(grad, 0)
    for place in range(TOP_K):
        number = tl.load(indices + token * TOP_K + place)
        result += tl.where(columns == number, tl.sum(tl.where(places == place, grad, 0.0), 0), 0.0)
    tl.store(grad_logits + token * experts + columns, result.to(grad_logits.dtype.element_ty), mask=inside)
