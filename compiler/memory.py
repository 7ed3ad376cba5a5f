"""What a step holds in device memory: the program that is asked about, and the answer.

`compiler/memory_replay.py` finds the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moec.compiler.cache_schedule import CacheSchedule
from moec.compiler.partition import Partitioned
from moec.compiler.template import Template


@dataclass(frozen=True)
class StateBytes:
    """What a step holds all the time on one rank, in bytes: each field is a group of tensors of `StepState`."""

    weights: int = 0
    buffers: int = 0
    masters: int = 0
    moments: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.buffers + self.masters + self.moments


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted device memory of one rank, in bytes.

    state: held all the time. gradients: sums over microbatches. peak: the most that is held, `where` it is: the layer
    or op, and the direction. saved: what backward needs, all layers together, when forward ends. host: values that wait
    in host memory then. saved_by_template: what one layer of each template keeps on the device. copies: of the buffers
    that a step writes, from its start until it has succeeded.
    """

    state: StateBytes
    gradients: int
    saved: int
    peak: int
    where: str
    host: int = 0
    saved_by_template: Mapping[str, int] = field(default_factory=dict)
    copies: int = 0

    @property
    def working(self) -> int:
        """Bytes at the peak beyond state and gradients."""
        return self.peak - self.state.total - self.gradients


@dataclass(frozen=True)
class ProgramParts:
    """An emitted program: its layers by template name, and the outer graphs that call them; all lowered.

    tied: other name of a weight -> its owner. accumulation: microbatches per step. schedule: when copies to and from
    host memory start and end. copies: bytes of the copies that a step keeps of the buffers it writes.
    """

    templates: Mapping[str, tuple[Template, Partitioned]]
    outer: Partitioned
    tied: Mapping[str, str] = field(default_factory=dict)
    accumulation: int = 1
    schedule: CacheSchedule = field(default_factory=CacheSchedule)
    copies: int = 0
