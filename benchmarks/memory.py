"""Predicted peak memory of a step beside what the allocator of the device found, for many plans.

    python benchmarks/memory.py --device cuda
    python benchmarks/memory.py --device cpu --scale 16

Four layers of `k3-mini` (three KDA, one of full attention, three of them with experts), and two Hugging Face models of
like size, divided by `--scale` in every width. On CUDA the measure is `torch.cuda.max_memory_allocated` of a step after
one that warms up, beyond what the libraries hold between steps (their workspaces, which are reported); on a CPU it is
a count of all allocations. What would begin after `--seconds` is left out. `--processes` run at a time, each with a
model of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
from collections.abc import Callable
from typing import Any

import gpu_workers
import torch
from record import write_result
from step_peak import measure_peak
from torch import nn

import moec
from moec.compiler.allocations import held_bytes
from moec.compiler.plan import CachePlan, CacheRule, LossPlan, Plan
from moec.models.build import build
from moec.models.huggingface.adapter import from_config
from moec.models.huggingface.tiny import tiny_config
from moec.models.presets import preset
from moec.random_batch import random_batches

Make = Callable[[torch.dtype, str, int], nn.Module]


def main() -> None:
    """Compare all plans, print a line each, and write `results/memory_DEVICE.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    workers, rows = gpu_workers.Workers(options.processes, options.processes, options.seconds), []
    for name in options.only:
        workers.add(name, compare, name, options.device, options.scale)
    for name, found in workers.results():
        if found is None:
            print(f"left out: {name}", flush=True)
            continue
        rows.append({"plan": name, "error": found} if isinstance(found, str) else found)
        print(rows[-1], flush=True)
    workers.close()
    rows.sort(key=lambda row: options.only.index(row["plan"]))
    print(write_result(f"memory_{options.device}", " ".join(["python", *sys.argv]), rows))


def k3(**changes: Any) -> Make:
    """Four layers of `k3-mini`."""

    def make(dtype: torch.dtype, device: str, scale: int) -> nn.Module:
        config = preset("k3-mini")
        widths = ("hidden_size", "q_rank", "kv_rank", "dense_size", "expert_size", "latent_size", "shared_size")
        small = {name: getattr(config, name) // scale for name in (*widths, "vocab_size")}
        small |= {"vocab_size": small["vocab_size"] // 4, "image_token": 0, "layers": 4, "full_attention_layers": (4,)}
        if scale > 1:
            small |= {"kda_heads": 2, "heads": 2, "experts": 8, "top_k": 2}
        return build(dataclasses.replace(config, **(small | changes)), dtype, device)

    return make


def huggingface(kind: str) -> Make:
    """Two to four layers, in widths of 1024."""

    def make(dtype: torch.dtype, device: str, scale: int) -> nn.Module:
        size = 1024 // scale
        wide = {"hidden_size": size, "intermediate_size": 2 * size, "vocab_size": 32 * size, "num_attention_heads": 8}
        return from_config(tiny_config(kind, **wide), dtype, device)

    return make


def recomputed(path: str) -> CachePlan:
    """Recompute what lies below a module path pattern."""
    return CachePlan(policy=(CacheRule("recompute", path),))


LAYERS = "*layers.*"
OUT = (CacheRule("offload", LAYERS), CacheRule("offload", LAYERS, "input"))
MIXED = (CacheRule("offload", "layers.*.feed_forward"), CacheRule("recompute", "layers.*.attention"))
B = Plan(batch=2, length=2048, dtype="bfloat16")
CASES: dict[str, tuple[Make, Plan]] = {
    "keep all": (k3(), B),
    "recompute all": (k3(), dataclasses.replace(B, cache=recomputed("layers.*"))),
    "recompute feed-forwards": (k3(), dataclasses.replace(B, cache=recomputed("layers.*.feed_forward"))),
    "recompute attention": (k3(), dataclasses.replace(B, cache=recomputed("layers.*.attention"))),
    "offload all": (k3(), dataclasses.replace(B, cache=CachePlan(policy=(CacheRule("offload", LAYERS),)))),
    "offload all and inputs": (k3(), dataclasses.replace(B, cache=CachePlan(policy=OUT))),
    "offload feed-forwards, recompute attention": (k3(), dataclasses.replace(B, cache=CachePlan(policy=MIXED))),
    "offload, three microbatches": (k3(), dataclasses.replace(B, accumulation=3, cache=CachePlan(policy=OUT))),
    "three microbatches": (k3(), dataclasses.replace(B, accumulation=3)),
    "packed": (k3(), dataclasses.replace(B, packing=True)),
    "one long row": (k3(), dataclasses.replace(B, batch=1, length=8192)),
    "small chunks of the loss": (k3(), dataclasses.replace(B, loss=LossPlan(memory="64MiB"))),
    "sparse attention": (k3(full_attention="dsa", full_attention_layers=(2, 4)), B),
    "grouped-query attention": (k3(full_attention="gqa", full_attention_layers=(2, 4)), B),
    "float32": (k3(), dataclasses.replace(B, dtype="float32", length=1024)),
    "mixtral": (huggingface("mixtral"), B),
    "mixtral offloaded": (huggingface("mixtral"), dataclasses.replace(B, cache=CachePlan(policy=OUT))),
    "gpt_oss recomputed": (huggingface("gpt_oss"), dataclasses.replace(B, cache=recomputed(LAYERS))),
    "deepseek_v3": (huggingface("deepseek_v3"), B),
}


def compare(name: str, device: str, scale: int) -> dict[str, Any]:
    """One row: bytes predicted and found, and their ratio."""
    with gpu_workers.room(), gpu_workers.device():
        return _compared(name, device, scale)


def _compared(name: str, device: str, scale: int) -> dict[str, Any]:
    make, plan = CASES[name]
    plan = dataclasses.replace(plan, length=max(16, plan.length // scale))
    torch.manual_seed(0)
    step = moec.compile(make(getattr(torch, str(plan.dtype)), device, scale).train(), plan)
    vocabulary = step.vocabulary
    assert vocabulary is not None
    batches = (
        {name: value.to(device) for name, value in batch.items()} for batch in random_batches(plan, vocabulary, 0)
    )
    step(next(batches))
    step.state.clear_gradients()
    gc.collect()
    state, batch = held_bytes(step.state.tensors()), next(batches)
    found, libraries = measure_peak(lambda: step(batch), state + held_bytes(batch), device)
    return {
        "plan": name,
        "predicted": step.memory.peak,
        "found": found,
        "ratio": round(step.memory.peak / found, 4),
        "state": state,
        "libraries": libraries,
        "where": step.memory.where,
        "error": None,
    }


if __name__ == "__main__":
    main()
