"""Rows of experts, as the references of `expert_up` and `expert_down` handle them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moec.compiler.expression import Expression


def gathered(x: Tensor, order: Tensor, choices: int) -> Tensor:
    """The token [N,D] of each row -> [R,D]."""
    return x.index_select(0, order.div(choices, rounding_mode="floor"))


def by_row(weights: Tensor, order: Tensor, dtype: torch.dtype) -> Tensor:
    """The router weight [N,k] of each row, [R,1]."""
    return weights.flatten().index_select(0, order).to(dtype).unsqueeze(1)


def parts_of(pre: Tensor, expression: Expression, interleaved: bool) -> Sequence[Tensor]:
    """The inputs of an activation, each [R,I], of rows [R,P*I]."""
    count = len(expression.inputs)
    return pre.unflatten(1, (-1, count)).unbind(2) if interleaved else pre.chunk(count, dim=1)


def joined(parts: Sequence[Tensor], interleaved: bool) -> Tensor:
    """The inverse of `parts_of`."""
    return torch.stack(list(parts), dim=2).flatten(1) if interleaved else torch.cat(list(parts), dim=1)


def without_padding(rows: Tensor, offsets: Tensor) -> Tensor:
    """Rows past the last group as zeros, in place; an activation of zeros need not be zero."""
    if rows.dim() == 1:
        return rows
    position = torch.arange(rows.shape[0], device=rows.device)
    return rows.masked_fill_((position >= offsets[-1]).unsqueeze(1), 0)
