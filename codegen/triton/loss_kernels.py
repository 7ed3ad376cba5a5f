"""Kernels over the logits of one chunk: one program per row, blocks of classes one after the other.

1. `loss_statistics`: maximum, sum of exponentials, label's logit and weighted sum of a row, carried on from those in
   memory.
2. `loss_gradient`: the gradient of x in the place of the product, from coefficients per row.
3. `loss_both`: the two in one program, for a chunk of all classes. The second pass goes backwards, because the end of
   the row is what a cache still holds.
4. `scaled_copy`: the product of a tensor and a number, rounded to another dtype in one pass.

Logits are read and written in their own dtype, everything else is float32. A row whose gradient is zero is not read for
it, and an ignored row not at all. Offsets of rows are 64 bits wide.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _logits(x, bias, columns, inside, scale, softcap, HAS_BIAS: tl.constexpr, CAPPED: tl.constexpr):
    """z of a block, -inf outside of the row."""
    z = x.to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    z *= scale
    if CAPPED:
        z = softcap * (2 * tl.sigmoid(2 * (z / softcap)) - 1)
    return tl.where(inside, z, float("-inf"))


@triton.jit
def _read(
    row, bias, class_weights, count, label, scale, softcap, maximum, total, HAS_BIAS: tl.constexpr, CAPPED:
    tl.constexpr, SMOOTHED: tl.constexpr, CLASS_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Statistics of one row, started from `maximum` and `total`; label: place in the row, -1 for none."""
    sums = tl.zeros([BLOCK], tl.float32)
    targets = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    first = maximum
    for start in tl.range(0, count, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < count
        x = tl.load(row + columns, mask=inside, other=0.0, eviction_policy="evict_last")
        z = _logits(x, bias, columns, inside, scale, softcap, HAS_BIAS, CAPPED)
        larger = tl.maximum(maximum, tl.max(z, 0))
        sums = sums * tl.exp(maximum - larger) + tl.exp(z - larger)
        targets += tl.where(columns == label, z, 0.0)
        if SMOOTHED:
            part = tl.where(inside, z, 0.0)
            if CLASS_WEIGHTS:
                part *= tl.load(class_weights + columns, mask=inside, other=0.0).to(tl.float32)
            weighted += part
        maximum = larger
    total = total * tl.exp(first - maximum) + tl.sum(sums, 0)
    return maximum, total, tl.sum(targets, 0), tl.sum(weighted, 0)


@triton.jit
def _write(
    row, bias, class_weights, count, length, label, scale, softcap, reference, exponential, target, uniform,
    HAS_BIAS: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr, CLASS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of one row in its place, last block first; length: `count`, or 0 for a gradient of zeros."""
    blocks = (count + BLOCK - 1) // BLOCK
    for index in tl.range(0, blocks):
        columns = (blocks - 1 - index) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < count
        live = columns < length
        x = tl.load(row + columns, mask=live, other=0.0, eviction_policy="evict_first")
        z = _logits(x, bias, columns, live, scale, softcap, HAS_BIAS, CAPPED)
        grad = exponential * tl.exp(z - reference) - tl.where(columns == label, target, 0.0)
        if SMOOTHED:
            share = uniform
            if CLASS_WEIGHTS:
                share *= tl.load(class_weights + columns, mask=inside, other=0.0).to(tl.float32)
            grad -= share
        grad *= scale
        if CAPPED:
            ratio = z / softcap
            grad *= 1 - ratio * ratio
        grad = tl.where(live, grad, 0.0)
        tl.store(row + columns, grad.to(row.dtype.element_ty), mask=inside)


@triton.jit
def _place(label, first, count):
    """The label's place among `count` classes from `first` on, -1 where it is none of them."""
    place = label - first
    return tl.where((place >= 0) & (place < count), place, -1).to(tl.int32)


@triton.jit
def loss_statistics(
    product, labels, bias, class_weights, maximum, total, target, weighted, stride, count, first, ignored, scale,
    softcap, HAS_BIAS: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr, CLASS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + index)
    place = tl.where(label == ignored, -1, _place(label, first, count))
    before = tl.load(target + index)
    before_weighted = tl.load(weighted + index)
    m, s, t, w = _read(
        product + index * stride, bias, class_weights, count, place, scale, softcap, tl.load(maximum + index),
        tl.load(total + index), HAS_BIAS, CAPPED, SMOOTHED, CLASS_WEIGHTS, BLOCK,
    )  # fmt: skip
    tl.store(maximum + index, m)
    tl.store(total + index, s)
    tl.store(target + index, before + t)
    if SMOOTHED:
        tl.store(weighted + index, before_weighted + w)


@triton.jit
def loss_gradient(
    product, labels, bias, class_weights, reference, exponential, target, uniform, stride, count, first, ignored,
    scale, softcap, HAS_BIAS: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr,
    CLASS_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + index)
    place = tl.where(label == ignored, -1, _place(label, first, count))
    a, b, e = tl.load(exponential + index), tl.load(target + index), tl.load(uniform + index)
    length = tl.where((a != 0) | (b != 0) | (e != 0), count, 0)
    _write(
        product + index * stride, bias, class_weights, count, length, place, scale, softcap,
        tl.load(reference + index), a, b, e, HAS_BIAS, CAPPED, SMOOTHED, CLASS_WEIGHTS, BLOCK,
    )  # fmt: skip


@triton.jit
def loss_both(
    product, labels, bias, class_weights, label_weights, token_weights, z_weights, losses, lses, stride, count, ignored,
    scale, softcap, smoothing, all_weights, HAS_BIAS: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr,
    CLASS_WEIGHTS: tl.constexpr, Z_LOSS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """all_weights: one number in memory, the sum of the class weights."""
    index = tl.program_id(0).to(tl.int64)
    row = product + index * stride
    label = tl.load(labels + index)
    place = _place(label, 0, count)
    known = label != ignored
    wrong = known & (place < 0)
    token = tl.where(known, tl.load(token_weights + index), 0.0)
    z_weight = 0.0
    if Z_LOSS:
        z_weight = tl.load(z_weights + index)
    length = tl.where(known | (z_weight != 0), count, 0)
    least = tl.full([], -3.4028234663852886e38, tl.float32)
    m, s, t, w = _read(
        row, bias, class_weights, length, place, scale, softcap, least, 0.0, HAS_BIAS, CAPPED, SMOOTHED,
        CLASS_WEIGHTS, BLOCK,
    )  # fmt: skip
    log_total = tl.log(s)
    lse = m + log_total
    own = 1 - smoothing
    if CLASS_WEIGHTS:
        own *= tl.load(label_weights + index)
    loss = own * (m - t + log_total)
    if SMOOTHED:
        weight = tl.load(all_weights)
        loss += smoothing / count * (weight * lse - w)
    loss = tl.where(wrong, float("nan"), tl.where(known, loss, 0.0))
    tl.store(losses + index, loss)
    tl.store(lses + index, lse)
    token = tl.where(wrong, 0.0, token)
    target = token * own
    exponential = target
    uniform = 0.0
    if SMOOTHED:
        uniform = token * smoothing / count
        exponential += uniform * weight
    if Z_LOSS:
        exponential += tl.where(wrong, 0.0, 2 * z_weight * lse)
    length = tl.where((token != 0) | (z_weight != 0), count, 0)
    _write(
        row, bias, class_weights, count, length, tl.where(known, place, -1), scale, softcap, m, exponential / s, target,
        uniform, HAS_BIAS, CAPPED, SMOOTHED, CLASS_WEIGHTS, BLOCK,
    )  # fmt: skip


@triton.jit
def scaled_copy(source, factor, result, count, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    value = tl.load(source + places, mask=inside) * tl.load(factor)
    tl.store(result + places, value.to(result.dtype.element_ty), mask=inside)
