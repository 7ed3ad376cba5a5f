"""Compile time, memory and text size of models on fake tensors, with the seconds of every stage and pass.

    python benchmarks/compile_time.py k3 --depths 12 24 48 93
    python benchmarks/compile_time.py path/to/config.json
    python benchmarks/compile_time.py k3-tiny --name ranks --depths 8 16 32 64 --worlds 1 2 8 32 128 --length 64

A target is what `moec compile` takes; depths are for presets, whose pattern of layers goes on beyond their own. Worlds
are numbers of ranks (mesh.fsdp), of which at most as many share the experts as there are experts. Each compilation runs
in a process of its own, so that the peak memory is its own. Processor seconds hardly depend on what else runs.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

from record import RESULTS, write_result


def main() -> None:
    """Measure the target at each depth, print the tables and write `results/compile_time.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--name", default="", help="suffix of the result file")
    parser.add_argument("--depths", type=int, nargs="+", default=[])
    parser.add_argument("--worlds", type=int, nargs="+", default=[1])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--one", type=int, nargs=2, help="internal: measure this depth and world, and print JSON")
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.target, *options.one, options.length)))
        return
    rows = [_in_process(options, depth, world) for depth in options.depths or [0] for world in options.worlds]
    for row in rows:
        stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row["stages"].items())
        print(
            f"{row['layers']:>3} layers, {row['world']:>3} ranks: {row['seconds']:.1f} s "
            f"({row['cpu_seconds']:.1f} s of processor time), "
            f"{row['peak_gib']:.2f} GiB, {row['lines']} lines, {row['nodes']['placed']} nodes"
        )
        print(f"    {stages}")
    passes = rows[-1]["passes"]
    for name, seconds in sorted(passes.items(), key=lambda item: -item[1]):
        print(f"    {name:<24} {seconds:.2f} s")
    name = f"compile_time_{options.name}" if options.name else "compile_time"
    print(write_result(name, " ".join(["python", *sys.argv]), rows, RESULTS))


def measure(target: str, depth: int, world: int, length: int) -> dict[str, Any]:
    """One compilation in this process; depth 0 keeps the target's own."""
    from moec import Plan
    from moec.arguments import is_preset
    from moec.compiler.plan import MeshPlan
    from moec.driver import build as compile_program
    from moec.targets import fake_target

    started, worked = time.perf_counter(), time.process_time()
    model = _shortened(target, depth) if depth and is_preset(target) else fake_target(target)
    model.train()
    experts = getattr(model.config, "experts", 1)
    mesh = MeshPlan(fsdp=world, ep=max(n for n in range(1, min(world, experts) + 1) if world % n == 0))
    result = compile_program(model, Plan(batch=1, length=length, packing=True, mesh=mesh))
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - worked
    assert result.program is not None
    passes: dict[str, float] = {}
    for record in result.log.records:
        passes[record.name] = passes.get(record.name, 0.0) + record.seconds
    return {
        "target": target,
        "layers": depth or _depth(model),
        "world": world,
        "ep": mesh.ep,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "lines": len(result.program.text.splitlines()),
        "stages": {stage.stage: stage.seconds for stage in result.log.stages},
        "nodes": {stage.stage: stage.nodes for stage in result.log.stages},
        "passes": passes,
    }


def _shortened(preset: str, depth: int) -> Any:
    from moec.compiler._torch_compat import FakeTensorMode, ShapeEnv
    from moec.models.build import build
    from moec.models.presets import preset as config_of

    config = config_of(preset)
    pattern = [layer + base for base in range(0, depth, config.layers) for layer in config.full_attention_layers]
    full = tuple(layer for layer in pattern if layer <= depth)
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        return build(replace(config, layers=depth, full_attention_layers=full))


def _depth(model: Any) -> int:
    config = model.config
    return getattr(config, "num_hidden_layers", None) or config.layers


def _in_process(options: argparse.Namespace, depth: int, world: int) -> dict[str, Any]:
    one = ["--one", str(depth), str(world)]
    command = [sys.executable, __file__, options.target, "--length", str(options.length), *one]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
