"""Ask the memory replay about a compilation: its parts, its state on one rank, and the allocator of its device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from moec.codegen.program import Section
from moec.compiler.cache_schedule import CacheSchedule
from moec.compiler.hardware import hardware
from moec.compiler.layout import BucketInstance
from moec.compiler.memory import MemoryPlan, ProgramParts, StateBytes
from moec.compiler.memory_replay import predict_memory
from moec.compiler.partition import Partitioned
from moec.compiler.plan import Plan
from moec.runtime.footprint import copied_bytes, state_bytes
from moec.runtime.inventory import Inventory


def forecast(
    sections: Sequence[Section],
    outer: Partitioned,
    tied: Mapping[str, str],
    plan: Plan,
    state: StateBytes,
    device: torch.device,
    schedule: CacheSchedule | None = None,
    copies: int = 0,
) -> MemoryPlan:
    """The predicted memory of a lowered program on one rank. copies: see `copies_of`."""
    parts = {section.template.name: (section.template, section.parts) for section in sections}
    program = ProgramParts(parts, outer, tied, plan.accumulation, schedule or CacheSchedule(), copies)
    return predict_memory(program, state, granularity(device))


def state_of(
    model: nn.Module,
    unreached: Sequence[str],
    buckets: Mapping[str, BucketInstance],
    plan: Plan,
    device: torch.device,
) -> StateBytes:
    """What the state of a model takes on one rank of the plan's mesh; the model may be on fakes."""
    return state_bytes(Inventory.of(model, unreached), buckets, plan.mesh, granularity(device))


def copies_of(model: nn.Module, written: Iterable[str], device: torch.device) -> int:
    """Bytes of the copies that a step keeps of the buffers it writes, by path, until it has succeeded."""
    return copied_bytes(Inventory.of(model), written, granularity(device))


def granularity(device: torch.device) -> int:
    """Bytes of which every allocation on a device is a multiple."""
    return hardware().allocation_bytes if device.type == "cuda" else 1
