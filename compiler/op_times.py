"""Measured times of ops on a device, by call: where the cost model knows one, it takes it in place of its estimate.

A call is an op with the shapes, dtypes and gaps of its operands and its other arguments (`call_key`). An op and the
kernel that it is lowered to are the same call, so that a time measured in a lowered graph serves before lowering.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from moec.compiler.dialect.registry import size_hint
from moec.compiler.errors import PlanError
from moec.compiler.hardware import Hardware, hardware
from moec.compiler.lower import IMPLEMENTATIONS
from moec.compiler.nodes import bound_args
from moec.compiler.plan import Plan


@dataclass(frozen=True)
class OpTimes:
    """Seconds of a call on the device named; host: seconds until the call has returned, which launches its kernels."""

    device: str
    torch: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    host: Mapping[str, float] = field(default_factory=dict)

    def write(self, path: str | Path) -> None:
        """As JSON, sorted."""
        Path(path).write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> OpTimes:
        """What `write` wrote; PlanError where it is missing or something else."""
        try:
            return cls(**json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise PlanError(
                f"{path} holds no times of ops",
                where="plan.cache.times",
                why=str(error),
                hint="write it with moec.measure_ops(model, plan, batch).write(path)",
            ) from error


def device_of_plan(plan: Plan) -> Hardware:
    """The device that a plan's costs are estimated for, with the times that the plan names."""
    times = plan.cache.times
    return hardware() if times is None else replace(hardware(), times=OpTimes.read(times).seconds)


def call_key(node: fx.Node) -> str:
    """The call of a node as text: 'aten.mm.default(bfloat16[64, 32], bfloat16[32, 8])'."""
    return f"{_meaning(node.target)}({', '.join(_text(value) for value in bound_args(node))})"


def _meaning(target: Any) -> Any:
    """The op that a kernel implements; any other op itself."""
    return next((op for op, ways in IMPLEMENTATIONS.items() if any(way.target is target for way in ways)), target)


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return _text(value.meta.get("val"))
    if isinstance(value, Tensor):
        shape = [size_hint(size) for size in value.shape]
        gaps = "" if value.is_contiguous() else f" by {[size_hint(stride) for stride in value.stride()]}"
        return f"{str(value.dtype).removeprefix('torch.')}{shape}{gaps}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(item) for item in value)}]"
    if isinstance(value, torch.SymInt):
        return str(size_hint(value))
    return "device" if isinstance(value, torch.device) else str(value)
