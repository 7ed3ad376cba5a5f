"""How much of the communication of a step runs while the device computes, from a profile of its kernels.

Communication: kernels of NCCL, which also wait for the slowest rank. Compute: all others, copies on the device too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Spans = list[tuple[float, float]]


def overlap(run: Callable[[], Any]) -> dict[str, Any]:
    """Profile one call: milliseconds of the device by kind, and the share of communication that is hidden."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        run()
        torch.cuda.synchronize()
    kernels = [
        (event.name, (float(event.time_range.start), float(event.time_range.end)))
        for event in found.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    return shares(kernels)


def shares(kernels: Sequence[tuple[str, tuple[float, float]]]) -> dict[str, Any]:
    """kernels: (name, (start, end) in microseconds)."""
    communication = merged(span for name, span in kernels if _communicates(name))
    compute = merged(span for name, span in kernels if not _communicates(name))
    both = _common(communication, compute)
    total, kinds = _length(communication), dict[str, float]()
    for name, (start, end) in kernels:
        if _communicates(name):
            kind = name.split("(")[0].removeprefix("ncclDevKernel_")
            kinds[kind] = kinds.get(kind, 0.0) + 1e-3 * (end - start)
    ends = [end for _, span in kernels for end in span]
    return {
        "span_ms": 1e-3 * (max(ends) - min(ends)) if ends else 0.0,
        "compute_ms": 1e-3 * _length(compute),
        "communication_ms": 1e-3 * total,
        "hidden_ms": 1e-3 * both,
        "hidden_share": both / total if total else None,
        "kernels": len(kernels),
        "by_kind_ms": kinds,
    }


def merged(spans: Iterable[tuple[float, float]]) -> Spans:
    """The union of spans, in order."""
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _communicates(name: str) -> bool:
    return "nccl" in name.lower()


def _length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


def _common(one: Spans, two: Spans) -> float:
    """Length of what lies in both."""
    total, index = 0.0, 0
    for start, end in one:
        while index < len(two) and two[index][1] <= start:
            index += 1
        at = index
        while at < len(two) and two[at][0] < end:
            total += min(end, two[at][1]) - max(start, two[at][0])
            at += 1
    return total
