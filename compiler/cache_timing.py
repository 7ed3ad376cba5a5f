"""When copies to and from host memory run beside the compute: their schedule, and for how long a step waits.

1. Layers compute one after the other, for as long as their costs say. The host link is a resource of its own in each
   direction, which moves one value after the other.
2. Forward: a copy out starts when its value is made, or when the link is free. Those of a layer are waited for
   (`release`) behind the first layer that ends later than they do, or when forward ends, so that all copies are out
   before backward.
3. Backward: the copies back of a layer start (`prefetch`) as late as they can and still be there when they are read;
   where that is before backward, the step waits.
4. Values outside of layers are waited for, and start, behind and before layers too, each on its own.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from moec.compiler.cache_problem import copy_seconds
from moec.compiler.cache_schedule import END, CacheSchedule, outside, outside_name
from moec.compiler.cost import node_cost
from moec.compiler.dialect.registry import nbytes
from moec.compiler.graph import OUTER
from moec.compiler.hardware import Hardware
from moec.compiler.partition import Partitioned

_OPS = torch.ops.moec
_COPIES = {_OPS.offload.default, _OPS.fetch.default}


@dataclass(frozen=True)
class Timing:
    """Seconds of one microbatch. compute: of both directions, forward: of one; waits: for copies out, and back.

    units: forward and backward of one layer of each template, and under "model" of what is outside of layers.
    """

    compute: float
    forward: float
    forward_wait: float
    backward_wait: float
    schedule: CacheSchedule
    units: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return self.compute + self.forward_wait + self.backward_wait


@dataclass(frozen=True)
class Call:
    """One call of a layer, or a value outside of layers. begin, end: on the clock of its direction.

    holder: of the values that are copied. copies: in their order on the host link, seconds after `begin` at which each
    can start, or has to be there, and seconds that it takes.
    """

    holder: str
    begin: float
    end: float
    copies: tuple[tuple[float, float], ...] = ()

    @property
    def is_layer(self) -> bool:
        """Whether it is a place for statements: not a value."""
        return not outside_name(self.holder)


class Clock:
    """Seconds of ops and graphs on a device; each is found once, so no graph may change in between."""

    def __init__(self, device: Hardware) -> None:
        self.device = device
        self._ops: dict[fx.Node, float] = {}
        self._graphs: dict[fx.Graph, float] = {}

    def op(self, node: fx.Node) -> float:
        """At least as long as its launch; of copies to and from the host, what they take from the compute."""
        if node not in self._ops:
            self._ops[node] = self._seconds(node)
        return self._ops[node]

    def _seconds(self, node: fx.Node) -> float:
        if node.op != "call_function":
            return 0.0
        if node.target in _COPIES:
            return copy_seconds(node, self.device)
        cost = node_cost(node, self.device)
        return max(cost.seconds, cost.launches * self.device.launch_seconds)

    def graph(self, graph: fx.Graph) -> float:
        """All ops one after the other."""
        if graph not in self._graphs:
            self._graphs[graph] = sum(self.op(node) for node in graph.nodes)
        return self._graphs[graph]


def cache_timing(templates: Mapping[str, Partitioned], outer: Partitioned, clock: Clock) -> Timing:
    """The schedule of a program's copies and its time on a device."""
    own = outer.copies()
    forward, forward_seconds = _calls(outer.forward, own, {n: p.forward for n, p in templates.items()}, clock)
    backward, backward_seconds = _calls(outer.backward, own, {n: p.backward for n, p in templates.items()}, clock)
    release, forward_wait = releases(forward, forward_seconds)
    prefetch, backward_wait = prefetches(backward)
    schedule = CacheSchedule(release, prefetch)
    units = {n: (clock.graph(p.forward), clock.graph(p.backward)) for n, p in [*templates.items(), (OUTER, outer)]}
    return Timing(forward_seconds + backward_seconds, forward_seconds, forward_wait, backward_wait, schedule, units)


def releases(calls: Sequence[Call], seconds: float) -> tuple[dict[str, tuple[str, ...]], float]:
    """Behind which layer the copies out of each holder are waited for, and the wait when forward ends."""
    found: dict[str, tuple[str, ...]] = {}
    free = 0.0
    for index, call in enumerate(calls):
        if call.copies:
            for made, took in call.copies:
                free = max(free, call.begin + made) + took
            behind = next((later.holder for later in calls[index:] if later.is_layer and later.end >= free), END)
            found[behind] = (*found.get(behind, ()), call.holder)
    return found, max(0.0, free - seconds)


def prefetches(calls: Sequence[Call]) -> tuple[dict[str, tuple[str, ...]], float]:
    """Before which layer the copies back of each holder start, and how long reads wait for theirs in all."""
    starts: dict[str, float] = {}
    latest = float("inf")
    for call in reversed(calls):
        if call.copies:
            for read, took in reversed(call.copies):
                latest = min(latest, call.begin + read) - took
            starts[call.holder] = latest
    found: dict[str, tuple[str, ...]] = {}
    free = wait = 0.0
    places: list[Call] = []
    for call in calls:
        if call.is_layer:
            places.append(call)
        if not call.copies:
            continue
        early = bisect.bisect_right(places, starts[call.holder], key=lambda place: place.begin)
        before, begin = (places[early - 1].holder, places[early - 1].begin) if early else (END, 0.0)
        found[before] = (*found.get(before, ()), call.holder)
        free = max(free, begin + wait)
        for read, took in call.copies:
            free += took
            wait += max(0.0, free - (call.begin + read + wait))
    return found, wait


def _calls(
    outer: fx.Graph, own: Mapping[fx.Node, str], layers: Mapping[str, fx.Graph], clock: Clock
) -> tuple[list[Call], float]:
    """The calls of layers on the clock of one direction, and when it ends. own: copies outside of layers, by value."""
    copies = {name: _copies(graph, clock) for name, graph in layers.items()}
    calls, now = [], 0.0
    for node in outer.nodes:
        if node.target in (_OPS.region.default, _OPS.region_backward.default):
            name, path = str(node.args[0]), str(node.args[1])
            seconds = clock.graph(layers[name])
            calls.append(Call(path, now, now + seconds, copies[name]))
            now += seconds
            continue
        if node in own:
            calls.append(Call(outside(own[node]), now, now, ((0.0, _link_seconds(node, clock)),)))
        now += clock.op(node)
    return calls, now


def _copies(graph: fx.Graph, clock: Clock) -> tuple[tuple[float, float], ...]:
    """As `Call.copies`: values go out as they are made, and come back in the order in which they were saved."""
    now, found = 0.0, []
    for node in graph.nodes:
        if node.target in _COPIES:
            found.append((_place(node), now, _link_seconds(node, clock)))
        now += clock.op(node)
    if any(place is not None for place, *_ in found):
        found.sort()
    return tuple((when, seconds) for _, when, seconds in found)


def _link_seconds(node: fx.Node, clock: Clock) -> float:
    return nbytes(node.meta["val"]) / clock.device.host_bytes


def _place(node: fx.Node) -> int | None:
    """The place of a fetched value among those that its layer saved."""
    if node.target is not _OPS.fetch.default:
        return None
    assert isinstance(node.args[0], fx.Node)
    return int(node.args[0].meta["role"][1])
