"""Ranks against one rank, case by case: loss, every gradient, three optimizer steps (moec/rank_checks.py).

    torchrun --nproc-per-node 2 -m benchmarks.distributed.equality --out rows.jsonl k3-tiny:float32:ep=2

A case is MODEL:DTYPE and fields of the plan's mesh. Rank 0 appends one line for each. An error ends all ranks, since
nobody knows where the others are; who started them starts them again with the cases that are left.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.distributed.jobs import TIMED_OUT, Job, Outcome, run, torchrun
from moec.compiler.plan import Plan
from moec.models.build import build
from moec.models.presets import preset_names
from moec.rank_checks import verify_ranks
from moec.runtime.groups import connect
from moec.runtime.launch import join
from moec.verification import Report

MODELS = ("k3-tiny", "k3-dsa-tiny", "mixtral", "deepseek_v3", "qwen3_next")
FORMS = ("capacity=8.0", "gather=keep:prefetch=3", "prefetch=0")
"""Other forms of the same collectives, on the first model."""
START_SECONDS = 60.0


@dataclass(frozen=True)
class Case:
    """One model in one dtype on one layout."""

    model: str
    dtype: torch.dtype
    mesh: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Case:
        model, dtype, *mesh = text.split(":")
        return cls(model, getattr(torch, dtype), tuple(f"mesh.{field}" for field in mesh))

    def plan(self, world: int) -> Plan:
        return Plan(batch=1, length=40, packing=self.is_preset).override([f"mesh.fsdp={world}", *self.mesh])

    @property
    def is_preset(self) -> bool:
        return self.model in preset_names()

    def build(self, device: torch.device) -> nn.Module:
        torch.manual_seed(0)
        if self.is_preset:
            return build(self.model, self.dtype, device).train()
        from moec.models.huggingface.adapter import from_config
        from moec.models.huggingface.tiny import tiny_config

        return from_config(tiny_config(self.model), dtype=self.dtype, device=device).train()


def cases(world: int, models: Sequence[str], dtypes: Sequence[str]) -> list[str]:
    """Every model and dtype on every layout of `world` ranks, and the other forms."""
    layouts = [f"ep={ep}" for ep in range(1, world + 1) if world % ep == 0]
    found = [f"{model}:{dtype}:{layout}" for model in models for dtype in dtypes for layout in layouts]
    return found + [f"{models[0]}:{dtypes[0]}:ep={world}:{form}" for form in FORMS]


def check(out: Path, names: Sequence[str], world: int, device: str, seconds: float) -> Iterator[Outcome]:
    """Run cases in ranks of their own, and start ranks again as long as cases are left; outcomes of what failed.

    seconds: for one case. Each leaves one line in `out`; one whose ranks hung, or died without one, gets it here.
    """
    left = list(names)
    while left:
        limit = START_SECONDS + seconds * len(left)
        outcome = run(Job(left[0], torchrun(world, "equality", "--device", device, "--out", str(out), *left), limit))
        done = [row["case"] for row in rows(out)]
        began, left = left, [name for name in left if name not in done]
        if outcome.code != 0:
            yield outcome
        if left == began or outcome.code == TIMED_OUT:
            how = "timed out" if outcome.code == TIMED_OUT else f"ended with {outcome.code}"
            _append(out, {"case": left.pop(0), "equal": False, "error": how})


def rows(out: Path) -> list[dict[str, Any]]:
    """The lines of a file of results."""
    return [json.loads(line) for line in out.read_text().splitlines()] if out.is_file() else []


def main() -> None:
    """Be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("cases", nargs="+")
    options = parser.parse_args()
    device = join(torch.device(options.device))
    for name in options.cases:
        try:
            began = time.perf_counter()
            row = verdict(verify(Case.of(name), device)) | {"seconds": round(time.perf_counter() - began, 1)}
        except Exception as error:
            _append(options.out, {"case": name, "equal": False, "error": f"{type(error).__name__}: {error}"})
            raise
        if dist.get_rank() == 0:
            _append(options.out, {"case": name, **row})
    dist.destroy_process_group()


def verify(case: Case, device: torch.device) -> Report:
    """What one rank does; all call it together."""
    plan = case.plan(dist.get_world_size())
    ranks = connect(plan.mesh, device)
    return verify_ranks(case.build(device), plan, ranks, case.build(device) if ranks.is_first else None)


def verdict(report: Report) -> dict[str, Any]:
    """Whether all is equal, the losses, and of each kind of number the error that is nearest to its bound."""
    worst: dict[str, Any] = {}
    for one in sorted(report.comparisons, key=lambda one: one.error / one.bound if one.bound else one.error):
        worst[one.kind] = {"error": one.error, "bound": one.bound, "at": one.name, "step": one.step}
    differing = [f"step {one.step} {one.kind} {one.name}" for one in report.differences()]
    return {
        "equal": report.equal and bool(report.comparisons),
        "compared": len(report.comparisons),
        "losses": report.losses,
        "worst": worst,
        "differing": differing[:10],
    }


def _append(out: Path, row: dict[str, Any]) -> None:
    with out.open("a") as stream:
        stream.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
