"""Start ranks on this machine, and join those that were started, here or by torchrun.

    moec train --ranks 4 ...                          launch(): four processes with the variables of torchrun
    torchrun --nproc-per-node 4 -m moec train ...     torchrun sets them
    in each process: device = join(device)            torch.distributed is initialised

`launch` holds the store of the ranks, which so outlives each of them. It shows what rank 0 prints, and the errors of a
rank that failed. When one fails, the others have some seconds to say so and stop (runtime/watch.py); then they are
ended. Ctrl-C and SIGTERM reach every rank.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from moec.compiler.errors import RankError

_POLL = 0.05
_LINES = 20
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def join(device: torch.device, *, seconds: float = 120.0) -> torch.device:
    """Initialise torch.distributed from the environment; returns the device of this rank.

    device: cpu for gloo, cuda for NCCL, each local rank on the GPU of its number. seconds: how long to wait for the
    other ranks. Raises RankError when they do not come, and when there are fewer GPUs than local ranks.
    """
    if device.type == "cuda":
        device = _own_gpu()
    try:
        dist.init_process_group(_BACKENDS[device.type], timeout=timedelta(seconds=seconds))
    except (RuntimeError, ValueError) as error:
        raise RankError(
            "this rank could not join the others",
            where=", ".join(f"{name}={os.environ.get(name)}" for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")),
            why=str(error).splitlines()[0],
            hint="start all ranks together, and let each reach MASTER_ADDR:MASTER_PORT",
        ) from error
    return device


def launch(command: Sequence[str], ranks: int, *, seconds: float = 15.0) -> int:
    """Run `command` as `ranks` processes on this machine until all have ended; returns the exit code of the run.

    seconds: how long the others may take to stop by themselves after one has failed.
    The code is 0 when all end with 0, otherwise that of the rank that failed, 128 + its signal when it was killed; and
    130 or 143 after Ctrl-C or SIGTERM.
    """
    if ranks < 1:
        raise RankError(f"{ranks} ranks cannot be started", hint="start at least one")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="moec-ranks-") as folder:
        outputs = [Path(folder) / f"{rank}.stderr" for rank in range(ranks)]
        children: list[subprocess.Popen[bytes]] = []
        try:
            with _signals_raise():
                for rank in range(ranks):
                    children.append(_start(command, rank, ranks, store.port, outputs[rank]))
                return _followed(children, outputs, seconds)
        except _Signalled as error:
            for child in children:
                child.send_signal(error.number)
            _wait(children, seconds)
            return 128 + error.number
        finally:
            _end(children)


class _Signalled(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def _signals_raise() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Signalled(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(command: Sequence[str], rank: int, ranks: int, port: int, output: Path) -> subprocess.Popen[bytes]:
    threads = max(1, (os.cpu_count() or 1) // ranks)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The store is this process's, as torchrun's is its agent's.
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
    }
    # A session of their own: Ctrl-C comes to this process alone, which hands it on once.
    if rank == 0:
        return subprocess.Popen(command, env=environment, start_new_session=True)
    with output.open("wb") as stream:
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=stream, start_new_session=True
        )


def _followed(children: Sequence[subprocess.Popen[bytes]], outputs: Sequence[Path], seconds: float) -> int:
    while True:
        codes = [child.poll() for child in children]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            # Others may have followed already: they end with an error, the one they follow may have been killed.
            first = min(failed, key=lambda rank: (children[rank].returncode > 0, rank))
            _wait(children, seconds)
            return _report(first, children[first].returncode, outputs)
        if all(code == 0 for code in codes):
            return 0
        time.sleep(_POLL)


def _report(rank: int, code: int, outputs: Sequence[Path]) -> int:
    """Say how the first rank failed, and show what rank 0 has not shown: its last words, or what others said of it."""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    print(f"rank {rank} of {len(outputs)} {how}", file=sys.stderr)
    shown = [rank] if rank else [1] if code < 0 and len(outputs) > 1 else []
    for other in shown:
        lines = outputs[other].read_text(errors="replace").splitlines()[-_LINES:]
        print("\n".join(f"  rank {other}: {line}" for line in lines), file=sys.stderr, flush=True)
    return 128 - code if code < 0 else code


def _wait(children: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(_POLL)


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Leave no process behind."""
    for child in children:
        if child.poll() is None:
            child.terminate()
    _wait(children, 3.0)
    for child in children:
        if child.poll() is None:
            child.kill()
        child.wait()


def _own_gpu() -> torch.device:
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise RankError(
            f"local rank {local} has no GPU, this machine has {torch.cuda.device_count()}",
            hint="start fewer ranks per machine, or give --device cpu",
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
