"""Kernels of a stable counting sort of slots by expert, with nothing read on the host.

1. `count_slots`: inside a block, the rank of each slot among those of its expert, and each expert's count.
2. `sum_blocks`: per expert, where each block's slots start among that expert's, and the expert's total.
3. `sum_experts`: the end of each expert's rows.
4. `place_slots`: the row of each slot, and the slot of each row.

A slot whose index names no expert belongs to one more group behind the others.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _experts_of(indices, slots, count, experts):
    chosen = tl.load(indices + slots, mask=slots < count, other=0).to(tl.int64)
    return tl.where((chosen >= 0) & (chosen < experts), chosen, experts)


@triton.jit
def count_slots(indices, ranks, counts, count, experts, blocks, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    slots = block.to(tl.int64) * BLOCK + lanes
    others = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    chosen = _experts_of(indices, slots, count, experts)
    same = chosen[:, None] == _experts_of(indices, others, count, experts)[None, :]
    same = same & (others < count)[None, :]
    before = same & (lanes[None, :] < lanes[:, None])
    inside = slots < count
    tl.store(ranks + slots, tl.sum(before.to(tl.int32), 1), mask=inside)
    tl.store(counts + chosen * blocks + block, tl.sum(same.to(tl.int32), 1), mask=inside)


@triton.jit
def sum_blocks(counts, totals, blocks, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    row = counts + expert.to(tl.int64) * blocks
    total = tl.zeros([], tl.int32)
    for first in range(0, blocks, BLOCK):
        places = first + tl.arange(0, BLOCK)
        found = tl.load(row + places, mask=places < blocks, other=0)
        tl.store(row + places, total + tl.cumsum(found, 0) - found, mask=places < blocks)
        total += tl.sum(found, 0)
    tl.store(totals + expert, total)


@triton.jit
def sum_experts(totals, offsets, experts, BLOCK: tl.constexpr):
    total = tl.zeros([], tl.int32)
    for first in range(0, experts, BLOCK):
        places = first + tl.arange(0, BLOCK)
        found = tl.load(totals + places, mask=places < experts, other=0)
        tl.store(offsets + places, total + tl.cumsum(found, 0), mask=places < experts)
        total += tl.sum(found, 0)


@triton.jit
def place_slots(indices, ranks, counts, offsets, order, position, count, experts, blocks, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    slots = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = slots < count
    chosen = _experts_of(indices, slots, count, experts)
    start = tl.load(offsets + chosen - 1, mask=inside & (chosen > 0), other=0).to(tl.int64)
    row = start + tl.load(counts + chosen * blocks + block, mask=inside, other=0)
    row += tl.load(ranks + slots, mask=inside, other=0)
    tl.store(position + slots, row, mask=inside)
    tl.store(order + row, slots, mask=inside)
