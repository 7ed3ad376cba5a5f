"""Kill one of two ranks that a launcher has started, and see the launcher end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path


def kill_rank(launcher: subprocess.Popen[str], victim: int) -> tuple[int, str]:
    """SIGKILL to a rank of two. The launcher ends in time, says which rank it was, and leaves no process.

    Returns the process that was killed, and what the launcher printed to stderr.
    """
    (killed,) = (pid for pid in children(launcher.pid) if f"\0RANK={victim}\0" in _environment(pid))
    os.kill(killed, signal.SIGKILL)
    began = time.monotonic()
    _, err = launcher.communicate(timeout=120)
    assert time.monotonic() - began < 45
    assert launcher.returncode == 128 + signal.SIGKILL
    assert f"rank {victim} of 2 was killed by SIGKILL" in err
    assert not children(launcher.pid)
    return killed, err


def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """Processes that a process has started and that are there."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
        except OSError:
            continue
    return found


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended, waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _environment(pid: int) -> str:
    return "\0" + Path(f"/proc/{pid}/environ").read_text()
