"""Ask the memory replay about a compilation: its parts, its state on one rank, and the allocator of its device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from moec.codegen.program import Section
from moec.compiler.cache_schedule import CacheSchedule
from moec.compiler.cache_timing import Timing, cache_timing
from moec.compiler.errors import PlanError
from moec.compiler.hardware import hardware
from moec.compiler.layout import BucketInstance
from moec.compiler.memory import MemoryPlan, ProgramParts, StateBytes
from moec.compiler.memory_replay import predict_memory
from moec.compiler.memory_table import size_text
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


def timing_of(sections: Sequence[Section], outer: Partitioned) -> Timing:
    """When copies to host memory run, and the time of a microbatch by the costs of its ops."""
    return cache_timing({section.template.name: section.parts for section in sections}, outer, hardware())


def refuse_too_much(memory: MemoryPlan, plan: Plan) -> None:
    """Raise PlanError when a step is predicted to need more memory than the plan has for it."""
    for name, needed, limit in (
        ("hbm", memory.peak, plan.cache.hbm_bytes),
        ("host", memory.host, plan.cache.host_bytes),
    ):
        if limit is not None and needed > limit:
            raise PlanError(
                f"the step needs {size_text(needed)} ({needed:,} bytes) of {name}, the plan has {size_text(limit)}",
                where=f"plan.cache.{name}",
                why=f"at {memory.where}" if name == "hbm" else "so much waits in host memory when forward ends",
                hint=f"set cache.{name} to at least {needed}B, or keep less: cache.policy"
                if name == "hbm"
                else f"set cache.host to at least {needed}B, or offload less",
            )


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
