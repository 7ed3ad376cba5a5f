"""Step time of the compiled step beside eager PyTorch, on the same model, data and optimizer, in one run.

    python benchmarks/step_time.py k3-tiny --batch 8 --length 256 --steps 20
    python benchmarks/step_time.py k3-mini --batch 2 --length 4096 --steps 20 --dtype bfloat16 --device cuda

Eager is the model's own forward, autograd, gradient accumulation in float32 and the same AdamW. The two alternate, so
that a drift of the machine's speed meets both. Reported are the median step in wall time and in processor time, and the
median over the steps of how long moec took relative to the eager step beside it. Of one thread (`--threads 1`) the
processor time hardly depends on what else the machine does. `--compiled-only` leaves eager out.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from record import RESULTS, write_result
from torch import Tensor

import moec
from moec import Plan, runtime
from moec.models.adapters import training_view
from moec.models.build import build


def main() -> None:
    """Time both and write `results/step_time_PRESET.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compiled-only", action="store_true")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = build(options.preset, getattr(torch, options.dtype), options.device).train()
    plan = Plan(batch=options.batch, length=options.length, packing=True)
    other = None if options.compiled_only else copy.deepcopy(model)
    started = time.perf_counter()
    step = moec.compile(model, plan)
    compile_seconds = time.perf_counter() - started
    print(f"compiled in {compile_seconds:.1f} s")
    variants: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {"moec": lambda batch: step(batch).loss}
    if other is not None:
        variants["eager"] = eager_step(other, plan)
    rows = [row | {"compile_seconds": compile_seconds} for row in run(variants, options)]
    for row in rows:
        print(
            f"{row['variant']:>6}: {row['step_ms']:.1f} ms a step ({row['cpu_ms']:.1f} ms of processor time), "
            f"{row['tokens_per_second']:.0f} tokens/s, peak {row['peak_gib']} GiB, "
            f"loss {row['first_loss']:.4f} -> {row['last_loss']:.4f}"
        )
    if "wall_ratio" in rows[0]:
        print(f"moec / eager: {rows[0]['wall_ratio']:.3f} in wall time, {rows[0]['cpu_ratio']:.3f} in processor time")
    name = f"step_time_{options.preset.replace('-', '_')}"
    print(write_result(name, " ".join(["python", *sys.argv]), rows, RESULTS))


def run(
    variants: dict[str, Callable[[dict[str, Tensor]], Tensor]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Median step of each variant, after two steps of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    processor: dict[str, list[float]] = {name: [] for name in variants}
    losses: dict[str, list[float]] = {name: [] for name in variants}
    peaks: dict[str, float | None] = dict.fromkeys(variants, None)
    for number in range(options.steps):
        batch = random_batch(options, seed=number)
        for name, variant in variants.items():
            if options.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
            began, worked = time.perf_counter(), time.process_time()
            loss = variant(batch)
            losses[name].append(float(loss))
            if options.device == "cuda":
                torch.cuda.synchronize()
                peaks[name] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            times[name].append(time.perf_counter() - began)
            processor[name].append(time.process_time() - worked)
    ratios = {}
    if "eager" in variants:
        ratios = {"wall_ratio": _ratio(times), "cpu_ratio": _ratio(processor)}
    return [
        {
            "preset": options.preset,
            "variant": name,
            "shape": f"B={options.batch} T={options.length} {options.dtype}",
            "threads": torch.get_num_threads(),
            "step_ms": 1e3 * statistics.median(times[name][2:]),
            "cpu_ms": 1e3 * statistics.median(processor[name][2:]),
            "tokens_per_second": options.batch * options.length / statistics.median(times[name][2:]),
            "peak_gib": peaks[name],
            "first_loss": losses[name][0],
            "last_loss": losses[name][-1],
            "steps": options.steps,
            **(ratios if name == "moec" else {}),
        }
        for name in variants
    ]


def _ratio(times: dict[str, list[float]]) -> float:
    """How long moec takes relative to eager: the median over pairs of steps, after the warm-up."""
    return statistics.median(a / b for a, b in zip(times["moec"][2:], times["eager"][2:], strict=True))


def random_batch(options: argparse.Namespace, seed: int) -> dict[str, Tensor]:
    """Tokens with structure (a repeated ramp with noise), so that the loss can fall; two documents a row."""
    generator = torch.Generator().manual_seed(seed)
    ramp = torch.arange(options.length) % 97
    noise = torch.randint(0, 3, (options.batch, options.length), generator=generator)
    ids = (ramp + noise + torch.randint(0, 50, (options.batch, 1), generator=generator)) % 250
    documents = (torch.arange(options.length) >= options.length // 3).long().expand(options.batch, -1).contiguous()
    labels = ids.clone()
    labels[:, 0] = labels[:, options.length // 3] = -100
    batch = {"input_ids": ids, "labels": labels, "document_ids": documents}
    return {name: value.to(options.device) for name, value in batch.items()}


def eager_step(model: torch.nn.Module, plan: Plan) -> Callable[[dict[str, Tensor]], Tensor]:
    """The same step without the compiler."""
    view = training_view(model, plan)
    state = runtime.StepState.from_module(model)
    optimizer = plan.optimizer
    groups = runtime.parameter_groups(state)
    common: dict[str, Any] = {"lr": optimizer.lr, "betas": optimizer.betas, "eps": optimizer.eps}

    def step(batch: dict[str, Tensor]) -> Tensor:
        valid = (batch["labels"][:, 1:] != -100).sum()
        result = view.module(**batch, inverse_tokens=1.0 / valid.float())
        result["objective"].backward()
        state.clear_gradients()
        for path in state.trainable:
            gradient = state.weights[path].grad
            if gradient is not None:
                state.accumulate(path, gradient)
                state.weights[path].grad = None
        runtime.clip_gradients(state, optimizer.clip_norm or None)
        runtime.adamw(state, groups["decay"], **common, weight_decay=optimizer.weight_decay)
        runtime.adamw(state, groups["no_decay"], **common, weight_decay=0.0)
        runtime.update_balance(state, view.balanced)
        return result["lm_loss"]

    return step


if __name__ == "__main__":
    main()
