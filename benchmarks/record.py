"""Where and with what a benchmark ran, and its result file."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """Machine, its load of the last minute, versions, date and commit of a run."""
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=RESULTS.parent
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = ""
    return {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "processor": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": commit,
    }


def write_result(name: str, command: str, rows: list[dict[str, Any]], folder: Path = RESULTS) -> Path:
    """Write `results/NAME.json`: the command, the environment and one object per row."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"command": command, **environment(), "rows": rows}, indent=1) + "\n")
    return path
