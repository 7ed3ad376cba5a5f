"""Choose what to keep, offload and recompute: the least time within a limit on kept and on offloaded bytes.

The model of a microbatch's time, for layers that keep k, offload o bytes, and for r seconds recompute and share the
device's memory with copies:

    max(forward, o / link) + max(backward + r, o / link)        k <= kept bytes that fit, o <= host bytes

1. A way is one decision for every value of a layer. The best way at given prices for a second of recomputation, a kept
   byte and an offloaded byte is a small MILP (`best_way`): a value is there when it is kept, offloaded or recomputed;
   what backward needs is there; what an op reads is there when the op runs again. So chains are priced whole.
2. The prices are those of a linear program that takes fractions of layers of each template in each known way. Ways are
   added until none has a lower cost at its prices: then its optimum bounds from below what any choice can reach.
3. A MILP over the ways found gives whole layers, in at most `WAYS` ways for one template. Small problems are one MILP
   in which every layer is decided on its own.

The distance of 3 from the bound of 2 is proved, and is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import coo_array

from moec.compiler.cache_problem import LayerProblem
from moec.compiler.partition import Decision

WAYS = 3
EXACT = 400
"""Up to this many yes-or-no questions in all layers together, each layer is decided on its own, in one MILP."""
_ROUNDS = 60
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Way:
    """One decision for each value of a layer, and what they cost: decisions of values that are not there are absent."""

    decisions: tuple[tuple[int, Decision], ...]
    kept: int
    offloaded: int
    seconds: float


@dataclass(frozen=True)
class Limits:
    """forward, backward: seconds without recomputation. link: bytes per second of the host link in one direction."""

    kept: float
    host: float
    forward: float
    backward: float
    link: float


@dataclass(frozen=True)
class Solution:
    """(way, number of layers) of every template, their predicted seconds, and what no choice can be faster than."""

    ways: tuple[tuple[tuple[Way, int], ...], ...]
    seconds: float
    bound: float

    @property
    def gap(self) -> float:
        """How much slower than the bound, at most."""
        return self.seconds / self.bound - 1 if self.bound else 0.0


def solve(problems: Sequence[LayerProblem], limits: Limits, ways: Sequence[list[Way]] | None = None) -> Solution | None:
    """The best choice, or None where the limits leave none.

    ways: known of each problem (`first_ways`, or what an earlier call left there); what is found is added.
    """
    ways = [first_ways(problem) for problem in problems] if ways is None else ways
    bound = float("inf")
    for _ in range(_ROUNDS):
        found = _fractions(problems, ways, limits)
        bound = found.seconds
        if not found.feasible and not _may_be_feasible(found):
            return None
        new = 0
        for number, problem in enumerate(problems):
            way = best_way(problem, found.second, found.kept, found.offloaded)
            cost = found.second * way.seconds + found.kept * way.kept + found.offloaded * way.offloaded
            if cost < found.shares[number] - _TOLERANCE * max(1.0, abs(cost)) and way not in ways[number]:
                ways[number].append(way)
                new += 1
        if not new:
            break
    if not found.feasible:
        return None
    if sum(problem.layers * len(_most(problem)) for problem in problems) <= EXACT:
        return _exact(problems, limits, bound)
    return _whole(problems, ways, limits, bound)


def best_way(problem: LayerProblem, second: float, kept: float, offloaded: float) -> Way:
    """The way of least cost at the given prices."""
    count, ops = len(problem.values), len(problem.ops)
    if count == 0:
        return Way((), 0, 0, 0.0)
    # Variables: kept [count], offloaded [count], ops that run again [ops].
    cost = np.concatenate(
        [
            [kept * v.bytes for v in problem.values],
            [offloaded * v.bytes + second * v.copies for v in problem.values],
            [second * op.seconds for op in problem.ops],
        ]
    )
    scale = float(np.abs(cost).max()) or 1.0
    # A tiny cost for everything, so that nothing is done for nothing, and no copy where keeping costs the same.
    cost = cost / scale + np.array([*[1e-7] * count, *[2e-7] * count, *[1e-7] * ops])
    upper = _most(problem)
    matrix = _Rows()
    _add_layer(matrix, problem, 0)
    found = milp(
        cost,
        constraints=matrix.at_least(2 * count + ops),
        bounds=Bounds(np.zeros_like(upper), upper),
        integrality=np.ones_like(upper),
    )
    assert found.x is not None, "keeping everything is always a way"
    chosen = np.round(found.x).astype(bool)
    return _way(problem, chosen[:count], chosen[count : 2 * count], chosen[2 * count :])


def _most(problem: LayerProblem) -> list[float]:
    """Upper bounds of a layer's variables: each value kept, each offloaded, each op run again."""
    offloaded = [float(value.may_offload) for value in problem.values]
    return [*[1.0] * len(problem.values), *offloaded, *(float(op.may_run_again) for op in problem.ops)]


def _add_layer(matrix: _Rows, problem: LayerProblem, first: int) -> None:
    """The rows of one layer whose variables begin at `first`."""
    count = len(problem.values)

    def there(index: int) -> dict[int, float]:
        return {first + index: 1.0, first + count + index: 1.0, first + 2 * count + problem.values[index].maker: 1.0}

    for index, value in enumerate(problem.values):
        if value.needed:
            matrix.add(there(index), 1.0)
    for number, op in enumerate(problem.ops):
        again = first + 2 * count + number
        for read in op.reads:
            matrix.add({**there(read), again: there(read).get(again, 0.0) - 1.0}, 0.0)


def _way(problem: LayerProblem, kept: Sequence[bool], offloaded: Sequence[bool], again: Sequence[bool]) -> Way:
    decisions: list[tuple[int, Decision]] = []
    for index, value in enumerate(problem.values):
        if offloaded[index] and not kept[index]:
            decisions.append((index, "offload"))
        elif kept[index]:
            decisions.append((index, "keep"))
        elif again[value.maker]:
            decisions.append((index, "recompute"))
    sizes = {way: sum(problem.values[i].bytes for i, d in decisions if d == way) for way in ("keep", "offload")}
    seconds = sum(op.seconds for op, runs in zip(problem.ops, again, strict=True) if runs)
    seconds += sum(problem.values[index].copies for index, decision in decisions if decision == "offload")
    return Way(tuple(decisions), sizes["keep"], sizes["offload"], seconds)


def first_ways(problem: LayerProblem) -> list[Way]:
    """Keep all; least kept with any time; least kept without a copy; recompute nothing and offload what may be."""
    prices = ((1.0, 1e-15, 1.0), (1e-6, 1.0, 1e-9), (1e-9, 1.0, 2.0), (1e9, 1.0, 1e-9))
    return list(dict.fromkeys(best_way(problem, *price) for price in prices))


class _Rows:
    """Rows of a sparse matrix with lower bounds."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, float]] = []
        self._lower: list[float] = []

    def add(self, entries: dict[int, float], lower: float) -> None:
        self._entries += [(len(self._lower), column, value) for column, value in entries.items()]
        self._lower.append(lower)

    def at_least(self, columns: int) -> LinearConstraint | tuple[()]:
        if not self._lower:
            return ()
        rows, places, values = zip(*self._entries, strict=True)
        matrix = coo_array((values, (rows, places)), shape=(len(self._lower), columns)).tocsr()
        return LinearConstraint(matrix, np.array(self._lower), np.inf)


@dataclass(frozen=True)
class _Fractions:
    """The linear program's optimum, prices (of a second, a kept and an offloaded byte), and each template's share."""

    seconds: float
    feasible: bool
    second: float
    kept: float
    offloaded: float
    shares: tuple[float, ...]


_PENALTY = 1e3
"""Seconds for all kept bytes beyond the limit: finds out whether there is a way within it."""


def _columns(ways: Sequence[Sequence[Way]]) -> list[tuple[int, Way]]:
    return [(number, way) for number, known in enumerate(ways) for way in known]


def _fractions(problems: Sequence[LayerProblem], ways: Sequence[Sequence[Way]], limits: Limits) -> _Fractions:
    columns = _columns(ways)
    size = len(columns)
    unit = max(1.0, *(float(w.kept * problems[n].layers) for n, w in columns))
    # Variables: layers in each way, seconds of forward and of backward, kept bytes beyond the limit.
    cost = np.concatenate([np.zeros(size), [1.0, 1.0, _PENALTY]])
    copies = [way.offloaded / limits.link for _, way in columns]
    upper = np.array(
        [
            [*(way.kept / unit for _, way in columns), 0, 0, -1],
            [*(way.offloaded / unit for _, way in columns), 0, 0, 0],
            [*copies, -1, 0, 0],
            [*copies, 0, -1, 0],
            [*(way.seconds for _, way in columns), 0, -1, 0],
        ]
    )
    host = limits.host / unit if np.isfinite(limits.host) else 1e6
    limit = np.array([limits.kept / unit, host, 0, 0, -limits.backward])
    equal = np.array([[float(n == number) for n, _ in columns] + [0, 0, 0] for number in range(len(problems))])
    bounds = [*[(0, None)] * size, (limits.forward, None), (limits.backward, None), (0, None)]
    found = linprog(cost, upper, limit, equal, [problem.layers for problem in problems], bounds, method="highs")
    if found.x is None:
        return _Fractions(float("inf"), False, 0, 0, 0, tuple(0.0 for _ in problems))
    price = -found.ineqlin.marginals
    return _Fractions(
        float(found.fun),
        bool(found.x[-1] < 1e-9),
        float(price[4]),
        float(price[0] / unit),
        float(price[1] / unit + (price[2] + price[3]) / limits.link),
        tuple(float(value) for value in found.eqlin.marginals),
    )


def _may_be_feasible(found: _Fractions) -> bool:
    return np.isfinite(found.seconds)


def _whole(
    problems: Sequence[LayerProblem], ways: Sequence[Sequence[Way]], limits: Limits, bound: float
) -> Solution | None:
    """Whole layers in the known ways."""
    columns = _columns(ways)
    size = len(columns)
    unit = max(1.0, *(float(w.kept * problems[n].layers) for n, w in columns))
    # Variables: layers in each way, whether a way is used, seconds of forward and of backward.
    copied = np.array([1e-7 * way.offloaded / unit for _, way in columns])
    cost = np.concatenate([copied, np.zeros(size), [1.0, 1.0]])
    rows = _Rows()
    rows.add({i: -way.kept / unit for i, (_, way) in enumerate(columns)}, -limits.kept / unit)
    if np.isfinite(limits.host):
        rows.add({i: -way.offloaded / unit for i, (_, way) in enumerate(columns)}, -limits.host / unit)
    copies = {i: -way.offloaded / limits.link for i, (_, way) in enumerate(columns)}
    rows.add({**copies, 2 * size: 1.0}, 0.0)
    rows.add({**copies, 2 * size + 1: 1.0}, 0.0)
    rows.add({**{i: -way.seconds for i, (_, way) in enumerate(columns)}, 2 * size + 1: 1.0}, limits.backward)
    for number, problem in enumerate(problems):
        own = [i for i, (n, _) in enumerate(columns) if n == number]
        rows.add({i: 1.0 for i in own}, problem.layers)
        rows.add({i: -1.0 for i in own}, -problem.layers)
        rows.add({size + i: -1.0 for i in own}, -WAYS)
        for i in own:
            rows.add({size + i: float(problem.layers), i: -1.0}, 0.0)
    most = [float(problems[n].layers) for n, _ in columns]
    found = milp(
        cost,
        constraints=rows.at_least(2 * size + 2),
        bounds=Bounds(
            np.array([*[0.0] * (2 * size), limits.forward, limits.backward]),
            np.array([*most, *[1.0] * size, np.inf, np.inf]),
        ),
        integrality=np.array([*[1] * (2 * size), 0, 0]),
        options={"time_limit": 20.0},
    )
    if found.x is None:
        return None
    counts = np.round(found.x[:size]).astype(int)
    chosen = tuple(
        tuple((way, int(count)) for (n, way), count in zip(columns, counts, strict=True) if n == number and count)
        for number in range(len(problems))
    )
    return Solution(chosen, predicted_seconds(chosen, limits), bound)


def _exact(problems: Sequence[LayerProblem], limits: Limits, bound: float) -> Solution | None:
    """Every layer on its own."""
    matrix, cost, upper = _Rows(), list[float](), list[float]()
    kept, offloaded, again = dict[int, float](), dict[int, float](), dict[int, float]()
    starts: list[list[int]] = []
    unit = max(1.0, *(float(v.bytes) for problem in problems for v in problem.values))
    for problem in problems:
        starts.append([])
        count = len(problem.values)
        for _ in range(problem.layers):
            first = len(upper)
            starts[-1].append(first)
            upper += _most(problem)
            # Between ways of equal time, as few copies as can be.
            cost += [1e-9] * count
            cost += [1e-9 + 1e-7 * value.bytes / unit for value in problem.values] + [1e-9] * len(problem.ops)
            _add_layer(matrix, problem, first)
            kept |= {first + i: -value.bytes / unit for i, value in enumerate(problem.values)}
            offloaded |= {first + count + i: -value.bytes / unit for i, value in enumerate(problem.values)}
            again |= {first + 2 * count + i: -op.seconds for i, op in enumerate(problem.ops)}
            again |= {first + count + i: -value.copies for i, value in enumerate(problem.values)}
    end = len(upper)
    matrix.add(kept, -limits.kept / unit)
    if np.isfinite(limits.host):
        matrix.add(offloaded, -limits.host / unit)
    copies = {column: value * unit / limits.link for column, value in offloaded.items()}
    matrix.add({**copies, end: 1.0}, 0.0)
    matrix.add({**copies, end + 1: 1.0}, 0.0)
    matrix.add({**again, end + 1: 1.0}, limits.backward)
    found = milp(
        np.array([*cost, 1.0, 1.0]),
        constraints=matrix.at_least(end + 2),
        bounds=Bounds(np.array([*[0.0] * end, limits.forward, limits.backward]), np.array([*upper, np.inf, np.inf])),
        integrality=np.array([*[1] * end, 0, 0]),
        options={"time_limit": 2.0, "mip_rel_gap": 1e-4},
    )
    if found.x is None:
        return None
    chosen = np.round(found.x[:end]).astype(bool)
    ways = []
    for problem, places in zip(problems, starts, strict=True):
        counts: dict[Way, int] = {}
        count = len(problem.values)
        for first in places:
            own = chosen[first : first + len(_most(problem))]
            way = _way(problem, own[:count], own[count : 2 * count], own[2 * count :])
            counts[way] = counts.get(way, 0) + 1
        ways.append(tuple(counts.items()))
    return Solution(tuple(ways), predicted_seconds(ways, limits), bound)


def predicted_seconds(ways: Sequence[Sequence[tuple[Way, int]]], limits: Limits) -> float:
    """The model's time for layers in these ways."""
    flat = [(way, count) for known in ways for way, count in known]
    copies = sum(way.offloaded * count for way, count in flat) / limits.link
    again = sum(way.seconds * count for way, count in flat)
    return max(limits.forward, copies) + max(limits.backward + again, copies)
