"""Experts as the kernels compute them: expert_slots, expert_up, expert_down.

The same as `permute`, `grouped_linear`, an activation, `grouped_linear` and `unpermute`, cut where kernels are:

1. `expert_slots` sorts the slots (token, choice) by expert; order[r] is the slot of row r, position its inverse.
2. `expert_up` gathers each row's token, multiplies it by its expert's first matrix, adds the bias, and applies the
   activation to the product while it is at hand. It gives both: the product `pre`, and `act`.
3. `expert_down` multiplies the activated rows by the second matrix, and adds up the weighted rows of each token.

Backward reads `pre`, never `act` nor the rows before they are added up: act is made again from pre, and with t the
gradient of a token times the second matrix, t * act summed is the gradient of the row's router weight. So `expert_down`
takes both of them, the forward act, the backward pre, and the gradient flows through pre. A plan keeps pre, or has
`expert_up` run again.

Router weights act at one of three places: on the sum of a token's rows, on the activated rows (`act_weights` of
`expert_up`, `before` of `expert_down`), or on the tokens that are gathered (`token_weights` of `expert_up`).

Without an order, rows come and go as they are, for example from and to other ranks. Rows past offsets[-1] are padding:
they give zeros and get zero gradients. `activation` is a pointwise expression (`compiler/expression.py`) whose inputs
are the parts of a row of pre, one after the other or interleaved.

This file has the sort, `expert_up.py` and `expert_down.py` the two products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moec.compiler.dialect._define import define_op
from moec.compiler.dialect.experts import sorted_slots


def expert_slots(indices: Tensor, *, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots sorted by expert, stably: indices int [N,k] -> order int64 [N*k], position int64 [N*k], offsets int32 [E].

    Raises IndexError on CPU for an index out of range.
    """
    return torch.ops.moec.expert_slots(indices, experts)


def _slots(indices: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    order, offsets = sorted_slots(indices, experts, "expert_slots")
    position = torch.empty_like(order)
    position[order] = torch.arange(order.numel(), device=order.device)
    return order, position, offsets


def _slots_fake(indices: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    slots = indices.shape[0] * indices.shape[1]
    order = indices.new_empty(slots, dtype=torch.int64)
    return order, torch.empty_like(order), indices.new_empty(experts, dtype=torch.int32)


define_op(
    "expert_slots",
    "(Tensor indices, int experts) -> (Tensor order, Tensor position, Tensor offsets)",
    _slots,
    _slots_fake,
    shapes={"indices": "N K"},
    flops="0",
    recompute=False,
    summary="slots sorted by expert",
)
