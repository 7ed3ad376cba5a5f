"""What a device can sustain: data files in this folder, one per device, for estimates of time."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources

import torch
import yaml


@dataclass(frozen=True)
class Hardware:
    """Sustained rates of one device, all per second.

    flops: dtype name -> floating point operations of large matrix products. hbm_bytes: device memory, reads and writes
    together. host_bytes: the host link in one direction; host_bytes_both: in each direction while both are busy.
    network_bytes: what one rank receives from other hosts. launch_seconds: the host's time to start one kernel.
    allocation_bytes: of which every allocation of device memory is a multiple. times: measured seconds of calls of ops
    (`compiler/op_times.py`), where there are any.
    """

    name: str
    flops: Mapping[str, float]
    hbm_bytes: float
    host_bytes: float
    host_bytes_both: float
    network_bytes: float
    launch_seconds: float
    allocation_bytes: int = 1
    times: Mapping[str, float] = field(default_factory=dict)

    def flops_of(self, dtype: torch.dtype) -> float:
        """The rate of a dtype; one that is not listed counts as float32."""
        return self.flops.get(str(dtype).removeprefix("torch."), self.flops["float32"])


@functools.cache
def hardware(name: str = "h200") -> Hardware:
    """The description in `name`.yaml."""
    return Hardware(**yaml.safe_load((resources.files(__name__) / f"{name}.yaml").read_text()))
