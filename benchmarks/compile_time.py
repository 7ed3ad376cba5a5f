"""Compile time, memory and text size of presets on fake tensors, with the seconds of every stage and pass.

    python benchmarks/compile_time.py k3 --depths 12 24 48 93
    python benchmarks/compile_time.py path/to/config.json

A target is what `moec compile` takes; depths are for presets. Each depth runs in a process of its own, so that the
peak memory is its own.
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
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--one", type=int, help="internal: measure this depth and print JSON")
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.target, options.one, options.length)))
        return
    rows = [_in_process(options, depth) for depth in options.depths or [0]]
    for row in rows:
        stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row["stages"].items())
        print(f"{row['layers']:>3} layers: {row['seconds']:.1f} s, {row['peak_gib']:.2f} GiB, {row['lines']} lines")
        print(f"    {stages}")
    passes = rows[-1]["passes"]
    for name, seconds in sorted(passes.items(), key=lambda item: -item[1]):
        print(f"    {name:<24} {seconds:.2f} s")
    name = f"compile_time_{options.name}" if options.name else "compile_time"
    print(write_result(name, " ".join(["python", *sys.argv]), rows, RESULTS))


def measure(target: str, depth: int, length: int) -> dict[str, Any]:
    """One compilation in this process; depth 0 keeps the target's own."""
    from moec import Plan
    from moec.driver import build as compile_program
    from moec.targets import fake_target, is_preset

    started = time.perf_counter()
    model = _shortened(target, depth) if depth and is_preset(target) else fake_target(target)
    model.train()
    result = compile_program(model, Plan(batch=1, length=length, packing=True))
    seconds = time.perf_counter() - started
    assert result.program is not None
    passes: dict[str, float] = {}
    for record in result.log.records:
        passes[record.name] = passes.get(record.name, 0.0) + record.seconds
    return {
        "target": target,
        "layers": depth or _depth(model),
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": seconds,
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
    full = tuple(layer for layer in config.full_attention_layers if layer <= depth)
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        return build(replace(config, layers=depth, full_attention_layers=full))


def _depth(model: Any) -> int:
    config = model.config
    return getattr(config, "num_hidden_layers", None) or config.layers


def _in_process(options: argparse.Namespace, depth: int) -> dict[str, Any]:
    command = [sys.executable, __file__, options.target, "--length", str(options.length), "--one", str(depth)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
