"""Kernels over the rows of tokens and experts, one program a row, sums in float32 and in the order of the slots.

1. `spread_rows`: a token's row, read once, to each of its rows; `gather_rows`: the same from the other side.
2. `combine_rows`: a token's rows, weighted or not, summed.
3. `scatter_gradient`: the gradient of a weighted sum: rows, and weights.
4. `sum_parts`: a weight's gradient from its parts, one for each tile of columns.
5. `activate_rows`: an activation alone, of a saved pre-activation.
6. `activation_gradient_rows`: its gradient, and that of the router weight.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gather_rows(x, order, rows, width, choices, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(order + row) // choices
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < width
        tl.store(rows + row * width + columns, tl.load(x + token * width + columns, mask=inside), mask=inside)


@triton.jit
def spread_rows(x, position, rows, width, CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < width
        value = tl.load(x + token * width + columns, mask=inside)
        for choice in range(CHOICES):
            row = tl.load(position + token * CHOICES + choice).to(tl.int64)
            tl.store(rows + row * width + columns, value, mask=inside)


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
def scatter_gradient(grad_y, rows, order, weights, grad_rows, grad_weights, width, choices, BLOCK: tl.constexpr):
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
        tl.store(grad_rows + row * width + columns, (grad * weight).to(grad_rows.dtype.element_ty), mask=inside)
    tl.store(grad_weights + slot, tl.sum(products, 0).to(grad_weights.dtype.element_ty))


@triton.jit
def sum_parts(
    parts, position, grad_y, bias, experts_of, grad_weights, count, part_count, width, choices,
    BIASED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Biased: the bias of the down projection has its share, the token's gradient times the expert's bias."""
    slot = tl.program_id(0).to(tl.int64)
    row = tl.load(position + slot).to(tl.int64)
    places = tl.arange(0, PARTS)
    total = tl.sum(tl.load(parts + row * part_count + places, mask=places < part_count, other=0.0), 0)
    if BIASED:
        expert = tl.load(experts_of + row).to(tl.int64)
        products = tl.zeros([BLOCK], tl.float32)
        for first in range(0, width, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            inside = columns < width
            grad = tl.load(grad_y + slot // choices * width + columns, mask=inside, other=0.0).to(tl.float32)
            products += grad * tl.load(bias + expert * width + columns, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(products, 0)
    tl.store(grad_weights + slot, total.to(grad_weights.dtype.element_ty))


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
    grad, pre, order, weights, experts_of, grad_y, bias, grad_pre, act, grad_weights, width, bias_width, choices,
    BACKWARD: tl.constexpr, PARTS: tl.constexpr, INTERLEAVED: tl.constexpr, WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grad: of the unweighted activation; act may be the same memory."""
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
                slope = tl.load(grad_y + slot // choices * bias_width + columns, mask=inside, other=0.0).to(tl.float32)
                products += slope * tl.load(bias + expert * bias_width + columns, mask=inside, other=0.0).to(tl.float32)
            total += tl.sum(products, 0)
        tl.store(grad_weights + slot, total.to(grad_weights.dtype.element_ty))
