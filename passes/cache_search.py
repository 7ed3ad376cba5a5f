"""`cache.policy: auto`: ask the solver, replay what it found, and correct its limit until the step fits.

1. The solver limits the bytes that all layers keep when forward ends. What a step holds beyond them (state, work space,
   copies in flight, recomputed values) is found by replaying it: limit = `hbm` - (peak - kept).
2. Everything kept is the fastest, where it fits. As little kept as can be is the last resort, with and without copies,
   and with what is outside of layers kept: if that does not fit, nothing that the solver knows does.
3. In between the best way within the limit, replayed again, and the limit corrected by what was over or left.
4. The solver takes copies for a sum that runs beside the compute. Where the schedule of a choice waits for copies, a
   smaller rate of the host link is tried too, and the fastest by its schedule is taken.

Early layers take the ways that offload most: their copies have the longest time before they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from moec.compiler.cache_problem import LayerProblem, inputs_kept, layer_problem, outer_problem
from moec.compiler.cache_schedule import CacheSchedule
from moec.compiler.cache_solver import Limits, Solution, Way, best_way, first_ways, solve
from moec.compiler.cache_timing import Clock, Timing, cache_timing
from moec.compiler.differentiate import Joint
from moec.compiler.errors import PlanError
from moec.compiler.graph import OUTER
from moec.compiler.hardware import Hardware
from moec.compiler.lower import lower
from moec.compiler.memory import MemoryPlan
from moec.compiler.memory_table import size_text
from moec.compiler.partition import Choice, Choices, Decision, Partitioned, partition
from moec.compiler.placement import JointProgram
from moec.compiler.plan import CachePlan
from moec.compiler.template import Template

Parts = Mapping[str, tuple[Template, Partitioned]]
Predict = Callable[[Parts, Partitioned, CacheSchedule], MemoryPlan]
"""(templates, outer, timing) -> predicted memory; the caller knows the state and the device."""

_ROUNDS = 5
_LINK_SHARES = (1.0, 0.8, 0.6, 0.4, 0.0)
"""Of the host link's rate, in the order in which they are tried."""
_CLOSE = 0.01
"""So much of what everything kept would take may be left of `hbm`: another round would win little."""
_REGIONS = (torch.ops.moec.region.default, torch.ops.moec.region_backward.default)


@dataclass(frozen=True)
class Found:
    """Layer path -> choices, and those outside of layers, with what the replay says of them and how far from the best
    they may be."""

    choices: dict[str, Choices]
    outside: Choices
    memory: MemoryPlan
    timing: Timing
    gap: float


class CacheSearch:
    """One search over a program. problems: of its templates, then of the graph around the layers."""

    def __init__(self, program: JointProgram, plan: CachePlan, predict: Predict, device: Hardware) -> None:
        self._program, self._plan, self._predict, self._device = program, plan, predict, device
        self._templates = list(program.templates.values())
        self._clock = Clock(device)
        self._parts: dict[tuple[str, Choices], Partitioned] = {}
        joints = {template.name: program.joints[template.unit.name] for template in self._templates}
        self.problems = [
            *(layer_problem(joints[t.name], len(t.calls), device, t.changing) for t in self._templates),
            outer_problem(program.outer, {name: inputs_kept(joint) for name, joint in joints.items()}, device),
        ]
        self._ways = [first_ways(problem) for problem in self.problems]

    def run(self) -> Found:
        """The fastest choice that fits; PlanError with the least memory that was found where none does."""
        hbm, host = self._plan.hbm_bytes, self._plan.host_bytes
        assert hbm is not None
        everything, _ = self._replay(self._all_kept(), 0.0)
        if everything.memory.peak <= hbm:
            return everything
        least = self._least(host)
        outside_kept = replace(least, ways=(*least.ways[:-1], self._all_kept().ways[-1]))
        resorts = [self._replay(solution, 0.0) for solution in (least, outside_kept, self._least(0))]
        best, kept = min(resorts, key=lambda pair: pair[0].memory.peak)
        if best.memory.peak > hbm:
            raise self._too_little(best.memory, hbm, host)
        limits = self._limits(best, kept, hbm, host)
        fixed = best.memory.state.total + best.memory.saved - kept
        bound = self._solve(replace(limits, kept=max(0, hbm - fixed)))
        close = _CLOSE * everything.memory.saved
        for share in _LINK_SHARES:
            copies = {"link": share * self._device.host_bytes} if share else {"host": 0.0}
            found = self._within(replace(limits, **copies), bound.bound if bound else 0.0, hbm, close)
            if found is not None and found.timing.total < best.timing.total:
                best = found
            if found is not None and not found.timing.forward_wait + found.timing.backward_wait:
                break
        return best

    def _within(self, limits: Limits, bound: float, hbm: int, close: float) -> Found | None:
        """The fastest of the solver's choices that fits. close: bytes that may be left."""
        best: Found | None = None
        peak = 0
        for _ in range(_ROUNDS):
            solution = self._solve(limits)
            if solution is None:
                break
            found, _ = self._replay(solution, bound)
            left = hbm - found.memory.peak
            if left >= 0 and (best is None or found.timing.total < best.timing.total):
                best = found
            done = 0 <= left <= close or (left > 0 and not self._keeps_less(solution))
            if done or found.memory.peak == peak:
                break
            peak = found.memory.peak
            limits = replace(limits, kept=limits.kept + left)
        return best

    def _solve(self, limits: Limits) -> Solution | None:
        return solve(self.problems, limits, self._ways)

    def _keeps_less(self, solution: Solution) -> bool:
        """Whether anything is not kept."""
        return any(way.offloaded or way.seconds for ways in solution.ways for way, _ in ways)

    def _all_kept(self) -> Solution:
        ways = [((best_way(problem, 1.0, 0.0, 1.0), problem.layers),) for problem in self.problems]
        return Solution(tuple(ways), 0.0, 0.0)

    def _least(self, host: int | None) -> Solution:
        """As little kept as the host memory allows, whatever the time."""
        everywhere, nowhere = (self._least_at(price) for price in (1e-9, 2.0))
        if host == 0:
            return nowhere
        if host is None or sum(way.offloaded * count for ways in everywhere.ways for way, count in ways) <= host:
            return everywhere
        free = Limits(0.0, host, 0.0, 0.0, self._device.host_bytes)
        lowest, highest, solution = 0.0, float(_kept(nowhere)), nowhere
        while highest - lowest > 0.01 * max(highest, 1.0):
            middle = (lowest + highest) / 2
            found = self._solve(replace(free, kept=middle))
            if found is None:
                lowest = middle
            else:
                solution, highest = found, middle
        return solution

    def _least_at(self, offloaded: float) -> Solution:
        """As little kept as can be at a price of an offloaded byte, where a kept one costs 1 and time costs nothing."""
        ways = [((best_way(problem, 1e-9, 1.0, offloaded), problem.layers),) for problem in self.problems]
        return Solution(tuple(ways), 0.0, 0.0)

    def _limits(self, found: Found, kept: int, hbm: int, host: int | None) -> Limits:
        seconds = self._plain_seconds()
        room = hbm - (found.memory.peak - kept)
        return Limits(room, float("inf") if host is None else host, *seconds, self._device.host_bytes)

    def _plain_seconds(self) -> tuple[float, float]:
        """Forward and backward with everything kept."""
        timing = self._timing({call.path: Choices() for t in self._templates for call in t.calls}, Choices())[2]
        return timing.forward, timing.compute - timing.forward

    def replay(self, choices: dict[str, Choices], outside: Choices, bound: float) -> Found:
        """What choices take. bound: seconds that no choice can be faster than, 0 where that is not known."""
        parts, outer, timing = self._timing(choices, outside)
        memory = self._predict(parts, outer, timing.schedule)
        return Found(choices, outside, memory, timing, max(0.0, timing.total / bound - 1) if bound else 0.0)

    def _replay(self, solution: Solution, bound: float) -> tuple[Found, int]:
        """What a solution takes, and the bytes that its layers keep."""
        ((way, _),) = solution.ways[-1]
        outside = choices_of(self.problems[-1], way)
        return self.replay(dict(self._assigned(solution)), outside, bound), _kept(solution)

    def _timing(self, choices: Mapping[str, Choices], outside: Choices) -> tuple[Parts, Partitioned, Timing]:
        names: dict[tuple[str, Choices], str] = {}
        parts: dict[str, tuple[Template, Partitioned]] = {}
        of_path: dict[str, str] = {}
        for template in self._templates:
            for call in template.calls:
                key = (template.name, choices[call.path])
                if key not in names:
                    names[key] = f"{template.name} {len(names)}"
                    own = [other for other in template.calls if choices[other.path] == key[1]]
                    joint = self._program.joints[template.unit.name]
                    layer = self._partitioned(template.name, joint, key[1], template.changing)
                    parts[names[key]] = (replace(template, calls=own), layer)
                of_path[call.path] = names[key]
        outer = self._partitioned(OUTER, self._program.outer, outside)
        for graph in (outer.forward, outer.backward):
            for node in graph.nodes:
                if node.target in _REGIONS:
                    node.args = (of_path[str(node.args[1])], *node.args[1:])
        timing = cache_timing({name: layer for name, (_, layer) in parts.items()}, outer, self._clock)
        return parts, outer, timing

    def _partitioned(self, name: str, joint: Joint, choices: Choices, changing: Collection[str] = ()) -> Partitioned:
        key = (name, choices)
        if key not in self._parts:
            self._parts[key] = partition(joint, choices, changing=changing)
            for graph in (self._parts[key].forward, self._parts[key].backward):
                lower(graph)
        return self._parts[key]

    def _assigned(self, solution: Solution) -> Iterator[tuple[str, Choices]]:
        for template, problem, ways in zip(self._templates, self.problems, solution.ways, strict=False):
            ordered = sorted(ways, key=lambda pair: (-pair[0].offloaded, pair[0].kept))
            flat = [way for way, count in ordered for _ in range(count)]
            for call, way in zip(template.calls, flat, strict=True):
                yield call.path, choices_of(problem, way)

    def _too_little(self, memory: MemoryPlan, hbm: int, host: int | None) -> PlanError:
        least = f"{memory.peak:,} bytes, {size_text(memory.peak)}"
        limit = "" if host is None else f" with {size_text(host)} of host memory"
        return PlanError(
            f"no choice fits into {size_text(hbm)} of device memory",
            where="plan.cache.hbm",
            why=f"the least that was found{limit} is {least}, at {memory.where}",
            hint=f"set cache.hbm to at least {memory.peak}B"
            + (", or raise cache.host" if host is not None else "")
            + ", or make batch or length smaller",
        )


def _kept(solution: Solution) -> int:
    return sum(way.kept * count for ways in solution.ways for way, count in ways)


def choices_of(problem: LayerProblem, way: Way) -> Choices:
    """A way as choices by name, each with its price as the reason."""
    by_name: list[tuple[str, Choice]] = []
    for index, decision in way.decisions:
        value = problem.values[index]
        by_name.append((value.name, Choice(decision, _reason(problem, index, decision))))
    return Choices(by_name=tuple(by_name))


def _reason(problem: LayerProblem, index: int, decision: Decision) -> str:
    value = problem.values[index]
    op = problem.ops[value.maker]
    again = f"{1e6 * op.seconds:.3g} us to compute again" if op.may_run_again else "it may not run again"
    return {
        "keep": f"the solver keeps it: {again}",
        "offload": f"the solver offloads it: {again}",
        "recompute": f"the solver recomputes it: {again}",
    }[decision]
