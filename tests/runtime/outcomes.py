"""Functions run by real ranks: one process each, connected by gloo through a store that the test holds."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["torch", "moec.runtime.groups", "moec.training"])


@dataclass(frozen=True)
class Outcome:
    """How one rank ended. value: what the function returned. error: "CLASS: text" of what it raised, or "".

    code: exit code of the process, negative for a signal. seconds: from when all ranks had started to the end.
    """

    value: Any
    error: str
    code: int | None
    seconds: float


def run_ranks(
    world: int, function: Callable[..., Any], *arguments: Any, seconds: float = 120.0, hanging: Sequence[int] = ()
) -> list[Outcome]:
    """Run `function(rank, *arguments)`, a function of a module, on `world` processes.

    Fails when one outlives `seconds`. hanging: ranks that are not waited for, and killed when the others have ended.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pairs = [_PROCESSES.Pipe(duplex=False) for _ in range(world)]
    processes = [
        _PROCESSES.Process(target=_rank, args=(rank, world, store.port, pairs[rank][1], function, arguments))
        for rank in range(world)
    ]
    for process, (_, sender) in zip(processes, pairs, strict=True):
        process.start()
        sender.close()
    found = {rank: Outcome(None, "", None, 0.0) for rank in hanging}
    try:
        for rank, (reader, _) in enumerate(pairs):
            assert reader.poll(seconds), f"rank {rank} did not start"
            reader.recv_bytes()
        began = time.monotonic()
        while len(found) < world and time.monotonic() - began < seconds:
            for rank in sorted(set(range(world)) - found.keys()):
                reader = pairs[rank][0]
                if not reader.poll(0.01):
                    continue
                try:
                    value, error = pickle.loads(reader.recv_bytes())
                except EOFError:
                    value, error = None, ""
                processes[rank].join(10)
                found[rank] = Outcome(value, error, processes[rank].exitcode, time.monotonic() - began)
    finally:
        for process in processes:
            process.kill()
            process.join()
    if len(found) < world:
        pytest.fail(f"ranks {sorted(set(range(world)) - found.keys())} did not end within {seconds} s")
    return [found[rank] for rank in range(world)]


def values(outcomes: list[Outcome]) -> list[Any]:
    """What the ranks returned; fails when one raised."""
    assert [outcome.error for outcome in outcomes] == [""] * len(outcomes)
    assert [outcome.code for outcome in outcomes] == [0] * len(outcomes)
    return [outcome.value for outcome in outcomes]


def _rank(
    rank: int, world: int, port: int, sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    sender.send_bytes(b"started")
    try:
        found = function(rank, *arguments), ""
    except BaseException as error:
        found = None, f"{type(error).__name__}: {error}"
    # By value: tensors sent by multiprocessing lie in memory that ends with this process.
    sender.send_bytes(pickle.dumps(found))
    sender.close()
    # A rank that ends first must not take connections away that the others still need to build.
    os._exit(0)
