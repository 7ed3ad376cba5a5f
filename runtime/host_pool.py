"""A fixed piece of host memory, handed out in blocks and taken back: one allocation for a whole run.

On CUDA it is pinned in place, so that copies run beside the compute; torch's own pinned allocator would take the next
power of two of it. A block that is given back while a copy still reads it
carries the event of that copy; whoever gets its bytes next waits for it before writing.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
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
        self._memory = torch.empty(self.capacity, dtype=torch.uint8)
        if self.pin and self.capacity:
            self._pin()
        self._free = [Block(0, self.capacity)] if self.capacity else []

    def _pin(self) -> None:
        reason = pin_memory(self._memory)
        if not reason:
            weakref.finalize(self, unpin_memory, self._memory).atexit = False
            return
        warnings.warn(
            f"{self.capacity / 2**30:.3g} GiB of host memory cannot be pinned ({reason}): values go through ordinary "
            "memory, and the compute waits for every copy. Lower cache.host in the plan, or raise the limit of locked "
            "memory (ulimit -l)",
            stacklevel=5,
        )

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


def pin_memory(memory: Tensor) -> str:
    """Pin the memory of a tensor where it lies; why it cannot be, '' where it is. `unpin_memory` before it is freed."""
    runtime = torch.cuda.cudart()
    error = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error) == 0:
        return ""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")  # CUDA reports the error once more, behind the next launch
    return str(runtime.cudaGetErrorString(error))


def unpin_memory(memory: Tensor) -> None:
    """Undo `pin_memory`, behind all copies that the device still has to do."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
