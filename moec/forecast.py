"""Ask the memory replay about a compilation: its parts, its state on one rank, and the allocator of its device."""

from __future__ import annotations

from collections.abc import Sequence

from moec.codegen.program import Section
from moec.compilation import Compilation
from moec.compiler.cache_schedule import CacheSchedule
from moec.compiler.cache_timing import Clock, Timing, cache_timing
from moec.compiler.errors import PlanError
from moec.compiler.hardware import hardware
from moec.compiler.liveness import Lives
from moec.compiler.memory import MemoryPlan, ProgramParts
from moec.compiler.memory_replay import predict_memory
from moec.compiler.memory_table import size_text
from moec.compiler.op_times import device_of_plan
from moec.compiler.partition import Partitioned
from moec.compiler.plan import Plan
from moec.passes.cache_search import Parts
from moec.preflight import device_of_program
from moec.runtime.footprint import copied_bytes, state_bytes
from moec.runtime.inventory import Inventory


class Forecast:
    """The predicted memory on one rank of a compilation's program, in as many forms as are tried.

    What is the same in every form is found once: the state, the copies that a step keeps of the buffers it writes until
    it has succeeded, and what ops hold while they run.
    """

    def __init__(self, result: Compilation) -> None:
        device, plan = device_of_program(result.model, result.plan), result.plan
        granularity = hardware().allocation_bytes if device.type == "cuda" else 1
        inventory = Inventory.of(result.model, result.unreached)
        self._state = state_bytes(inventory, result.buckets, plan.mesh, granularity)
        self._copies = copied_bytes(inventory, result.copied_paths(), granularity)
        self._tied, self._accumulation = result.captured.tied, plan.accumulation
        self._lives = Lives(granularity)

    def of(self, parts: Parts, outer: Partitioned, schedule: CacheSchedule) -> MemoryPlan:
        """What one form holds: layers by template name, the graph around them, and when copies to host memory run."""
        program = ProgramParts(parts, outer, self._tied, self._accumulation, schedule, self._copies)
        return predict_memory(program, self._state, self._lives)


def timing_of(sections: Sequence[Section], outer: Partitioned, plan: Plan) -> Timing:
    """When copies to host memory run, and the time of a microbatch by the costs of its ops."""
    templates = {section.template.name: section.parts for section in sections}
    return cache_timing(templates, outer, Clock(device_of_plan(plan)))


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
