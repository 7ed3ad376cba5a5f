"""What a device can sustain: data files in this folder, one per device, for estimates of time.

`DEVICE_links.yaml`, where there is one, holds the collectives between devices of one host: a line through times that
`benchmarks/distributed` measured and wrote.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import torch
import yaml


@dataclass(frozen=True)
class Link:
    """A kind of collective between devices of one host: seconds = latency + received bytes / bytes_per_second."""

    latency: float
    bytes_per_second: float

    def seconds(self, received: float) -> float:
        """Of a collective in which one rank receives so many bytes."""
        return self.latency + received / self.bytes_per_second


@dataclass(frozen=True)
class Hardware:
    """Sustained rates of one device, all per second.

    flops: dtype name -> floating point operations of large matrix products. hbm_bytes: device memory, reads and writes
    together. host_bytes: the host link in one direction; host_bytes_both: in each direction while both are busy.
    network_bytes: what one rank receives from other hosts. launch_seconds: the host's time to start one kernel.
    allocation_bytes: of which every allocation of device memory is a multiple. times: measured seconds of calls of ops
    (`compiler/op_times.py`), where there are any. host_devices: devices of one host. links: kind of collective -> what
    it takes within a host.
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
    host_devices: int = 1
    links: Mapping[str, Link] = field(default_factory=dict)

    def flops_of(self, dtype: torch.dtype) -> float:
        """The rate of a dtype; one that is not listed counts as float32."""
        return self.flops.get(str(dtype).removeprefix("torch."), self.flops["float32"])


@functools.cache
def hardware(name: str = "h200") -> Hardware:
    """The description in `name`.yaml, with the links that were measured."""
    links = read_links(name)
    return Hardware(**_read(f"{name}.yaml"), links=links)


def read_links(name: str) -> dict[str, Link]:
    """Kind of collective -> its line; none where nothing was measured."""
    file = f"{name}_links.yaml"
    found = _read(file)["links"] if (resources.files(__name__) / file).is_file() else {}
    return {kind: Link(**line) for kind, line in found.items()}


def _read(file: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((resources.files(__name__) / file).read_text())
    return values
