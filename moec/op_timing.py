"""`moec.measure_ops(model, plan, batch)`: how long every op of a step takes on the model's device.

1. The plan is compiled with everything kept, and its lowered graphs run op by op (graph_program.py), on a batch.
2. On a GPU each op waits in the stream behind a kernel that does nothing for as long as the host took for the op's
   launches before: what two events around it then measure is the device's time, without gaps. An op that waits for the
   device itself is measured with that wait.
3. Of all runs of a call, its median counts. The first run only tells how long launches take.

Ops on their own run with higher clocks than in a step that keeps the device busy.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from moec.compiler._torch_compat import spin
from moec.compiler.op_times import OpTimes, call_key
from moec.compiler.plan import Plan
from moec.driver import build, write
from moec.graph_program import GraphProgram
from moec.runtime.program import load_program
from moec.runtime.state import StepState
from moec.step import CompiledStep

_LONGEST = 5e-3
"""Seconds that an op waits at most: the first launch of a kernel may have compiled it."""


def measure_ops(model: nn.Module, plan: Plan, batch: Mapping[str, Tensor], runs: int = 3) -> OpTimes:
    """Seconds of every op of forward and backward; the model and its weights stay as they are.

    runs: after one that is not measured.
    """
    plan = replace(plan, cache=replace(plan.cache, hbm=None, host=None, policy="keep", times=None))
    found = build(model, plan)
    assert found.outer is not None
    clock = _Clock()
    with tempfile.TemporaryDirectory(prefix="moec-times-") as name:
        folder = Path(name)
        write(found, folder)
        emitted = load_program(folder)
        results = found.captured.program.outer.signature.outputs
        program = GraphProgram(found.sections, found.outer, results, emitted, clock)
        state = StepState.from_module(model, found.unreached)
        step = CompiledStep.of(program, state, folder, found.log, plan)  # type: ignore[arg-type]
        clock.device = emitted.DEVICE
        for _ in range(runs + 1):
            step.gradients(batch)
            clock.read()
    device = torch.cuda.get_device_name(clock.device) if clock.device.type == "cuda" else clock.device.type
    return OpTimes(device, torch.__version__, clock.medians(clock.seconds), clock.medians(clock.host))


@dataclass
class _Clock:
    """Runs ops and notes their times, by call. seconds, host: of the runs after the first."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seconds: dict[str, list[float]] = field(default_factory=dict)
    host: dict[str, list[float]] = field(default_factory=dict)
    _launch: dict[str, float] = field(default_factory=dict)
    _events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def __call__(self, node: fx.Node, run: Callable[[], Any]) -> Any:
        if not isinstance(node.target, torch._ops.OpOverload):
            return run()
        key = call_key(node)
        first = key not in self._launch
        if self.device.type != "cuda":
            result, took = self._timed(run)
            if not first:
                self.seconds.setdefault(key, []).append(took)
        else:
            before, behind = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            spin(self.device, min(1.5 * self._launch.get(key, 0.0), _LONGEST) + 5e-5)
            before.record()
            result, took = self._timed(run)
            behind.record()
            if not first:
                self._events.append((key, before, behind))
        if first:
            self._launch[key] = took
        else:
            self._launch[key] = min(took, self._launch[key])
            self.host.setdefault(key, []).append(took)
        return result

    def read(self) -> None:
        """Take over what the device has measured."""
        if self._events:
            torch.cuda.synchronize(self.device)
        for key, before, behind in self._events:
            self.seconds.setdefault(key, []).append(1e-3 * before.elapsed_time(behind))
        self._events.clear()

    def medians(self, times: Mapping[str, list[float]]) -> dict[str, float]:
        return {key: statistics.median(values) for key, values in times.items()}

    def _timed(self, run: Callable[[], Any]) -> tuple[Any, float]:
        began = time.perf_counter()
        result = run()
        return result, time.perf_counter() - began
