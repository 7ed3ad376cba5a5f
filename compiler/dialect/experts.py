"""Tokens to experts and back: permute, grouped_linear, unpermute.

A slot is one (token, choice) pair, numbered token*k + choice. `permute` sorts the slots by expert, stably, so that each
expert's rows are contiguous and in token order; order[r] is the slot of row r, offsets[e] the end of expert e's rows.
`grouped_linear` multiplies each expert's rows by its own matrix. `unpermute` is the weighted sum of a token's k rows.
Any expert may have no rows. Rows past offsets[-1] (padding of an exchange) give zeros and get zero gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moec.compiler.dialect._define import asked_for, define_op, math_dtype


def permute(x: Tensor, indices: Tensor, *, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the tokens x [N,D] by chosen expert, indices int [N,k] in [0, experts).

    Returns rows [N*k,D], order int64 [N*k], offsets int32 [experts] (inclusive cumulative counts).
    Raises IndexError on CPU for an index out of range; on CUDA such a slot has no expert, and the row it sorts to is
    outside every group or in a wrong one.
    """
    return torch.ops.moec.permute(x, indices, experts)


def grouped_linear(
    x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None = None, *, transposed: bool = False
) -> Tensor:
    """y[r] = weight[e] x[r] + bias[e] for the rows of each expert e: x [R,I], weight [E,O,I] -> y [R,O] in x's dtype.

    offsets: int32 [E], end of each expert's rows. bias: [E,O]. transposed: weight is [E,I,O] and y[r] = x[r] weight[e].
    """
    return torch.ops.moec.grouped_linear(x, weight, offsets, bias, transposed)


def unpermute(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """y[n] = sum_j weights[n,j] * (row of slot n*k+j): rows [N*k,D], order int64 [N*k], weights [N,k] -> y [N,D].

    Products and sum are in float32, in the order of the slots, rounded once to the dtype of rows.
    """
    return torch.ops.moec.unpermute(rows, order, weights)


# permute


def _permute(x: Tensor, indices: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    order, offsets = sorted_slots(indices, experts, "permute")
    rows = x.index_select(0, order.div(indices.shape[1], rounding_mode="floor"))
    return rows, order, offsets


def sorted_slots(indices: Tensor, experts: int, op: str) -> tuple[Tensor, Tensor]:
    """The order and the offsets of `permute`; `op` is what an error names."""
    choices = indices.flatten()
    if choices.device.type == "cpu" and choices.numel():
        low, high = (int(end) for end in choices.aminmax())
        if low < 0 or high >= experts:
            raise IndexError(f"moec::{op}: expert index {low if low < 0 else high} is outside [0, {experts})")
    ordered, order = choices.sort(stable=True)
    ends = torch.arange(experts, device=choices.device, dtype=choices.dtype)
    return order, torch.searchsorted(ordered, ends, right=True, out_int32=True)


def _permute_backward(grad_rows: Tensor, indices: Tensor, order: Tensor) -> Tensor:
    tokens, choices = indices.shape
    total = grad_rows.new_zeros(tokens, grad_rows.shape[1], dtype=math_dtype(grad_rows.dtype))
    for rows in _rows_by_choice(order, choices):
        total += grad_rows.index_select(0, rows)
    return total.to(grad_rows.dtype)


def _permute_fake(x: Tensor, indices: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    slots = indices.shape[0] * indices.shape[1]
    return (
        x.new_empty(slots, x.shape[1]),
        x.new_empty(slots, dtype=torch.int64),
        x.new_empty(experts, dtype=torch.int32),
    )


def _permute_backward_fake(grad_rows: Tensor, indices: Tensor, order: Tensor) -> Tensor:
    return grad_rows.new_empty(indices.shape[0], grad_rows.shape[1])


# unpermute


def _unpermute(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    tokens, choices = weights.shape
    total = rows.new_zeros(tokens, rows.shape[1], dtype=math_dtype(rows.dtype))
    scales = weights.to(total.dtype)
    for choice, chosen in enumerate(_rows_by_choice(order, choices)):
        total.addcmul_(rows.index_select(0, chosen), scales[:, choice : choice + 1])
    return total.to(rows.dtype)


def _unpermute_backward(grad_y: Tensor, rows: Tensor, order: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    dtype = math_dtype(rows.dtype)
    token = order.div(weights.shape[1], rounding_mode="floor")
    grads = grad_y.index_select(0, token).to(dtype)
    grad_weights = torch.empty(weights.numel(), dtype=weights.dtype, device=weights.device)
    grad_weights[order] = (grads * rows).sum(-1).to(weights.dtype)
    grad_rows = grads.mul_(weights.flatten().index_select(0, order).to(dtype).unsqueeze(1)).to(rows.dtype)
    return grad_rows, grad_weights.view(weights.shape)


def _unpermute_fake(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    return rows.new_empty(weights.shape[0], rows.shape[1])


def _unpermute_backward_fake(grad_y: Tensor, rows: Tensor, order: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


def _rows_by_choice(order: Tensor, choices: int) -> Iterator[Tensor]:
    """For each choice j the rows [N] that hold slot n*k + j."""
    position = torch.empty_like(order)
    position[order] = torch.arange(order.numel(), device=order.device)
    return (position[choice::choices] for choice in range(choices))


# grouped_linear


def _grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    matrices = weight if transposed else weight.transpose(1, 2)
    x = x.contiguous()
    if _fits_grouped_mm(x, weight):
        y = F.grouped_mm(x, matrices, offs=offsets)
        member = membership(offsets, x.shape[0])
        if bias is not None:
            y += bias.index_select(0, member.clamp_max(bias.shape[0] - 1))
        return y.masked_fill_((member == offsets.shape[0]).unsqueeze(1), 0)
    y = x.new_empty(x.shape[0], matrices.shape[2])
    end = 0
    for expert, start, end in _groups(offsets):
        if bias is None:
            torch.mm(x[start:end], matrices[expert], out=y[start:end])
        else:
            torch.addmm(bias[expert], x[start:end], matrices[expert], out=y[start:end])
    y[end:].zero_()
    return y


def _grouped_linear_backward(
    grad_y: Tensor,
    x: Tensor | None,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    transposed: bool,
    needed: Sequence[bool] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_y = grad_y.contiguous()
    of_x, of_weight, of_bias = asked_for(needed, 3)
    matrices = weight.transpose(1, 2) if transposed else weight
    rows = grad_y if x is None else x.contiguous()  # x is there when the gradient of the weight is asked for
    left, right = (rows, grad_y) if transposed else (grad_y, rows)
    grad_x, grad_weight, grad_bias = _grouped_linear_backward_fake(grad_y, x, weight, offsets, bias, transposed, needed)
    if _fits_grouped_mm(grad_y, weight):
        member = membership(offsets, grad_y.shape[0])
        if of_x:
            grad_x = F.grouped_mm(grad_y, matrices, offs=offsets)
            grad_x.masked_fill_((member == offsets.shape[0]).unsqueeze(1), 0)
        if of_weight:
            grad_weight = F.grouped_mm(left.t(), right, offs=offsets)
        if of_bias and bias is not None:
            grad_bias = _sum_by_expert(grad_y, member, bias)
        return grad_x, grad_weight, grad_bias
    grad_bias.zero_()
    last = end = 0
    for expert, start, end in _groups(offsets):
        if of_x:
            torch.mm(grad_y[start:end], matrices[expert], out=grad_x[start:end])
        if of_weight:
            torch.mm(left[start:end].t(), right[start:end], out=grad_weight[expert])
            grad_weight[last:expert].zero_()
        if of_bias and bias is not None:
            torch.sum(grad_y[start:end], 0, out=grad_bias[expert])
        last = expert + 1
    grad_weight[last:].zero_()
    grad_x[end:].zero_()
    return grad_x, grad_weight, grad_bias


def _grouped_linear_fake(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2] if transposed else weight.shape[1])


def _grouped_linear_backward_fake(
    grad_y: Tensor,
    x: Tensor | None,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    transposed: bool,
    needed: Sequence[bool] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    of_x, of_weight, of_bias = asked_for(needed, 3)
    width = weight.shape[1] if transposed else weight.shape[2]
    return (
        grad_y.new_empty((grad_y.shape[0], width) if of_x else 0),
        torch.empty(weight.shape if of_weight else 0, dtype=weight.dtype, device=weight.device),
        grad_y.new_empty(0) if bias is None else bias.new_empty(bias.shape if of_bias else 0),
    )


def _groups(offsets: Tensor) -> Iterator[tuple[int, int, int]]:
    """(expert, first row, end row) of the experts that have rows. On CUDA this waits for the device."""
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            yield expert, start, end
            start = end


def _fits_grouped_mm(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped matmul takes these operands: bfloat16 on CUDA, every row a multiple of 16 bytes."""
    aligned = weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0 and weight.is_contiguous()
    bfloat16 = x.dtype == weight.dtype == torch.bfloat16
    return x.device.type == "cuda" and bfloat16 and aligned and x.shape[0] > 0


def membership(offsets: Tensor, rows: int) -> Tensor:
    """The expert of each row, int32 [rows]; rows past the last group get the number of experts."""
    position = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, position, right=True, out_int32=True)


def _sum_by_expert(grad_y: Tensor, member: Tensor, bias: Tensor) -> Tensor:
    """Sums of each expert's rows in float32, as a matmul with the membership matrix: the same order in every run."""
    belongs = member == torch.arange(bias.shape[0], device=member.device).unsqueeze(1)
    return torch.mm(belongs.to(grad_y.dtype), grad_y, out_dtype=torch.float32).to(bias.dtype)


define_op(
    "permute",
    "(Tensor x, Tensor indices, int experts) -> (Tensor rows, Tensor order, Tensor offsets)",
    _permute,
    _permute_fake,
    backward_schema="(Tensor grad_rows, Tensor indices, Tensor order) -> Tensor grad_x",
    backward=_permute_backward,
    backward_fake=_permute_backward_fake,
    shapes={"x": "N D", "indices": "N K"},
    flops="0",
    backward_flops="N*K*D",
    recompute=False,
    summary="tokens sorted by expert",
)

define_op(
    "grouped_linear",
    "(Tensor x, Tensor weight, Tensor offsets, Tensor? bias, bool transposed) -> Tensor y",
    _grouped_linear,
    _grouped_linear_fake,
    backward_schema="(Tensor grad_y, Tensor? x, Tensor weight, Tensor offsets, Tensor? bias, bool transposed,"
    " bool[]? needed=None) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
    only_for={"x": ["weight"]},
    backward=_grouped_linear_backward,
    backward_fake=_grouped_linear_backward_fake,
    # O and I are told apart by the flag, but their product is the same either way.
    shapes={"x": "R _", "weight": "E O I", "offsets": "E"},
    flops="2*R*O*I",
    backward_flops="2*R*O*I*(need_x + need_weight)",
    summary="one matrix per expert on that expert's rows",
)

define_op(
    "unpermute",
    "(Tensor rows, Tensor order, Tensor weights) -> Tensor y",
    _unpermute,
    _unpermute_fake,
    backward_schema="(Tensor grad_y, Tensor rows, Tensor order, Tensor weights)"
    " -> (Tensor grad_rows, Tensor grad_weights)",
    backward=_unpermute_backward,
    backward_fake=_unpermute_backward_fake,
    shapes={"rows": "R D", "order": "R", "weights": "N K"},
    flops="2*R*D",
    backward_flops="3*R*D",
    summary="weighted sum of each token's expert rows",
)
