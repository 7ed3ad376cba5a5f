"""The solver against every possible choice: the same optimum on small problems, and a bound that holds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from moec.compiler import cache_solver
from moec.compiler.cache_problem import LayerProblem, Op, Value
from moec.compiler.cache_solver import Limits, Way, predicted_seconds, solve

WAYS = ("keep", "offload", "recompute", None)


def random_problem(seed: int, values: int, layers: int) -> LayerProblem:
    """A chain with skips; some ops must run once, some values must stay, some are read by backward."""
    chance = random.Random(seed)
    ops = [
        Op(
            tuple(sorted(chance.sample(range(i), min(i, chance.randint(0, 2))))),
            chance.randint(1, 9) * 1e-3,
            chance.random() < 0.8,
        )
        for i in range(values)
    ]
    made = [
        Value(f"v{i}", chance.randint(1, 9) << 20, i, chance.random() < 0.7, chance.random() < 0.7)
        for i in range(values)
    ]
    return LayerProblem(tuple(made), tuple(ops), layers)


def all_ways(problem: LayerProblem) -> Iterator[Way]:
    for choice in itertools.product(WAYS, repeat=len(problem.values)):
        again = {problem.values[i].maker for i, way in enumerate(choice) if way == "recompute"}
        if any(value.needed and way is None for value, way in zip(problem.values, choice, strict=True)):
            continue
        if any(way == "offload" and not v.may_offload for v, way in zip(problem.values, choice, strict=True)):
            continue
        ops = [problem.ops[i] for i in again]
        if all(op.may_run_again and all(choice[read] is not None for read in op.reads) for op in ops):
            sizes = {d: sum(v.bytes for v, way in zip(problem.values, choice, strict=True) if way == d) for d in WAYS}
            yield Way((), sizes["keep"], sizes["offload"], sum(op.seconds for op in ops))


def below(one: Way, other: Way) -> bool:
    """Whether a way is in nothing worse than another."""
    return one.kept <= other.kept and one.offloaded <= other.offloaded and one.seconds <= other.seconds


def brute_force(problems: Sequence[LayerProblem], limits: Limits) -> float | None:
    """The least time over all ways of all layers."""
    choices = []
    for problem in problems:
        ways = {(w.kept, w.offloaded, w.seconds): w for w in all_ways(problem)}.values()
        useful = [w for w in ways if not any(o is not w and below(o, w) for o in ways)]
        choices.append(list(itertools.combinations_with_replacement(useful, problem.layers)))
    best = None
    for combination in itertools.product(*choices):
        flat = [(way, 1) for ways in combination for way in ways]
        fits = sum(w.kept for w, _ in flat) <= limits.kept and sum(w.offloaded for w, _ in flat) <= limits.host
        if fits:
            seconds = predicted_seconds([flat], limits)
            best = seconds if best is None else min(best, seconds)
    return best


def case(seed: int) -> tuple[list[LayerProblem], Limits]:
    problems = [random_problem(seed, 4, 2), random_problem(seed + 1000, 3, 2)]
    total = sum(value.bytes * problem.layers for problem in problems for value in problem.values)
    return problems, Limits(total * random.Random(seed).uniform(0.1, 0.6), total * 0.3, 0.01, 0.02, 2e9)


@pytest.mark.parametrize("first", range(0, 30, 10))
def test_small_problems_are_solved_exactly(first: int) -> None:
    solved = 0
    for seed in range(first, first + 10):
        problems, limits = case(seed)
        found, best = solve(problems, limits), brute_force(problems, limits)
        assert (found is None) == (best is None)
        if found is not None and best is not None:
            solved += 1
            assert found.seconds == pytest.approx(best, rel=1e-6)
            assert found.bound <= best * (1 + 1e-6)
            assert sum(w.kept * n for ways in found.ways for w, n in ways) <= limits.kept * (1 + 1e-9)
            assert sum(w.offloaded * n for ways in found.ways for w, n in ways) <= limits.host * (1 + 1e-9)
    assert solved >= 7


def test_deep_problems_are_near_the_bound_in_few_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_solver, "EXACT", 0)
    for seed in range(5):
        problems = [random_problem(seed, 20, 70), random_problem(seed + 50, 16, 24)]
        total = sum(value.bytes * problem.layers for problem in problems for value in problem.values)
        found = solve(problems, Limits(0.4 * total, 0.2 * total, 0.5, 1.0, 1e10))
        assert found is not None
        assert 0 <= found.gap <= 0.01
        assert all(len(ways) <= cache_solver.WAYS for ways in found.ways)
        assert [sum(count for _, count in ways) for ways in found.ways] == [70, 24]


def test_nothing_is_copied_or_computed_where_everything_fits() -> None:
    problems, limits = case(3)
    found = solve(problems, Limits(1e12, 1e12, limits.forward, limits.backward, limits.link))
    assert found is not None
    assert found.seconds == pytest.approx(limits.forward + limits.backward)
    assert all(way.offloaded == 0 and way.seconds == 0 for ways in found.ways for way, _ in ways)
