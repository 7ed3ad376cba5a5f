"""Rows to the ranks that hold their experts, and back: exchange_counts, local_offsets, exchange, exchange_back.

Expert e lives on rank e // ceil(E / ranks) of the ranks that share the experts, at one of L places in the order of the
experts (`expert_places` of compiler/layout.py); where E does not divide, some places belong to nobody and have no rows.
`parts` is the number of ranks that each rank's experts are sharded over. `counts` int64 [2, ranks, L] is known to both
sides of an exchange and taken once per layer and microbatch: counts[0, r, e] rows go to rank r for its place e,
counts[1, r, e] rows come from rank r for place e of this one.

1. `exchange_counts`: one even All-to-All of the rows per expert.
2. `exchange`: the rows of `permute`, sorted by expert, go to their ranks (uneven All-to-All). The host reads the sizes,
   for which it waits for the device, once for all exchanges with the same counts. What arrives is sorted by local
   expert, then by source rank, then by their order there. How many arrive is data.
3. `exchange_back` undoes it. The gradient of each of the two is the other one.

The `_padded` forms have fixed shapes and no read by the host: each expert takes at most `capacity` rows from each rank,
in their order; rows beyond that are left out, come back as zeros and get zero gradients, and `overflow` counts them.
What arrives has room for capacity * ranks * L rows; those past local_offsets[-1] are zeros. Any count may be zero.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from moec.compiler.collectives import register_composite
from moec.compiler.dialect._define import define_op
from moec.compiler.dialect.registry import expect_size
from moec.compiler.layout import places_per_rank, rows_per_rank

_SOURCE = "GShard, arXiv 2006.16668 (dispatch and combine, capacity)"


def exchange_counts(offsets: Tensor, *, ranks: int, local_experts: int, role: str, parts: int = 1) -> Tensor:
    """Rows per rank and expert, sent and received: offsets int32 [E] of `permute` -> int64 [2, ranks, local_experts].

    role: name of the process group of the ranks that share the experts.
    """
    return torch.ops.moec.exchange_counts(offsets, ranks, local_experts, role, parts)


def local_offsets(counts: Tensor, *, capacity: int = 0) -> Tensor:
    """Ends of the rows of each local expert, int32 [L]; with a capacity of what the padded exchange delivers."""
    return torch.ops.moec.local_offsets(counts, capacity)


def exchange(rows: Tensor, counts: Tensor, *, role: str) -> Tensor:
    """Rows [R,D] sorted by expert -> rows [R',D] of the local experts, R' = counts[1].sum()."""
    return torch.ops.moec.exchange(rows, counts, role)


def exchange_back(rows: Tensor, counts: Tensor, count: int, *, role: str) -> Tensor:
    """Rows [R',D] as `exchange` gave them -> rows [count,D] in the order in which their owner sent them."""
    return torch.ops.moec.exchange_back(rows, counts, count, role)


def exchange_padded(rows: Tensor, counts: Tensor, *, capacity: int, role: str) -> Tensor:
    """Rows [R,D] sorted by expert -> [capacity*ranks*L, D], zeros past local_offsets(counts, capacity)[-1]."""
    return torch.ops.moec.exchange_padded(rows, counts, capacity, role)


def exchange_padded_back(rows: Tensor, counts: Tensor, count: int, *, capacity: int, role: str) -> Tensor:
    """Rows as `exchange_padded` gave them -> rows [count,D] in the order of their owner, zeros for those left out."""
    return torch.ops.moec.exchange_padded_back(rows, counts, count, capacity, role)


def overflow(counts: Tensor, *, experts: int, capacity: int, parts: int = 1) -> Tensor:
    """Rows of this rank beyond the capacity, per expert: int64 [experts]."""
    return torch.ops.moec.overflow(counts, experts, capacity, parts)


# counts


def _exchange_counts(offsets: Tensor, ranks: int, local_experts: int, role: str, parts: int = 1) -> Tensor:
    rows = offsets.long().diff(prepend=offsets.new_zeros(1, dtype=torch.int64))
    places = _places_of(rows.shape[0], ranks, local_experts, parts, rows.device)
    sent = rows.new_zeros(ranks * local_experts).index_copy_(0, places, rows).view(ranks, local_experts)
    return torch.stack((sent, _all_to_all(sent, [1] * ranks, [1] * ranks, role)))


def _exchange_counts_fake(offsets: Tensor, ranks: int, local_experts: int, role: str, parts: int) -> Tensor:
    if local_experts != places_per_rank(offsets.shape[0], ranks, parts):
        raise ValueError(f"moec::exchange_counts: {offsets.shape[0]} experts are not {local_experts} on {ranks} ranks")
    return offsets.new_empty(2, ranks, local_experts, dtype=torch.int64)


def _local_offsets(counts: Tensor, capacity: int) -> Tensor:
    return _delivered(counts[1], capacity).sum(0).cumsum(0).to(torch.int32)


def _local_offsets_fake(counts: Tensor, capacity: int) -> Tensor:
    return counts.new_empty(counts.shape[2], dtype=torch.int32)


def _overflow(counts: Tensor, experts: int, capacity: int, parts: int = 1) -> Tensor:
    _, ranks, local = counts.shape
    places = _places_of(experts, ranks, local, parts, counts.device)
    return (counts[0].flatten().index_select(0, places) - capacity).clamp_min(0)


def _overflow_fake(counts: Tensor, experts: int, capacity: int, parts: int) -> Tensor:
    return counts.new_empty(experts)


def _places_of(experts: int, ranks: int, local: int, parts: int, device: torch.device) -> Tensor:
    """`rank * local + place` of every expert, int64 [experts]: `expert_places`, without a copy from the host."""
    share = rows_per_rank(experts, ranks)
    expert = torch.arange(experts, device=device)
    rank, index = expert // share, expert % share
    each = ((experts - rank * share).clamp_max(share) + parts - 1) // parts
    return rank * local + index // each * rows_per_rank(share, parts) + index % each


def _delivered(rows: Tensor, capacity: int) -> Tensor:
    """How many of each expert's rows travel."""
    return rows.clamp_max(capacity) if capacity else rows


# exchange, exchange_back


def _exchange(rows: Tensor, counts: Tensor, role: str, size: int | None = None) -> Tensor:
    sent, received = _rows_per_rank(counts)
    _check_rows("exchange", rows, sum(sent))
    arrived = _all_to_all(rows, received, sent, role)
    return arrived.index_select(0, _regrouping(counts[1], arrived.shape[0]))


def _exchange_fake(rows: Tensor, counts: Tensor, role: str, size: int | None) -> Tensor:
    if size is not None:
        return rows.new_empty(size, rows.shape[1])
    arriving = torch.library.get_ctx().new_dynamic_size()
    expect_size(arriving, rows.shape[0])
    return rows.new_empty(arriving, rows.shape[1])


def _exchange_back(rows: Tensor, counts: Tensor, count: int, role: str) -> Tensor:
    sent, received = _rows_per_rank(counts)
    _check_rows("exchange_back", rows, sum(received))
    by_source = rows.index_select(0, _regrouping(counts[1].t(), rows.shape[0]))
    return _all_to_all(by_source, sent, received, role)


def _exchange_back_fake(rows: Tensor, counts: Tensor, count: int, role: str) -> Tensor:
    return rows.new_empty(count, rows.shape[1])


_READ: MutableMapping[Tensor, tuple[int, list[list[int]]]] = WeakTensorKeyDictionary()
"""Counts that are alive -> their version when the host has read them, and the rows to and from each rank."""


def _rows_per_rank(counts: Tensor) -> list[list[int]]:
    """Rows to each rank, and rows from each."""
    found = _READ.get(counts)
    if found is None or found[0] != counts._version:
        found = _READ[counts] = counts._version, counts.sum(2).tolist()
    return found[1]


def _regrouping(lengths: Tensor, total: int) -> Tensor:
    """Where in rows grouped by (a, b), `lengths` [A,B] of each, those grouped by (b, a) lie: int64 [total]."""
    starts = _starts(lengths)
    ordered = lengths.t()
    shift = (starts.t() - _starts(ordered)).flatten()
    position = torch.arange(total, device=lengths.device)
    return position + shift.repeat_interleave(ordered.flatten(), output_size=total)


def _starts(lengths: Tensor) -> Tensor:
    """The number of rows before each group, groups in row-major order; same shape."""
    flat = lengths.flatten()
    return (flat.cumsum(0) - flat).view(lengths.shape)


def _check_rows(op: str, rows: Tensor, wanted: int) -> None:
    if rows.shape[0] != wanted:
        raise ValueError(f"moec::{op}: {rows.shape[0]} rows, the counts say {wanted}")


# exchange_padded, exchange_padded_back


def _exchange_padded(rows: Tensor, counts: Tensor, capacity: int, role: str) -> Tensor:
    _, ranks, local = counts.shape
    place = torch.arange(capacity, device=rows.device)
    index = (_starts(counts[0]).unsqueeze(2) + place).flatten()
    filled = (place < counts[0].unsqueeze(2)).flatten()
    arrived = _all_to_all(_taken(rows, index, filled), [local * capacity] * ranks, [local * capacity] * ranks, role)
    member, place, filled = _places(_delivered(counts[1], capacity).t(), arrived.shape[0])
    expert, source = member // ranks, member % ranks
    return _taken(arrived, (source * local + expert) * capacity + place, filled)


def _exchange_padded_fake(rows: Tensor, counts: Tensor, capacity: int, role: str) -> Tensor:
    return rows.new_empty(counts.shape[1] * counts.shape[2] * capacity, rows.shape[1])


def _exchange_padded_back(rows: Tensor, counts: Tensor, count: int, capacity: int, role: str) -> Tensor:
    _, ranks, local = counts.shape
    delivered = _delivered(counts[1], capacity)
    place = torch.arange(capacity, device=rows.device)
    index = (_starts(delivered.t()).t().unsqueeze(2) + place).flatten()
    filled = (place < delivered.unsqueeze(2)).flatten()
    arrived = _all_to_all(_taken(rows, index, filled), [local * capacity] * ranks, [local * capacity] * ranks, role)
    expert, place, _ = _places(counts[0], count)
    return _taken(arrived, expert * capacity + place, place < capacity)


def _exchange_padded_back_fake(rows: Tensor, counts: Tensor, count: int, capacity: int, role: str) -> Tensor:
    return rows.new_empty(count, rows.shape[1])


def _places(lengths: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """For `total` rows in groups of the given lengths, then none: group, place in it, and whether there is a row."""
    flat = lengths.flatten()
    ends = flat.cumsum(0)
    position = torch.arange(total, device=lengths.device)
    group = torch.searchsorted(ends, position, right=True)
    filled = group < flat.numel()
    group = group.clamp_max(flat.numel() - 1)
    return group, position - (ends - flat).index_select(0, group), filled


def _taken(rows: Tensor, index: Tensor, filled: Tensor) -> Tensor:
    """rows[index] where `filled`, zeros elsewhere."""
    if rows.shape[0] == 0:
        return rows.new_zeros(index.shape[0], rows.shape[1])
    safe = index.where(filled, 0)
    return rows.index_select(0, safe).masked_fill_(~filled.unsqueeze(1), 0)


# autograd and registration


def _all_to_all(rows: Tensor, received: list[int], sent: list[int], role: str) -> Tensor:
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_to_all_single(rows.contiguous(), received, sent, role))  # type: ignore[no-any-return]


# Each exchange is the gradient of the other one, so they take no `_backward` ops of their own.


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.size, ctx.options = inputs[0].shape[0], inputs[2:]


def _exchange_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    role, _ = ctx.options
    return torch.ops.moec.exchange_back(grad, *ctx.saved_tensors, ctx.size, role), None, None, None


def _exchange_back_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    _, role = ctx.options
    return torch.ops.moec.exchange(grad, *ctx.saved_tensors, role, ctx.size), None, None, None


def _exchange_padded_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.moec.exchange_padded_back(grad, *ctx.saved_tensors, ctx.size, *ctx.options), None, None, None


def _exchange_padded_back_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    _, capacity, role = ctx.options
    return torch.ops.moec.exchange_padded(grad, *ctx.saved_tensors, capacity, role), None, None, None, None


_COUNTS = define_op(
    "exchange_counts",
    "(Tensor offsets, int ranks, int local_experts, str role, int parts=1) -> Tensor counts",
    _exchange_counts,
    _exchange_counts_fake,
    shapes={"offsets": "E"},
    flops="0",
    recompute=False,
    source=_SOURCE,
    summary="rows per expert, sent to and received from each rank",
)

define_op(
    "local_offsets",
    "(Tensor counts, int capacity) -> Tensor local_offsets",
    _local_offsets,
    _local_offsets_fake,
    shapes={"counts": "_ _ _"},
    flops="0",
    recompute=False,
    summary="ends of the rows of the experts of this rank",
)

define_op(
    "overflow",
    "(Tensor counts, int experts, int capacity, int parts=1) -> Tensor overflow",
    _overflow,
    _overflow_fake,
    shapes={"counts": "_ _ _"},
    flops="0",
    recompute=False,
    summary="rows beyond the capacity of their expert",
)

_THERE = define_op(
    "exchange",
    "(Tensor rows, Tensor counts, str role, SymInt? size=None) -> Tensor received",
    _exchange,
    _exchange_fake,
    shapes={"rows": "R D"},
    flops="0",
    recompute=False,
    source=_SOURCE,
    summary="rows to the ranks of their experts; its gradient is `exchange_back`",
)

_BACK = define_op(
    "exchange_back",
    "(Tensor rows, Tensor counts, SymInt count, str role) -> Tensor returned",
    _exchange_back,
    _exchange_back_fake,
    shapes={"rows": "R D"},
    flops="0",
    recompute=False,
    source=_SOURCE,
    summary="rows back to the ranks of their tokens; its gradient is `exchange`",
)

_PADDED = define_op(
    "exchange_padded",
    "(Tensor rows, Tensor counts, int capacity, str role) -> Tensor received",
    _exchange_padded,
    _exchange_padded_fake,
    shapes={"rows": "R D"},
    flops="0",
    recompute=False,
    source=_SOURCE,
    summary="at most `capacity` rows per rank and expert to the ranks of their experts, fixed shapes",
)

_PADDED_BACK = define_op(
    "exchange_padded_back",
    "(Tensor rows, Tensor counts, SymInt count, int capacity, str role) -> Tensor returned",
    _exchange_padded_back,
    _exchange_padded_back_fake,
    shapes={"rows": "R D"},
    flops="0",
    recompute=False,
    source=_SOURCE,
    summary="rows back to the ranks of their tokens, zeros for those left out",
)

register_composite(_COUNTS.op, _exchange_counts)
for _definition, _implementation, _gradient in (
    (_THERE, _exchange, _exchange_gradient),
    (_BACK, _exchange_back, _exchange_back_gradient),
    (_PADDED, _exchange_padded, _exchange_padded_gradient),
    (_PADDED_BACK, _exchange_padded_back, _exchange_padded_back_gradient),
):
    register_composite(_definition.op, _implementation)
    torch.library.register_autograd(_definition.op, _gradient, setup_context=_setup)
