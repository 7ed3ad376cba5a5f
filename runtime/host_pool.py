"""A fixed piece of host memory, handed out in blocks and taken back: one allocation for a whole run.

On CUDA it is pinned, so that copies run beside the compute. A block that is given back while a copy still reads it
carries the event of that copy; whoever gets its bytes next waits for it before writing.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moec.runtime.copy_lanes import Event

ALIGNMENT = 512


@dataclass
class Block:
    """Bytes [start, end) of a pool. pending: copies that may still use them."""

    start: int
    end: int
    pending: tuple[Event, ...] = ()


@dataclass
class HostPool:
    """capacity: bytes. pin: whether copies to and from a CUDA device go through it."""

    capacity: int
    pin: bool = False
    used: int = field(init=False, default=0)
    most_used: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.capacity = -(-self.capacity // ALIGNMENT) * ALIGNMENT
        self._memory = _host_memory(self.capacity, self.pin)
        self._free = [Block(0, self.capacity)] if self.capacity else []

    def take(self, nbytes: int) -> Block | None:
        """The first block that is long enough, or None."""
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        for index, free in enumerate(self._free):
            if free.end - free.start >= size:
                taken = Block(free.start, free.start + size, free.pending)
                rest = Block(taken.end, free.end, free.pending)
                self._free[index : index + 1] = [rest] if rest.end > rest.start else []
                self.used += size
                self.most_used = max(self.most_used, self.used)
                return taken
        return None

    def give_back(self, block: Block, pending: tuple[Event, ...] = ()) -> None:
        """Make a block free for others, which wait for the pending copies."""
        self.used -= block.end - block.start
        freed = Block(block.start, block.end, tuple(event for event in pending if not event.done()))
        kept: list[Block] = []
        for other in self._free:
            if other.end == freed.start or freed.end == other.start:
                pending = tuple(event for event in (*freed.pending, *other.pending) if not event.done())
                freed = Block(min(freed.start, other.start), max(freed.end, other.end), pending)
            else:
                kept.append(other)
        self._free = sorted([*kept, freed], key=lambda free: free.start)

    def view(self, block: Block, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A dense tensor of this layout in a block."""
        count = size.numel() * dtype.itemsize
        return self._memory[block.start : block.start + count].view(dtype).as_strided(size, stride)


def _host_memory(capacity: int, pin: bool) -> Tensor:
    if not pin:
        return torch.empty(capacity, dtype=torch.uint8)
    try:
        return torch.empty(capacity, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        warnings.warn(
            f"{capacity / 2**30:.3g} GiB of host memory cannot be pinned ({str(error).splitlines()[0]}): values go "
            "through ordinary memory, and the compute waits for every copy. Lower cache.host in the plan, or raise the "
            "limit of locked memory (ulimit -l)",
            stacklevel=2,
        )
        return torch.empty(capacity, dtype=torch.uint8)
