"""Kernels compiled for sm_90 by a script beside this file, in a process without the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def compiled_for_sm_90(script: str, cache: Path, *arguments: object) -> dict[str, dict[str, Any]]:
    """What the script prints last: kernel -> what its code holds. cache: an empty folder, so that all is compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": path}
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", timeout=280)
    assert found.returncode == 0, found.stderr[-3000:]
    built: dict[str, dict[str, Any]] = json.loads(found.stdout.splitlines()[-1])
    return built
