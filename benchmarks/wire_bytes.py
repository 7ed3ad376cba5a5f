"""Bytes on the wire of one step, as counted in lock step and as the formula says, on several meshes.

    python benchmarks/wire_bytes.py k3-tiny --length 64

The ranks run in this process (`step.simulate_ranks()`), with packed documents of random tokens. Both numbers are of
all ranks together, forward and backward of one microbatch; they have to be equal to the byte, or the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from record import RESULTS, write_result

import moec
from moec import Plan
from moec.compiler.plan import MeshPlan
from moec.models.build import build
from moec.rank_checks import joined_batches
from moec.traffic import traffic

MESHES = ((2, 1), (2, 2), (4, 2), (4, 4), (8, 2), (8, 8))


def main() -> None:
    """Count on every mesh, print a table and write `results/wire_bytes.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset")
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()
    rows = [row for fsdp, ep in MESHES for row in measure(options.preset, options.length, MeshPlan(fsdp=fsdp, ep=ep))]
    for row in rows:
        print(
            f"fsdp {row['fsdp']} ep {row['ep']} {row['kind']:>14} {row['calls']:>4} calls: "
            f"formula {row['formula']:>12,} bytes, counted {row['counted']:>12,}"
        )
    print(write_result("wire_bytes", " ".join(["python", *sys.argv]), rows, RESULTS))
    raise SystemExit(any(row["formula"] != row["counted"] for row in rows))


def measure(preset: str, length: int, mesh: MeshPlan) -> list[dict[str, Any]]:
    """One row per kind of collective."""
    torch.manual_seed(0)
    model, plan = build(preset).train(), Plan(batch=1, length=length, packing=True, mesh=mesh)
    step = moec.compile(model, plan)
    lines = traffic(step.simulate_ranks(), joined_batches(model, plan, 1, 0)[0])  # type: ignore[attr-defined]
    return [
        {
            "preset": preset,
            "fsdp": mesh.fsdp,
            "ep": mesh.ep,
            "kind": kind,
            "calls": sum(line.calls for line in lines if line.kind == kind),
            "formula": sum(line.formula for line in lines if line.kind == kind),
            "counted": sum(line.counted for line in lines if line.kind == kind),
        }
        for kind in dict.fromkeys(line.kind for line in lines)
    ]


if __name__ == "__main__":
    main()
