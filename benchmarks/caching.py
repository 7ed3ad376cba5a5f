"""Step time under a limit of device memory: the solver beside other ways to get by with less, on one GPU.

    python benchmarks/caching.py --device cuda
    python benchmarks/caching.py --device cuda --seconds 60 --only k3 dense
    python benchmarks/caching.py --table
    python benchmarks/caching.py --device cpu --scale 16 --only k3 --name caching_cpu

For each model of `caching_graphs.py`: the times of its ops (`moec.measure_ops`), and from the predicted peaks of
everything kept and everything recomputed three limits between them, at `SHARES` of the way. A cell is a model and a
limit. In it the solver meets every other variant whose measured peak is within the limit. Variants that know no limit
run once. `--table` prints how much faster the solver is than the best of them, and than full recomputation.

The results are in `results/NAME.json`, line by line as they come; what is there is not run again. What would begin
after `--seconds` is left for the next call. Models compile in processes of their own; a step is timed while nothing
else uses the device: the median of `--steps` whole steps after four (two where a step takes half a second), and of
forward and backward alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gpu_workers
import torch
from caching_graphs import GRAPHS
from caching_largest import LargestFirst
from caching_table import print_table
from caching_torch import EXPENSIVE, WAYS, TorchStep, kernels_for_autograd
from record import RESULTS, environment
from step_peak import measure_peak
from torch import Tensor, nn

import moec
from moec import driver
from moec.compiler.allocations import held_bytes
from moec.compiler.plan import CachePlan, CacheRule, Plan
from moec.passes import place_cache
from moec.placing import step_over
from moec.random_batch import random_batches
from moec.runtime.program import load_program

SHARES = (0.25, 0.5, 0.75)
GIB = 2**30
ONCE: dict[str, Any] = {"keep": "keep", "recompute": "recompute", "selective": "rules"} | dict.fromkeys(WAYS, "keep")
"""Variants that know no limit, with their policy: rules keep what torch's selective checkpointing keeps here."""
SLOW = "torch save_on_cpu"
LIMITED = ("largest first", "solver")


def main() -> None:
    """Run what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=int, default=1, help="divides all widths, for a test without a GPU")
    parser.add_argument("--only", nargs="*", default=list(GRAPHS))
    parser.add_argument("--variants", nargs="*", default=[*ONCE, *LIMITED])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--processes", type=int, default=12, help="that compile at a time")
    parser.add_argument("--rooms", type=int, default=3, help="models with their states on the device at a time")
    parser.add_argument("--name", default="caching")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    results = Results(options.folder, options.name)
    if not options.table:
        run(options, results)
    print_table(results.rows)


class Results:
    """The rows of a result file, written whenever one is added."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path, self.times = folder / f"{name}.json", folder / f"{name}_times.json"
        self.rows: list[dict[str, Any]] = json.loads(self.path.read_text())["rows"] if self.path.exists() else []

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        command = " ".join(["python", *sys.argv])
        self.path.write_text(json.dumps({"command": command, **environment(), "rows": self.rows}, indent=1) + "\n")

    def find(self, graph: str, variant: str, limit: int | None = None) -> dict[str, Any] | None:
        """The row of a cell that has one."""
        found = (
            row for row in self.rows if (row["graph"], row["variant"], row.get("limit")) == (graph, variant, limit)
        )
        return next((row for row in found if row.get("error") is None), None)


def run(options: argparse.Namespace, results: Results) -> None:
    """All cells that are missing."""
    workers = gpu_workers.Workers(options.processes, options.rooms, options.seconds)
    where = options.device, options.scale
    for graph in options.only:
        if results.find(graph, "peaks"):
            _add_cells(workers, results, graph, options)
        else:
            workers.add((graph, "peaks"), peaks, graph, *where, str(_times(results, graph)))
    for (graph, variant, *_), row in workers.results():
        if row is None:
            print(f"{graph}, {variant}: left for another run", flush=True)
            continue
        if isinstance(row, str):
            row = {"graph": graph, "variant": variant, "error": row}
        print({name: value for name, value in row.items() if value is not None}, flush=True)
        results.add(row)
        if variant == "peaks" and row["error"] is None:
            _add_cells(workers, results, graph, options)
    workers.close()


def _times(results: Results, graph: str) -> Path:
    return results.times.with_name(f"{results.times.stem}_{graph.replace(' ', '_')}.json")


def _add_cells(workers: gpu_workers.Workers, results: Results, graph: str, options: argparse.Namespace) -> None:
    found = results.find(graph, "peaks")
    assert found is not None
    limits = [int(found["recompute"] + share * (found["keep"] - found["recompute"])) for share in SHARES]
    cells: list[tuple[str, int | None]] = [(variant, None) for variant in ONCE]
    cells += [(variant, limit) for limit in limits for variant in LIMITED]
    cells.sort(key=lambda cell: cell[0] == SLOW)
    for variant, limit in cells:
        if variant in options.variants and not results.find(graph, variant, limit):
            arguments = variant, limit, options.device, options.scale, str(_times(results, graph)), options.steps
            workers.add((graph, variant), cell, graph, *arguments)


def peaks(graph: str, device: str, scale: int, times: str) -> dict[str, Any]:
    """The predicted peaks of a model with everything kept and recomputed, and its ops' times in a file."""
    model, plan = _model(graph, device, scale), GRAPHS[graph].plan(scale)
    found = {}
    for policy in ("keep", "recompute"):
        memory = driver.build(model, dataclasses.replace(plan, cache=CachePlan(policy=policy))).log.memory
        assert memory is not None
        found[policy] = memory.peak
    batch = _batch(plan, model.config.vocab_size, device)
    with gpu_workers.room(), gpu_workers.device() as used:
        moec.measure_ops(model, plan, batch, runs=0)  # compiles the kernels while others run
        used.alone()
        moec.measure_ops(model, plan, batch).write(times)
    tokens = plan.batch * plan.length
    return {"graph": graph, "variant": "peaks", "tokens": tokens, "parameters": _size(model), **found, "error": None}


def cell(
    graph: str, variant: str, limit: int | None, device: str, scale: int, times: str, steps: int
) -> dict[str, Any]:
    """One variant of a model, measured."""
    model, plan = _model(graph, device, scale), GRAPHS[graph].plan(scale)
    policy = ONCE.get(variant, "auto")
    policy = selective_rules(model, plan) if policy == "rules" else policy
    plan = dataclasses.replace(plan, cache=CachePlan(hbm=limit, policy=policy, times=times))
    place_cache.CacheSearch = LargestFirst if variant == "largest first" else CACHE_SEARCH  # type: ignore[misc]
    began = time.perf_counter()
    found = driver.build(model, plan)
    compile_seconds = time.perf_counter() - began
    folder = Path(tempfile.mkdtemp(prefix="moec-caching-"))
    driver.write(found, folder)
    with gpu_workers.room(), gpu_workers.device() as used:
        step: Any = step_over(model, load_program(folder), folder, found.log, plan, found.unreached)
        batch = _batch(plan, step.vocabulary, device)
        if variant in WAYS:
            kernels_for_autograd()
            step = TorchStep(found, step, variant)
        measured = _measure(step, batch, steps, device, used)
        del step
    shutil.rmtree(folder)
    memory, timing = found.log.memory, found.timing
    assert memory is not None
    assert timing is not None
    ours = variant not in WAYS
    return {
        "graph": graph,
        "variant": variant,
        "limit": limit,
        **measured,
        "predicted_peak": memory.peak if ours else None,
        "predicted_host": memory.host if ours else None,
        "predicted_ms": round(1e3 * timing.total, 2) if ours else None,
        "wait_ms": round(1e3 * (timing.forward_wait + timing.backward_wait), 2) if ours else None,
        "decisions": [match.what for _, match in found.log.matches("place_cache")],
        "compile_seconds": round(compile_seconds, 1),
        "error": None,
    }


def selective_rules(model: nn.Module, plan: Plan) -> tuple[CacheRule, ...]:
    """Recompute all in layers but the results of `EXPENSIVE` ops that the model has."""
    placements = driver.build(model, plan).log.placements
    found = {row.op for rows in placements.values() for row in rows} & {str(op) for op in EXPENSIVE}
    return (
        CacheRule("recompute", "*layers.*"),
        *(CacheRule("keep", "*", op.removesuffix(".default")) for op in sorted(found)),
    )


CACHE_SEARCH = place_cache.CacheSearch


def _measure(step: Any, batch: dict[str, Tensor], steps: int, device: str, used: gpu_workers.Device) -> dict[str, Any]:
    """First loss, times and the peak. The times are taken alone on the device."""
    state = getattr(step, "state", None) or step._step.state
    first = step(batch)
    loss = float(first if isinstance(first, Tensor) else first.loss)
    step(batch)
    state.clear_gradients()
    known = held_bytes(state.tensors()) + held_bytes(batch)
    peak, libraries = measure_peak(lambda: step(batch), known, device)
    used.alone()
    steps = max(2, min(steps, int(1.0 / _timed(lambda: step(batch), device))))
    whole = [_timed(lambda: step(batch), device) for _ in range(steps)]
    halves = [_timed(lambda: step.gradients(batch), device) for _ in range(max(2, steps // 2))]
    return {
        "step_ms": round(1e3 * statistics.median(whole), 2),
        "spread_ms": round(1e3 * (max(whole) - min(whole)), 2),
        "gradients_ms": round(1e3 * statistics.median(halves), 2),
        "peak": peak,
        "libraries": libraries,
        "loss": loss,
    }


def _timed(function: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _model(graph: str, device: str, scale: int) -> nn.Module:
    with gpu_workers.device():
        torch.manual_seed(0)
        dtype = torch.bfloat16 if scale == 1 else torch.float32
        return GRAPHS[graph].make(dtype, device, scale).train()


def _batch(plan: Plan, vocabulary: int | None, device: str) -> dict[str, Tensor]:
    batch: Mapping[str, Tensor] = next(random_batches(plan, vocabulary, 0))
    return {name: value.to(device) for name, value in batch.items()}


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    main()
