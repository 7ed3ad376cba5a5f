"""Kernels over the logits of one chunk: one program per row, blocks of classes one after the other.

1. `loss_statistics`: maximum, sum of exponentials, label's logit and weighted sum of a row, carried on from memory.
2. `loss_gradient`: the gradient of x in the place of the product, from coefficients per row.
3. `loss_both`: the two in one program, for a chunk of all classes. The second pass goes backwards, because the end of
   the row is what a cache still holds.
4. `scaled_copy`: the product of a tensor and a number, rounded to another dtype in one pass.

Logits are read and written in their own dtype, everything else is float32. A row whose gradient is zero is not read for
it, and an ignored row not at all. Offsets of rows are 64 bits wide.

A row is bound by instructions and barriers before it is bound by bytes:
- An element costs one multiply-add, one 2^x and one addition: its exponential is 2^(k v - shift). v is the product (and
  bias) while z is a positive multiple of it, and z itself otherwise; k is that multiple times log2(e).
- A block is lanes of `WIDE` neighbouring classes, which one thread holds. Every lane keeps a maximum (as a shift) and a
  sum of its own, so that threads meet only at the end of the row.
- Only the block that holds the label looks for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
WIDE = tl.constexpr(8)
LEAST = tl.constexpr(-3.4028234663852886e38)
# How z comes from the product: a positive multiple of it, any multiple, or a capped one.
POSITIVE, ANY, CAPPED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _values(x, bias, columns, inside, scale, softcap, HAS_BIAS: tl.constexpr, FORM: tl.constexpr):
    """v of a block."""
    v = x.to(tl.float32)
    if HAS_BIAS:
        v += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    if FORM == ANY:
        v *= scale
    if FORM == CAPPED:
        v = softcap * (2 * tl.sigmoid(2 * scale / softcap * v) - 1)
    return v


@triton.jit
def _read_block(
    row, start, count, bias, class_weights, label, scale, softcap, factor, shift, total, target, weighted,
    HAS_BIAS: tl.constexpr, FORM: tl.constexpr, SMOOTHED: tl.constexpr, CLASS_WEIGHTS: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One more block; shift, total and weighted belong to lanes."""
    columns = start + WIDE * tl.arange(0, BLOCK // WIDE)[:, None] + tl.arange(0, WIDE)[None, :]
    inside = columns < count
    if WHOLE:
        x = tl.load(row + columns, eviction_policy="evict_last")
    else:
        x = tl.load(row + columns, mask=inside, other=0.0, eviction_policy="evict_last")
    v = _values(x, bias, columns, inside, scale, softcap, HAS_BIAS, FORM)
    if not WHOLE:
        v = tl.where(inside, v, float("-inf"))
    larger = tl.maximum(shift, tl.max(v, 1) * (factor * LOG2E))
    exponentials = tl.exp2(v * (factor * LOG2E) - larger[:, None])
    total = total * tl.exp2(shift - larger) + tl.sum(exponentials, 1)
    if (label >= start) & (label < start + BLOCK):
        target += tl.sum(tl.sum(tl.where(columns == label, v, 0.0), 1), 0) * factor
    if SMOOTHED:
        part = v * factor
        if not WHOLE:
            part = tl.where(inside, part, 0.0)
        if CLASS_WEIGHTS:
            part *= tl.load(class_weights + columns, mask=inside, other=0.0).to(tl.float32)
        weighted += tl.sum(part, 1)
    return larger, total, target, weighted


@triton.jit
def _read(
    row, bias, class_weights, count, label, scale, softcap, factor, first, total, HAS_BIAS: tl.constexpr,
    FORM: tl.constexpr, SMOOTHED: tl.constexpr, CLASS_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Shift, sum of 2^(k v - shift), the label's z and the weighted sum of a row, started from `first` and `total`.

    label: place in the row, -1 for none.
    """
    shifts = tl.full([BLOCK // WIDE], LEAST, tl.float32)
    sums = tl.zeros([BLOCK // WIDE], tl.float32)
    weighted = tl.zeros([BLOCK // WIDE], tl.float32)
    target = tl.full([], 0.0, tl.float32)
    whole = count // BLOCK * BLOCK
    for start in tl.range(0, whole, BLOCK):
        shifts, sums, target, weighted = _read_block(
            row, start, count, bias, class_weights, label, scale, softcap, factor, shifts, sums, target, weighted,
            HAS_BIAS, FORM, SMOOTHED, CLASS_WEIGHTS, True, BLOCK,
        )  # fmt: skip
    if whole < count:
        shifts, sums, target, weighted = _read_block(
            row, whole, count, bias, class_weights, label, scale, softcap, factor, shifts, sums, target, weighted,
            HAS_BIAS, FORM, SMOOTHED, CLASS_WEIGHTS, False, BLOCK,
        )  # fmt: skip
    shift = tl.maximum(first, tl.max(shifts, 0))
    total = total * tl.exp2(first - shift) + tl.sum(sums * tl.exp2(shifts - shift), 0)
    return shift, total, target, tl.sum(weighted, 0)


@triton.jit
def _write_block(
    row, start, count, length, bias, class_weights, label, scale, softcap, factor, shift, exponential, target,
    uniform, HAS_BIAS: tl.constexpr, FORM: tl.constexpr, SMOOTHED: tl.constexpr, CLASS_WEIGHTS: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = start + tl.arange(0, BLOCK)
    inside = columns < count
    if WHOLE:
        x = tl.load(row + columns, eviction_policy="evict_first")
    else:
        x = tl.load(row + columns, mask=columns < length, other=0.0, eviction_policy="evict_first")
    v = _values(x, bias, columns, inside, scale, softcap, HAS_BIAS, FORM)
    grad = exponential * tl.exp2(v * (factor * LOG2E) - shift)
    if (label >= start) & (label < start + BLOCK):
        grad -= tl.where(columns == label, target, 0.0)
    if SMOOTHED:
        share = uniform
        if CLASS_WEIGHTS:
            share *= tl.load(class_weights + columns, mask=inside, other=0.0).to(tl.float32)
        grad -= share
    if FORM == CAPPED:
        ratio = v / softcap
        grad *= 1 - ratio * ratio
    if WHOLE:
        tl.store(row + columns, grad.to(row.dtype.element_ty))
    else:
        grad = tl.where(columns < length, grad, 0.0)
        tl.store(row + columns, grad.to(row.dtype.element_ty), mask=inside)


@triton.jit
def _write(
    row, bias, class_weights, count, length, label, scale, softcap, factor, shift, exponential, target, uniform,
    HAS_BIAS: tl.constexpr, FORM: tl.constexpr, SMOOTHED: tl.constexpr, CLASS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of one row in its place, last block first; length: `count`, or 0 for a gradient of zeros."""
    # dx = scale dz, as far as z is linear in x.
    exponential *= scale
    target *= scale
    uniform *= scale
    whole = length // BLOCK * BLOCK
    for rest in tl.range(0, count - whole, BLOCK):
        _write_block(
            row, whole + rest, count, length, bias, class_weights, label, scale, softcap, factor, shift,
            exponential, target, uniform, HAS_BIAS, FORM, SMOOTHED, CLASS_WEIGHTS, False, BLOCK,
        )  # fmt: skip
    for done in tl.range(0, whole, BLOCK):
        _write_block(
            row, whole - BLOCK - done, count, length, bias, class_weights, label, scale, softcap, factor, shift,
            exponential, target, uniform, HAS_BIAS, FORM, SMOOTHED, CLASS_WEIGHTS, True, BLOCK,
        )  # fmt: skip


@triton.jit
def _place(label, first, count):
    """The label's place among `count` classes from `first` on, -1 where it is none of them."""
    place = label - first
    return tl.where((place >= 0) & (place < count), place, -1).to(tl.int32)


@triton.jit
def loss_statistics(
    product, labels, bias, class_weights, maximum, total, target, weighted, stride, count, first, ignored, scale,
    softcap, factor, HAS_BIAS: tl.constexpr, FORM: tl.constexpr, SMOOTHED: tl.constexpr, CLASS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + index)
    place = tl.where(label == ignored, -1, _place(label, first, count))
    before = tl.load(target + index)
    before_weighted = tl.load(weighted + index)
    shift, s, t, w = _read(
        product + index * stride, bias, class_weights, count, place, scale, softcap, factor,
        tl.load(maximum + index) * LOG2E, tl.load(total + index), HAS_BIAS, FORM, SMOOTHED, CLASS_WEIGHTS, BLOCK,
    )  # fmt: skip
    # What is stored is rounded once more; the sum follows.
    m = shift * LN2
    tl.store(maximum + index, m)
    tl.store(total + index, s * tl.exp2(shift - m * LOG2E))
    tl.store(target + index, before + t)
    if SMOOTHED:
        tl.store(weighted + index, before_weighted + w)


@triton.jit
def loss_gradient(
    product, labels, bias, class_weights, reference, exponential, target, uniform, stride, count, first, ignored,
    scale, softcap, factor, HAS_BIAS: tl.constexpr, FORM: tl.constexpr, SMOOTHED: tl.constexpr,
    CLASS_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + index)
    place = tl.where(label == ignored, -1, _place(label, first, count))
    a, b, e = tl.load(exponential + index), tl.load(target + index), tl.load(uniform + index)
    length = tl.where((a != 0) | (b != 0) | (e != 0), count, 0)
    _write(
        product + index * stride, bias, class_weights, count, length, place, scale, softcap, factor,
        tl.load(reference + index) * LOG2E, a, b, e, HAS_BIAS, FORM, SMOOTHED, CLASS_WEIGHTS, BLOCK,
    )  # fmt: skip


@triton.jit
def loss_both(
    product, labels, bias, class_weights, label_weights, token_weights, z_weights, losses, lses, stride, count, ignored,
    scale, softcap, factor, smoothing, all_weights, HAS_BIAS: tl.constexpr, FORM: tl.constexpr, SMOOTHED: tl.constexpr,
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
    least = tl.full([], LEAST, tl.float32)
    shift, s, t, w = _read(
        row, bias, class_weights, length, place, scale, softcap, factor, least, 0.0, HAS_BIAS, FORM, SMOOTHED,
        CLASS_WEIGHTS, BLOCK,
    )  # fmt: skip
    m = shift * LN2
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
    uniform = tl.full([], 0.0, tl.float32)
    if SMOOTHED:
        uniform = token * smoothing / count
        exponential += uniform * weight
    if Z_LOSS:
        exponential += tl.where(wrong, 0.0, 2 * z_weight * lse)
    length = tl.where((token != 0) | (z_weight != 0), count, 0)
    _write(
        row, bias, class_weights, count, length, tl.where(known, place, -1), scale, softcap, factor, shift,
        exponential / s, target, uniform, HAS_BIAS, FORM, SMOOTHED, CLASS_WEIGHTS, BLOCK,
    )  # fmt: skip


@triton.jit
def scaled_copy(source, number, result, count, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    value = tl.load(source + places, mask=inside) * tl.load(number)
    tl.store(result + places, value.to(result.dtype.element_ty), mask=inside)
