"""Step time of several gloo ranks: moec with and without prefetch beside PyTorch FSDP2, on one dense model, in one run.

    python benchmarks/sharded_step.py --ranks 4 --steps 30

Every variant trains a copy of the same model (grouped-query attention and gated MLPs, no experts) on the same rows with
the same clipping and AdamW, in the same processes. They take turns step by step, each after a barrier and in another
order every round, so that a drift of the machine meets all. Reported are, over the rounds after the warm-up:

    wall    median seconds from the barrier before a step to the barrier behind it
    cpu     median processor seconds of all ranks together
    ratio   median over rounds of a variant's seconds relative to FSDP2's in the same round

FSDP2 is `torch.distributed.fsdp.fully_shard` on each layer and on the whole model, `clip_grad_norm_` and the fused
AdamW; the loss is the model's own. `compiled` compiles its layers with torch.compile first, as torchtitan does.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from record import RESULTS, write_result
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import moec
from moec import Plan
from moec.compiler.plan import MeshPlan, OptimizerPlan
from moec.models.build import build
from moec.models.k3.config import K3Config
from moec.models.k3.model import K3Model
from moec.runtime.launch import join, launch
from moec.runtime.launched import launched
from moec.runtime.optimizer import parameter_groups
from moec.runtime.state import StepState

Step = Callable[[Tensor], float]

WARMUP = 3
REFERENCE = "fsdp2"


def main() -> None:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    options = parser.parse_args()
    if launched() is None:
        raise SystemExit(launch([sys.executable, *sys.argv], options.ranks))
    torch.set_num_threads(1)
    join(torch.device("cpu"))
    rows = measure(options)
    if dist.get_rank() == 0:
        for row in rows:
            print(
                f"{row['variant']:>16}: {row['wall_s']:.3f} s a step, {row['cpu_s']:.3f} s of processor time; relative "
                f"to FSDP2 {row['wall_ratio']:.3f} and {row['cpu_ratio']:.3f}; loss {row['losses'][-1]:.5f}"
            )
        print(write_result("sharded_step", " ".join(["python", *sys.argv]), rows, RESULTS))
    dist.destroy_process_group()


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per variant; all ranks call it together."""
    torch.manual_seed(0)
    model, plan = build(config_of(options)).train(), plan_of(options)
    steps = {name: VARIANTS[name](copy.deepcopy(model), plan) for name in options.variants}
    wall: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(options.steps):
        ids = rows_of(options, seed=number)[dist.get_rank()].unsqueeze(0)
        turn = number % len(steps)
        for name in [*steps][turn:] + [*steps][:turn]:
            dist.barrier()
            began, worked = time.perf_counter(), time.process_time()
            losses[name].append(steps[name](ids))
            used = torch.tensor(time.process_time() - worked)
            dist.barrier()
            wall[name].append(time.perf_counter() - began)
            dist.all_reduce(used)
            cpu[name].append(float(used))
    return [
        {
            "variant": name,
            "ranks": options.ranks,
            "shape": f"B=1 T={options.length} float32 on each rank",
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "rounds": options.steps - WARMUP,
            "wall_s": statistics.median(wall[name][WARMUP:]),
            "cpu_s": statistics.median(cpu[name][WARMUP:]),
            "wall_ratio": _ratio(wall, name),
            "cpu_ratio": _ratio(cpu, name),
            "losses": [losses[name][0], losses[name][-1]],
        }
        for name in steps
    ]


def config_of(options: argparse.Namespace) -> K3Config:
    """A dense model: grouped-query attention in every layer and a gated MLP, four query heads to a key head."""
    heads = options.hidden // 64
    return K3Config(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        layers=options.layers,
        full_attention_layers=tuple(range(1, options.layers + 1)),
        full_attention="gqa",
        heads=heads,
        kv_heads=max(1, heads // 4),
        head_dim=64,
        dense_layers=options.layers,
        dense_size=3 * options.hidden,
        activation="silu",
    )


def plan_of(options: argparse.Namespace) -> Plan:
    """One row on each rank; a constant learning rate."""
    optimizer = OptimizerPlan(lr=1e-3, schedule="constant")
    return Plan(batch=1, length=options.length, mesh=MeshPlan(fsdp=options.ranks), optimizer=optimizer)


def rows_of(options: argparse.Namespace, seed: int) -> Tensor:
    """int64 [ranks, T]: noisy ramps, so that the loss can fall."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(0, 97, (options.ranks, 1), generator=generator)
    noise = torch.randint(0, 3, (options.ranks, options.length), generator=generator)
    return (start + torch.arange(options.length)) % 97 + noise


def moec_step(model: K3Model, plan: Plan, **mesh: Any) -> Step:
    """The compiled step."""
    step = moec.compile(model, replace(plan, mesh=replace(plan.mesh, **mesh)))
    return lambda ids: float(step(ids, ids).loss)


def fsdp2_step(model: K3Model, plan: Plan, *, compiled: bool = False) -> Step:
    """FSDP2 with one group of parameters per layer, whose two sublayers the model calls one after the other."""
    mesh = init_device_mesh("cpu", (plan.mesh.world,))
    groups = parameter_groups(StepState.from_module(model))
    for layer in model.layers:
        sublayers = [layer.attention, layer.feed_forward]
        if compiled:
            for sublayer in sublayers:
                sublayer.compile()
        fully_shard(sublayers, mesh=mesh)
    fully_shard(model, mesh=mesh)
    options, parameters = plan.optimizer, dict(model.named_parameters())
    decays = {"decay": options.weight_decay, "no_decay": 0.0}
    optimizer = torch.optim.AdamW(
        [{"params": [parameters[n] for n in groups[kind]], "weight_decay": decays[kind]} for kind in decays],
        lr=options.lr,
        betas=options.betas,
        eps=options.eps,
        fused=True,
    )

    def step(ids: Tensor) -> float:
        loss = model(ids, ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        return float(mean) / plan.mesh.world

    return step


VARIANTS: dict[str, Callable[[K3Model, Plan], Step]] = {
    REFERENCE: fsdp2_step,
    "fsdp2 compiled": lambda model, plan: fsdp2_step(model, plan, compiled=True),
    "moec": moec_step,
    "moec prefetch 0": lambda model, plan: moec_step(model, plan, prefetch=0),
}


def _ratio(times: dict[str, list[float]], name: str) -> float:
    """Median over rounds of a variant's time relative to the reference's."""
    return statistics.median(a / b for a, b in zip(times[name][WARMUP:], times[REFERENCE][WARMUP:], strict=True))


if __name__ == "__main__":
    main()
