"""Between a bucket's flat buffers and whole tensors (`compiler/layout.py`), on either side of a collective.

They stand in graphs that are differentiated already, so neither has a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moec.compiler.dialect._define import define_op
from moec.compiler.layout import ALIGNMENT, rows_per_rank


def unshard(gathered: Tensor, ranks: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A whole weight out of what an all-gather of a bucket yields.

    gathered uint8 [ranks * n]: the local buffers of all ranks. offset: bytes to the weight in each of them. Rank r's
    part holds rows [r * R, (r + 1) * R) with R = ceil(shape[0] / ranks), padded at the end. Result: shape, dtype.
    """
    size = _size(shape)
    end = offset + rows_per_rank(size, ranks) * math.prod(shape[1:]) * dtype.itemsize
    if gathered.dtype != torch.uint8 or gathered.dim() != 1 or gathered.shape[0] % (ranks * ALIGNMENT):
        raise ValueError(
            f"moec::unshard: gathered is {gathered.dtype} {tuple(gathered.shape)}, "
            f"expected uint8 [n] with n a multiple of {ALIGNMENT} bytes for each of {ranks} ranks"
        )
    if offset % ALIGNMENT or end > gathered.shape[0] // ranks:
        raise ValueError(
            f"moec::unshard: a weight {tuple(shape)} at byte {offset} ends at byte {end}, "
            f"each rank has {gathered.shape[0] // ranks}; offsets are multiples of {ALIGNMENT}"
        )
    return torch.ops.moec.unshard(gathered, ranks, offset, list(shape), dtype)


def pack_gradients(
    gradients: Sequence[Tensor], offsets: Sequence[int], numel: int, ranks: int, dtype: torch.dtype
) -> Tensor:
    """Whole gradients in the order that a reduce-scatter over the ranks takes.

    gradients: one or more, of any shapes. offsets: elements to each in the `numel` local gradients of a rank.
    Result: [ranks * numel] in dtype; part r holds rank r's rows of each gradient. Padding and gaps are zero.
    """
    if not gradients or len(gradients) != len(offsets):
        raise ValueError(f"moec::pack_gradients: {len(gradients)} gradients, {len(offsets)} offsets")
    end = 0
    for gradient, offset in zip(gradients, offsets, strict=True):
        start, end = end, offset + rows_per_rank(_size(gradient.shape), ranks) * math.prod(gradient.shape[1:])
        if offset < start or end > numel:
            raise ValueError(
                f"moec::pack_gradients: a gradient {tuple(gradient.shape)} at {offset} ends at {end}, "
                f"the one before it at {start}, a rank has {numel}"
            )
    return torch.ops.moec.pack_gradients(list(gradients), list(offsets), numel, ranks, dtype)


def _size(shape: Sequence[int]) -> int:
    return shape[0] if len(shape) else 1


def _unshard(gathered: Tensor, ranks: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    whole = torch.empty(shape, dtype=dtype, device=gathered.device)
    values = gathered.view(dtype).view(ranks, -1)
    width = rows_per_rank(_size(shape), ranks) * math.prod(shape[1:])
    start = offset // dtype.itemsize
    flat = whole.view(-1)
    full, rest = divmod(flat.numel(), width) if width else (0, 0)
    flat[: full * width].view(full, width).copy_(values[:full, start : start + width])
    if rest:
        flat[full * width :].copy_(values[full, start : start + rest])
    return whole


def _unshard_fake(gathered: Tensor, ranks: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return gathered.new_empty(shape, dtype=dtype)


def _pack_gradients(
    gradients: Sequence[Tensor], offsets: Sequence[int], numel: int, ranks: int, dtype: torch.dtype
) -> Tensor:
    device = gradients[0].device
    without_gaps = sum(gradient.numel() for gradient in gradients) == ranks * numel
    packed = (torch.empty if without_gaps else torch.zeros)(ranks, numel, dtype=dtype, device=device)
    for gradient, start in zip(gradients, offsets, strict=True):
        width = rows_per_rank(_size(gradient.shape), ranks) * math.prod(gradient.shape[1:])
        flat = gradient.reshape(-1)
        full, rest = divmod(flat.numel(), width) if width else (0, 0)
        packed[:full, start : start + width].copy_(flat[: full * width].view(full, width))
        if rest:
            packed[full, start : start + rest].copy_(flat[full * width :])
    return packed.view(-1)


def _pack_gradients_fake(
    gradients: Sequence[Tensor], offsets: Sequence[int], numel: int, ranks: int, dtype: torch.dtype
) -> Tensor:
    return gradients[0].new_empty(ranks * numel, dtype=dtype)


define_op(
    "unshard",
    "(Tensor gathered, int ranks, int offset, int[] shape, ScalarType dtype) -> Tensor weight",
    _unshard,
    _unshard_fake,
    shapes={"gathered": "G"},
    flops="0",
    summary="a whole weight out of a gathered bucket",
)

define_op(
    "pack_gradients",
    "(Tensor[] gradients, int[] offsets, int numel, int ranks, ScalarType dtype) -> Tensor packed",
    _pack_gradients,
    _pack_gradients_fake,
    shapes={},
    flops="0",
    summary="gradients in the order of a reduce-scatter",
)
