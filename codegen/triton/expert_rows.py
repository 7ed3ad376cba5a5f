"""Kernels over the rows of tokens and experts, sums in float32 and in the order of the slots.

One program does one row of a token or of an expert:

1. `spread_rows`: a token's row, read once, to each of its places, weighted or not.
2. `combine_rows`: a token's rows, weighted or not, summed.
3. `combine_gradient_rows`: the gradients of that sum: rows, and weights.
4. `activate_rows`: an activation, of a saved pre-activation.
5. `activation_gradient_rows`: the gradient of the pre-activation and that of the router weight. With t the token's
   gradient times the down projection, act has the gradient p t, and p has t . act: the rows of the down projection are
   not needed. A bias of the down projection adds its product with the token's gradient to the latter.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def spread_rows(
    x, position, weights, rows, width, CHOICES: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < width
        value = tl.load(x + token * width + columns, mask=inside)
        for choice in range(CHOICES):
            slot = token * CHOICES + choice
            row = tl.load(position + slot).to(tl.int64)
            weighted = value
            if WEIGHTED:
                weighted = (value.to(tl.float32) * tl.load(weights + slot).to(tl.float32)).to(value.dtype)
            tl.store(rows + row * width + columns, weighted, mask=inside)


@triton.jit
def combine_rows(rows, position, weights, y, width, CHOICES: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < width
        total = tl.zeros([BLOCK], tl.float32)
        for choice in range(CHOICES):
            slot = token * CHOICES + choice
            row = tl.load(position + slot).to(tl.int64)
            value = tl.load(rows + row * width + columns, mask=inside, other=0.0).to(tl.float32)
            if WEIGHTED:
                value *= tl.load(weights + slot).to(tl.float32)
            total += value
        tl.store(y + token * width + columns, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def combine_gradient_rows(
    grad_y, rows, order, weights, grad_rows, grad_weights, width, choices, KEEP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(order + row)
    token = slot // choices
    weight = tl.load(weights + slot).to(tl.float32)
    products = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < width
        grad = tl.load(grad_y + token * width + columns, mask=inside, other=0.0).to(tl.float32)
        products += grad * tl.load(rows + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        if KEEP:
            tl.store(grad_rows + row * width + columns, (grad * weight).to(grad_rows.dtype.element_ty), mask=inside)
    tl.store(grad_weights + slot, tl.sum(products, 0).to(grad_weights.dtype.element_ty))


@triton.jit
def activate_rows(
    pre, order, weights, act, width, FORWARD: tl.constexpr, PARTS: tl.constexpr, INTERLEAVED: tl.constexpr,
    WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    weight = 1.0
    if WEIGHTED:
        weight = tl.load(weights + tl.load(order + row)).to(tl.float32)
    source = pre + row * PARTS * width
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < width
        if PARTS == 1:
            result = FORWARD(tl.load(source + columns, mask=inside, other=0.0).to(tl.float32))
        else:
            step: tl.constexpr = 2 if INTERLEAVED else 1
            other = 1 if INTERLEAVED else width
            gate = tl.load(source + columns * step, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(source + columns * step + other, mask=inside, other=0.0).to(tl.float32)
            result = FORWARD(gate, up)
        if WEIGHTED:
            result *= weight
        tl.store(act + row * width + columns, result.to(act.dtype.element_ty), mask=inside)


@triton.jit
def activation_gradient_rows(
    grad, pre, order, weights, experts_of, grad_rows, bias, grad_pre, act, grad_weights, width, bias_width,
    BACKWARD: tl.constexpr, PARTS: tl.constexpr, INTERLEAVED: tl.constexpr, WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grad: t; act, the weighted activation, may be the same memory."""
    row = tl.program_id(0).to(tl.int64)
    weight = 1.0
    if WEIGHTED:
        slot = tl.load(order + row)
        weight = tl.load(weights + slot).to(tl.float32)
    source, target = pre + row * PARTS * width, grad_pre + row * PARTS * width
    step: tl.constexpr = 2 if INTERLEAVED else 1
    other = 1 if INTERLEAVED else width
    products = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < width
        slope = tl.load(grad + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        one = tl.load(source + columns * step, mask=inside, other=0.0).to(tl.float32)
        if PARTS == 1:
            result, grad_one = BACKWARD(one, slope * weight)
        else:
            two = tl.load(source + columns * step + other, mask=inside, other=0.0).to(tl.float32)
            result, grad_one, grad_two = BACKWARD(one, two, slope * weight)
            tl.store(target + columns * step + other, grad_two.to(grad_pre.dtype.element_ty), mask=inside)
        tl.store(target + columns * step, grad_one.to(grad_pre.dtype.element_ty), mask=inside)
        result = tl.where(inside, result, 0.0).to(act.dtype.element_ty).to(tl.float32)
        products += slope * result
        if KEEP:
            tl.store(act + row * width + columns, (result * weight).to(act.dtype.element_ty), mask=inside)
    if WEIGHTED:
        total = tl.sum(products, 0)
        if BIASED:
            expert = tl.load(experts_of + row).to(tl.int64)
            products = tl.zeros([BLOCK], tl.float32)
            for first in range(0, bias_width, BLOCK):
                columns = first + tl.arange(0, BLOCK)
                inside = columns < bias_width
                slope = tl.load(grad_rows + row * bias_width + columns, mask=inside, other=0.0).to(tl.float32)
                products += slope * tl.load(bias + expert * bias_width + columns, mask=inside, other=0.0).to(tl.float32)
            total += tl.sum(products, 0)
        tl.store(grad_weights + slot, total.to(grad_weights.dtype.element_ty))
