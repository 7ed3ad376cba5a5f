"""Peak memory of a call beside `known` bytes that are held already, as steps predict theirs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moec.compiler.allocations import AllocationCount


def measure_peak(function: Callable[[], object], known: int, device: str) -> tuple[int, int]:
    """The peak without what libraries hold between steps, and that (0 on a CPU, where it is not seen)."""
    return (_on_cuda if device == "cuda" else _on_cpu)(function, known)


def _on_cuda(function: Callable[[], object], known: int) -> tuple[int, int]:
    torch.cuda.synchronize()
    libraries = torch.cuda.memory_allocated() - known
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - libraries, libraries


def _on_cpu(function: Callable[[], object], known: int) -> tuple[int, int]:
    with AllocationCount() as count:
        function()
    return count.peak + known, 0
