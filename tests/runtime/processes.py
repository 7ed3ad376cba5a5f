"""Run a function on several real ranks, gloo processes of this machine, and collect what they return."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[Any]:
    """function(rank, *arguments) in `world` processes with a process group; their results in rank order.

    function: of a module's top level. Raises AssertionError with the traceback of each rank that raised or died.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = [_start(world, rank, Path(folder), function, arguments) for rank in range(world)]
        for process in started:
            process.join(timeout)
        hung = [process for process in started if process.is_alive()]
        for process in hung:
            process.kill()
            process.join()
        results = [Path(folder) / f"{rank}.result" for rank in range(world)]
        problems = [file.read_text() for file in sorted(Path(folder).glob("*.error"))]
        problems += [f"rank {rank} died or hung" for rank, file in enumerate(results) if not file.exists()]
        assert not problems, "\n".join(problems)
        return [torch.load(file, weights_only=False) for file in results]


def start_ranks(world: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The processes of `run_ranks`, to be joined by the caller; results and errors lie in `folder`."""
    return [_start(world, rank, folder, function, arguments) for rank in range(world)]


def _start(world: int, rank: int, folder: Path, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    # Forked from a process that has imported all this once: a fresh interpreter for each rank takes seconds.
    context = processes.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.checkpoint", "moec.runtime.sharded_state", "pytest"])
    process = context.Process(target=_live, args=(world, rank, folder, function, arguments), daemon=True)
    process.start()
    return process


def _live(world: int, rank: int, folder: Path, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, world_size=world, rank=rank, timeout=timedelta(seconds=60))
    try:
        torch.save(function(rank, *arguments), folder / f"{rank}.partial")
        (folder / f"{rank}.partial").rename(folder / f"{rank}.result")
        dist.barrier()
    except BaseException:
        (folder / f"{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
    finally:
        dist.destroy_process_group()
