"""Values that wait in host memory between forward and backward, as an emitted program moves them.

    host_up = cache.offload(up)      forward: the copy out starts; the device memory stays until `release`
    cache.release(saved[layer])      a layer or so later: the compute waits for these copies, the memory is free
    cache.prefetch(saved[layer])     backward, a layer or so earlier: the copies back start, into new memory
    up = cache.fetch(host_up)        the compute waits for the copy back; the block of the pool is free again

1. Values have the same bits, and where they are dense the same strides, when they come back. Of an expanded tensor only
   what differs is moved.
2. The pool has a fixed size and is reused. A value that finds no room stays on the device: the numbers are the same,
   and a warning says how much stayed.
3. Nothing is freed or reused before the copies that use it: a value that is dropped on the way is waited for.
4. Microbatches in flight at the same time have values of their own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moec.runtime.copy_lanes import Event, lane
from moec.runtime.host_pool import Block, HostPool


@dataclass(eq=False)
class Parked:
    """One value on its way. base: what differs of it, on the device until `release`; size: with what is expanded.

    shape, stride, dtype: of the copies.
    """

    cache: HostCache
    size: torch.Size
    base: Tensor | None
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    block: Block | None = None
    out: Event | None = None
    back: Tensor | None = None
    returned: Event | None = None

    def __del__(self) -> None:
        self.cache._forget(self)


class HostCache:
    """The host memory of one state. capacity: bytes of its pool."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        self.pool = HostPool(capacity, pin=device.type == "cuda")
        self.kept_bytes = 0
        self._device = device
        self._out, self._in = lane(device), lane(device)
        self._warned = False

    def offload(self, value: Tensor) -> Parked:
        """Start the copy of a value to the pool; its memory is kept until `release`."""
        base = value.detach()
        for dim, stride in enumerate(value.stride()):
            if stride == 0 and value.shape[dim] > 1:
                base = base.narrow(dim, 0, 1)
        parked = Parked(self, value.shape, base, base.shape, _dense_stride(base), base.dtype)
        block = self.pool.take(base.numel() * base.element_size())
        if block is None:
            self._stay(base)
        else:
            parked.block = block
            parked.out = self._out.copy(self._host(parked), base, block.pending)
        return parked

    def release(self, values: Iterable[Any]) -> None:
        """From here on the device memory of these values is free; what is not `Parked` is left alone."""
        for parked in values:
            if isinstance(parked, Parked) and parked.out is not None:
                parked.out.wait()
                parked.base = None

    def prefetch(self, values: Iterable[Any]) -> None:
        """Start the copies back of released values."""
        for parked in values:
            if isinstance(parked, Parked) and parked.base is None and parked.back is None:
                self._start_back(parked)

    def fetch(self, parked: Parked) -> Tensor:
        """The value, once; its block is free afterwards."""
        if parked.base is not None:
            found = parked.base
        else:
            if parked.back is None:
                self._start_back(parked)
            assert parked.back is not None
            assert parked.returned is not None
            parked.returned.wait()
            found = parked.back
        self._forget(parked)
        return found.expand(parked.size)

    def _start_back(self, parked: Parked) -> None:
        assert parked.out is not None
        parked.back = torch.empty_strided(parked.shape, parked.stride, dtype=parked.dtype, device=self._device)
        parked.returned = self._in.copy(parked.back, self._host(parked), [parked.out])

    def _host(self, parked: Parked) -> Tensor:
        assert parked.block is not None
        return self.pool.view(parked.block, parked.shape, parked.stride, parked.dtype)

    def _forget(self, parked: Parked) -> None:
        """Give the block back, and let the compute wait for copies that use device memory which is about to go."""
        if parked.block is None:
            return
        pending = tuple(event for event in (parked.out, parked.returned) if event is not None)
        for event in pending:
            event.wait()
        self.pool.give_back(parked.block, pending)
        parked.block = parked.base = parked.back = None

    def _stay(self, base: Tensor) -> None:
        self.kept_bytes += base.numel() * base.element_size()
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the pool of {self.pool.capacity:,} bytes of host memory is full: values stay on the device. "
                "Raise cache.host in the plan",
                stacklevel=3,
            )


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Strides without gaps, the dimensions in the order in which they lie; those of a dense tensor stay as they are."""
    strides, step = list(tensor.stride()), 1
    for dim in sorted(range(tensor.dim()), key=tensor.stride):
        if tensor.shape[dim] > 1:
            strides[dim] = step
            step *= tensor.shape[dim]
    return tuple(strides)
