"""The solver of `cache.policy: auto` beside its bound, and its time, by depth; on random layers without a model.

    python benchmarks/cache_solver.py

Each problem has two kinds of layers, three of the first to one of the second, with 24 and 16 values; a third of the
bytes may be kept and a fifth wait in host memory. Reported are processor seconds of one thread, how far the answer is
above the bound at most, and in how many ways the layers are treated. Optima by trying everything are compared in
`tests/compiler/test_cache_solver.py`.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from typing import Any

from record import RESULTS, write_result

from moec.compiler.cache_problem import LayerProblem, Op, Value
from moec.compiler.cache_solver import Limits, solve

DEPTHS = (4, 12, 24, 48, 93, 186)
SEEDS = 5


def main() -> None:
    """Solve, print and write `results/cache_solver.json`."""
    rows = [measure(layers) for layers in DEPTHS]
    for row in rows:
        print(
            f"{row['layers']:>4} layers: {row['cpu_seconds']:.2f} s (worst {row['worst_cpu_seconds']:.2f}), "
            f"gap {100 * row['gap']:.3f} % (worst {100 * row['worst_gap']:.3f} %), {row['ways']} ways"
        )
    print(write_result("cache_solver", " ".join(["python", *sys.argv]), rows, RESULTS))


def measure(layers: int) -> dict[str, Any]:
    """Median and worst over the seeds."""
    seconds, gaps, ways = [], [], []
    for seed in range(SEEDS):
        problems = [random_layer(seed, 24, layers - layers // 4), random_layer(seed + 100, 16, layers // 4)]
        total = sum(value.bytes * problem.layers for problem in problems for value in problem.values)
        forward = sum(op.seconds * problem.layers for problem in problems for op in problem.ops)
        began = time.process_time()
        found = solve(problems, Limits(total / 3, total / 5, forward, 2 * forward, 55e9))
        seconds.append(time.process_time() - began)
        if found is None:
            raise SystemExit(f"seed {seed} with {layers} layers has no answer: choose other limits")
        gaps.append(found.gap)
        ways.append(max(len(known) for known in found.ways))
    return {
        "layers": layers,
        "cpu_seconds": statistics.median(seconds),
        "worst_cpu_seconds": max(seconds),
        "gap": statistics.median(gaps),
        "worst_gap": max(gaps),
        "ways": max(ways),
    }


def random_layer(seed: int, values: int, layers: int) -> LayerProblem:
    """A chain with skips: large products that take long, cheap pointwise values, one decision that is taken once."""
    chance = random.Random(seed)
    ops, made = [], []
    for index in range(values):
        product = chance.random() < 0.4
        reads = tuple(sorted(chance.sample(range(index), min(index, chance.randint(1, 2)))))
        ops.append(Op(reads, chance.uniform(4e-4, 3e-3) if product else chance.uniform(2e-5, 2e-4), index != 3))
        size = int(chance.uniform(8, 400) * 2**20)
        made.append(Value(f"v{index}", size, index, chance.random() < 0.8, size >= 1 << 20))
    return LayerProblem(tuple(made), tuple(ops), layers)


if __name__ == "__main__":
    main()
