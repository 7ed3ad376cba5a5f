"""Step time on several ranks: moec with overlap on and off beside PyTorch FSDP2 with eager experts, on one model.

    torchrun --nproc-per-node 2 -m benchmarks.distributed.step --out step.json

All variants train copies of the same model on the same rows in the same processes. They take turns step by step, each
after a barrier and in another order every round. Reported: the median, the ratio to moec in the same round, peak
memory, losses, and on GPUs what a profile of one step says of its communication (overlap.py). A variant that fails is
reported with its error, and the others go on.

    moec                  experts over all ranks, the plan's prefetch of 1
    moec prefetch 0       nothing is gathered ahead, every reduction is waited for at once
    moec prefetch 2       two buckets ahead
    moec keep             weights are gathered once and kept from forward to backward
    moec no experts       ep = 1: experts are sharded and gathered as all other weights
    moec reference KDA    without the fused attention kernel, which eager PyTorch does not have either
    fsdp2                 fsdp2.py
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import moec
from benchmarks.distributed.fsdp2 import Step, fsdp2_step
from benchmarks.distributed.overlap import overlap
from moec import Plan
from moec.compiler.plan import MeshPlan, OptimizerPlan
from moec.models.build import build
from moec.models.k3.model import K3Model
from moec.runtime.launch import join

REFERENCE = "moec"
WARMUP = 3


def main() -> None:
    """Be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", default="k3-mini")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    options = parser.parse_args()
    device = join(torch.device(options.device))
    for rows in measure(options, device):
        if dist.get_rank() == 0:
            options.out.write_text(json.dumps(rows, indent=1) + "\n")
    dist.destroy_process_group()


def measure(options: argparse.Namespace, device: torch.device) -> Iterator[list[dict[str, Any]]]:
    """One row per variant, first with times and then with more of them profiled; all ranks call it together."""
    rows = {name: {"variant": name} for name in options.variants}
    steps = {name: made for name in options.variants if (made := _made(name, options, device, rows[name]))}
    times: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(options.steps):
        batch = rows_of(options, number, device)
        turn = number % max(1, len(steps))
        for name in [*steps][turn:] + [*steps][:turn]:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds, loss = _timed(steps[name], batch, device)
            times[name].append(seconds)
            losses[name].append(loss)
            if device.type == "cuda":
                rows[name]["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    for name in steps:
        found = times[name][WARMUP:]
        pairs = zip(found, times.get(REFERENCE, times[name])[WARMUP:], strict=True)
        rows[name] |= {
            "shape": f"{options.preset}, B={options.batch} T={options.length} {options.dtype} on each rank",
            "ranks": dist.get_world_size(),
            "rounds": len(found),
            "step_ms": 1e3 * statistics.median(found),
            "fastest_ms": 1e3 * min(found),
            "ratio": statistics.median(a / b for a, b in pairs),
            "tokens_per_second": options.batch * options.length * dist.get_world_size() / statistics.median(found),
            "losses": [losses[name][0], losses[name][-1]],
        }
    yield list(rows.values())
    for name in steps if device.type == "cuda" else ():
        _profile(rows[name], steps[name], rows_of(options, options.steps, device))
        yield list(rows.values())


def _made(name: str, options: argparse.Namespace, device: torch.device, row: dict[str, Any]) -> Step | None:
    """A variant's step, or None with the error in its row; ranks agree on which."""
    began, step = time.perf_counter(), None
    try:
        step = VARIANTS[name](options, plan_of(options), device)
    except Exception as error:
        traceback.print_exc()
        row["error"] = f"{type(error).__name__}: {error}"
    row["make_seconds"] = round(time.perf_counter() - began, 1)
    gc.collect()
    made = torch.tensor([int(step is not None)])
    dist.all_reduce(made, dist.ReduceOp.MIN)
    return step if int(made) else None


def _timed(step: Step, batch: dict[str, Tensor], device: torch.device) -> tuple[float, float]:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    began = time.perf_counter()
    loss = float(step(batch))
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter() - began, loss


def _profile(row: dict[str, Any], step: Step, batch: dict[str, Tensor]) -> None:
    dist.barrier()
    found = overlap(lambda: step(batch))
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, found["hidden_share"])
    row["overlap"] = found | {"hidden_share_of_ranks": shares}


def plan_of(options: argparse.Namespace) -> Plan:
    """Experts over all ranks; a constant learning rate."""
    world = dist.get_world_size()
    optimizer = OptimizerPlan(lr=3e-4, schedule="constant")
    mesh = MeshPlan(fsdp=world, ep=world)
    return Plan(batch=options.batch, length=options.length, packing=True, mesh=mesh, optimizer=optimizer)


def rows_of(options: argparse.Namespace, seed: int, device: torch.device) -> dict[str, Tensor]:
    """This rank's rows: a repeated ramp with noise, so that the loss can fall; two documents a row."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    shape = options.batch, options.length
    start = torch.randint(0, 50, (options.batch, 1), generator=generator)
    ids = (torch.arange(options.length) % 97 + torch.randint(0, 3, shape, generator=generator) + start) % 250
    documents = (torch.arange(options.length) >= options.length // 3).long().expand(shape).contiguous()
    labels = ids.clone()
    labels[:, 0] = labels[:, options.length // 3] = -100
    batch = {"input_ids": ids, "labels": labels, "document_ids": documents}
    return {name: value.to(device) for name, value in batch.items()}


def _moec(*disable: str, **mesh: Any) -> Callable[[argparse.Namespace, Plan, torch.device], Step]:
    def make(options: argparse.Namespace, plan: Plan, device: torch.device) -> Step:
        torch.manual_seed(0)
        with moec.deferred_init():
            model = build(options.preset, getattr(torch, options.dtype), device).train()
        chosen = replace(plan, mesh=replace(plan.mesh, **mesh), disable=disable)
        step = moec.compile(model, chosen)
        return lambda batch: step(batch).loss

    return make


def _fsdp2(options: argparse.Namespace, plan: Plan, device: torch.device) -> Step:
    torch.manual_seed(0)
    model: K3Model = build(options.preset, torch.float32, device).train()
    return fsdp2_step(model, plan, getattr(torch, options.dtype), device)


VARIANTS: dict[str, Callable[[argparse.Namespace, Plan, torch.device], Step]] = {
    REFERENCE: _moec(),
    "moec prefetch 0": _moec(prefetch=0),
    "moec prefetch 2": _moec(prefetch=2),
    "moec keep": _moec(gather="keep"),
    "moec no experts": _moec(ep=1),
    "moec reference KDA": _moec("fuse_kda"),
    "fsdp2": _fsdp2,
}


if __name__ == "__main__":
    main()
