"""Time of collectives against the size of their messages, and a line through it.

    torchrun --nproc-per-node 2 -m benchmarks.distributed.bandwidth --out bandwidth.json

1. Every collective that programs use, with as many bytes received by each rank as asked for. "all_to_all" sends the
   same to every rank. "all_to_all uneven" is the exchange of a router: ranks send random numbers of rows to each other,
   with the same bytes in all; "all_to_all one hot" sends everything to the last rank.
2. Each size: warm-up, then the median of several rounds, on the slowest rank. A round is a few calls in a row, each a
   launch and a wait, as in a program. CUDA events on a GPU, which is kept busy until the host has launched them all;
   the clock elsewhere.
3. The line `latency + bytes / rate` minimises the squares of relative errors, so that all sizes count alike.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moec.compiler.plan import MeshPlan
from moec.runtime.groups import connect
from moec.runtime.launch import join

CALLS = 8
WIDTH = 1024
"""Bytes of a row of an exchange."""
SHARES = {"": "even", " uneven": "random", " one hot": "last"}

c10d = torch.ops._c10d_functional
Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Line:
    """seconds = latency + bytes / rate. error: mean of |fitted / measured - 1|."""

    latency: float
    bytes_per_second: float
    error: float


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """The line through times of messages, which neither starts below 0 nor falls."""
    size = torch.tensor(sizes, dtype=torch.float64)
    measured = torch.tensor(seconds, dtype=torch.float64)
    columns = torch.stack((torch.ones_like(size), size), 1) / measured.unsqueeze(1)
    latency, per_byte = torch.linalg.lstsq(columns, torch.ones_like(size).unsqueeze(1)).solution.flatten().tolist()
    if latency < 0 or per_byte < 0:
        latency, per_byte = (0.0, _scale(columns[:, 1])) if latency < 0 else (_scale(columns[:, 0]), 0.0)
    error = ((latency + per_byte * size) / measured - 1).abs().mean()
    return Line(latency, 1 / per_byte if per_byte else math.inf, float(error))


def _scale(column: Tensor) -> float:
    """The factor that brings a column nearest to ones."""
    return float(column.sum() / column.square().sum())


def main() -> None:
    """Be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--smallest", type=int, default=12, help="log2 of bytes")
    parser.add_argument("--largest", type=int, default=30, help="log2 of bytes")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    device = join(torch.device(options.device))
    world = dist.get_world_size()
    connect(MeshPlan(fsdp=world, ep=world), device)
    sizes = [2**power for power in range(options.smallest, options.largest + 1)]
    rows = [
        {"collective": name, "ranks": world, "bytes": received, "seconds": seconds}
        for name, make in COLLECTIVES.items()
        for received, seconds in (timed(make, size, device, options.rounds) for size in sizes)
    ]
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps({"rows": rows, "fits": fits(rows)}, indent=1) + "\n")
    dist.destroy_process_group()


def fits(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The line of each collective."""
    names = dict.fromkeys(row["collective"] for row in rows)
    members = {name: [row for row in rows if row["collective"] == name] for name in names}
    return {name: vars(fit([r["bytes"] for r in own], [r["seconds"] for r in own])) for name, own in members.items()}


def timed(make: Callable[[int, torch.device], tuple[Call, int]], size: int, device: torch.device, rounds: int) -> Any:
    """Bytes that the rank which receives most gets, and median seconds on the slowest rank."""
    call, received = make(size, device)
    for _ in range(3):
        call()
    clock = _cuda_seconds if device.type == "cuda" else _seconds
    found = []
    for _ in range(rounds):
        dist.barrier()
        found.append(clock(call))
    both = torch.tensor([statistics.median(found), float(received)], dtype=torch.float64)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    seconds, received_most = both.tolist()
    return int(received_most), seconds


def _seconds(call: Call) -> float:
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - began) / CALLS


def _cuda_seconds(call: Call) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    _keep_busy()
    start.record()
    for _ in range(CALLS):
        call()
    stop.record()
    torch.cuda.synchronize()
    return 1e-3 * start.elapsed_time(stop) / CALLS


def _keep_busy() -> None:
    """Some milliseconds of work for the device."""
    square = torch.ones(4096, 4096, device="cuda")
    for _ in range(2):
        square @ square


def _bytes(count: int, device: torch.device) -> Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, device=device)


def _all_gather(size: int, device: torch.device) -> tuple[Call, int]:
    world = dist.get_world_size()
    own = _bytes(max(1, size // max(1, world - 1)), device)
    return lambda: c10d.wait_tensor(c10d.all_gather_into_tensor(own, world, "gather")), (world - 1) * own.numel()


def _reduce_scatter(size: int, device: torch.device) -> tuple[Call, int]:
    world = dist.get_world_size()
    part = max(1, size // 4 // max(1, world - 1))
    whole = torch.randn(world * part, device=device)
    call = lambda: c10d.wait_tensor(c10d.reduce_scatter_tensor(whole, "sum", world, "scatter"))  # noqa: E731
    return call, 4 * (world - 1) * part


def _all_reduce(size: int, device: torch.device) -> tuple[Call, int]:
    world = dist.get_world_size()
    count = max(1, size // 8 * world // max(1, world - 1))
    own = torch.randn(count, device=device)
    return lambda: c10d.wait_tensor(c10d.all_reduce(own, "sum", "control")), 8 * count * (world - 1) // world


def _all_to_all(shares: str) -> Callable[[int, torch.device], tuple[Call, int]]:
    def make(size: int, device: torch.device) -> tuple[Call, int]:
        world, rank = dist.get_world_size(), dist.get_rank()
        table = rows_between(shares, max(1, size // WIDTH) * world // max(1, world - 1), world, seed=size)
        send, receive = table[rank], [line[rank] for line in table]
        rows = _bytes(sum(send) * WIDTH, device).view(-1, WIDTH)
        call = lambda: c10d.wait_tensor(c10d.all_to_all_single(rows, receive, send, "exchange"))  # noqa: E731
        return call, WIDTH * (sum(receive) - receive[rank])

    return make


def rows_between(shares: str, rows: int, world: int, seed: int) -> list[list[int]]:
    """How many of its `rows` each rank sends to each: [sender][receiver]."""
    drawn = random.Random(seed)
    table = []
    for _ in range(world):
        weights = {
            "even": [1.0] * world,
            "random": [drawn.uniform(0.25, 1.75) for _ in range(world)],
            "last": [0.0] * (world - 1) + [1.0],
        }[shares]
        ends = [round(rows * sum(weights[: i + 1]) / sum(weights)) for i in range(world)]
        table.append([after - before for before, after in zip([0, *ends], ends, strict=False)])
    return table


COLLECTIVES: dict[str, Callable[[int, torch.device], tuple[Call, int]]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    **{f"all_to_all{name}": _all_to_all(shares) for name, shares in SHARES.items()},
}


if __name__ == "__main__":
    main()
