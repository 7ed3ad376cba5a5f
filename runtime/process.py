"""Which process runs a rank, so that others on the same machine see that it has ended."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
_STATE, _START = 0, 19


@dataclass(frozen=True)
class Process:
    """machine: equal for processes that see each other's numbers. started: tells a number used again, "" if unknown."""

    machine: str
    pid: int
    started: str

    @classmethod
    def own(cls) -> Process:
        """The process that calls."""
        pid = os.getpid()
        return cls(_machine(), pid, _status(pid)[_START] if _status(pid) else "")

    def is_gone(self) -> bool:
        """Whether the process is known to have ended; False for one of another machine, or where /proc is missing."""
        if self.machine != _machine() or not self.started:
            return False
        status = _status(self.pid)
        return not status or status[_START] != self.started or status[_STATE] in "ZX"


def _machine() -> str:
    boot = _BOOT.read_text().strip() if _BOOT.is_file() else ""
    namespace = os.readlink(_NAMESPACE) if _NAMESPACE.exists() else ""
    return f"{socket.gethostname()} {boot} {namespace}"


def _status(pid: int) -> list[str]:
    """Fields of /proc/PID/stat behind the name, [] when there are none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
