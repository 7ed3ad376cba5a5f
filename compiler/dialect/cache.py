"""A value to host memory and back: `offload` in forward, `fetch` in backward.

Graphs hold these ops, with a plain copy as their meaning. An emitted program calls the host cache of its state in their
place (`runtime/host_cache.py`), which copies beside the compute and reuses a fixed pool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moec.compiler.dialect._define import define_op


def offload(x: Tensor) -> Tensor:
    """A copy of x, of any shape and dtype, in host memory."""
    return torch.ops.moec.offload(x)


def fetch(parked: Tensor, device: torch.device) -> Tensor:
    """The value of an `offload` back on a device."""
    return torch.ops.moec.fetch(parked, device)


def _offload(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu").copy_(x)


def _offload_fake(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu")


def _fetch(parked: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(parked, device=device).copy_(parked)


def _fetch_fake(parked: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(parked, device=device)


define_op(
    "offload",
    "(Tensor x) -> Tensor parked",
    _offload,
    _offload_fake,
    shapes={},
    flops="0",
    recompute=False,
    summary="a value to host memory",
)

define_op(
    "fetch",
    "(Tensor parked, Device device) -> Tensor x",
    _fetch,
    _fetch_fake,
    shapes={},
    flops="0",
    recompute=False,
    summary="a value from host memory",
)
