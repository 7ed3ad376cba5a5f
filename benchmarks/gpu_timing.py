"""Time, launches and memory of a call on a GPU, the same for every benchmark of kernels."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

Call = Callable[[], object]


def median_ms(function: Call, repeats: int = 7) -> float:
    """Median time between events around a call, the cache flushed before each."""
    flush = torch.empty(64 * 2**20, dtype=torch.int32, device="cuda")
    for _ in range(2):
        function()
    times = []
    for _ in range(repeats):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return round(statistics.median(times), 3)


def peak_mib(function: Call) -> int:
    """MiB that a call holds at its peak beyond what was held before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20)


def launches(function: Call) -> int:
    """Kernels, copies and fills of one call."""
    return sum(count for count, _ in kernels(function).values())


def kernels(function: Call, calls: int = 1) -> dict[str, tuple[int, float]]:
    """Launches and microseconds on the GPU per kernel of one call, averaged over `calls`."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            function()
        torch.cuda.synchronize()
    found: dict[str, tuple[int, float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            count, spent = found.get(event.name, (0, 0.0))
            found[event.name] = (count + 1, spent + event.device_time / calls)
    return {name: (count // calls, spent) for name, (count, spent) in found.items()}
