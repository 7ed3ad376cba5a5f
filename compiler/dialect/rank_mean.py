"""rank_mean: the mean of a small value over all ranks, for statistics of a batch that is spread over them.

Without gradient: what is averaged are counts. Every rank gets the same bits, since one all-reduce gives them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moec.compiler.collectives import register_composite
from moec.compiler.dialect._define import define_op


def rank_mean(x: Tensor, *, ranks: int) -> Tensor:
    """The mean of x (any shape, floating point) over the `ranks` ranks of a step; x must not require a gradient."""
    if x.requires_grad:
        raise ValueError("moec::rank_mean has no gradient, and its argument requires one")
    return torch.ops.moec.rank_mean(x, ranks, "control")


def _rank_mean(x: Tensor, ranks: int, role: str) -> Tensor:
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", role)) / ranks  # type: ignore[no-any-return]


def _rank_mean_fake(x: Tensor, ranks: int, role: str) -> Tensor:
    return x.new_empty(x.shape)


register_composite(
    define_op(
        "rank_mean",
        "(Tensor x, int ranks, str role) -> Tensor mean",
        _rank_mean,
        _rank_mean_fake,
        shapes={"x": "..."},
        flops="N",
        recompute=False,
        source="global-batch load balancing, arXiv 2501.11873",
        summary="mean of counts over all ranks",
    ).op,
    _rank_mean,
)
