"""Make a virtual environment that has torch: python tools/make_venv.py FOLDER

1. A torch that this Python can import and that is new enough is used as it is.
2. Otherwise the tested version is installed from the package index.
Needs nothing but the standard library.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
TESTED_TORCH = "2.13.0"


def main(folder: Path) -> None:
    if sys.version_info < OLDEST_PYTHON:
        sys.exit(
            f"moec needs Python {_dotted(OLDEST_PYTHON)} or newer\n"
            f"  why: {sys.executable} is {_dotted(sys.version_info[:3])}\n"
            "  do:  name a newer one that is installed here, for example make PYTHON=python3.12"
        )
    outer = _usable_torch()
    options = ["--system-site-packages"] if outer else []
    print(f"making {folder} with {f'the torch in {outer}' if outer else f'torch {TESTED_TORCH}'}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", *options, str(folder)], check=True)
    python = folder / "bin" / "python"
    if outer is None:
        subprocess.run([python, "-m", "pip", "install", f"torch=={TESTED_TORCH}"], check=True)
    elif _find_torch(python)[0] != outer:
        # This Python runs in an environment of its own, whose packages a new environment does not see by itself.
        site = sysconfig.get_path("purelib", "venv", vars={"base": str(folder), "platbase": str(folder)})
        Path(site, "outer-packages.pth").write_text(f"{outer}\n")


def _usable_torch() -> Path | None:
    """The folder from which this Python imports a torch that is new enough."""
    place, version = _find_torch(Path(sys.executable))
    if place is not None and version < OLDEST_TORCH:
        print(f"the torch {_dotted(version)} in {place} is not used: moec needs {_dotted(OLDEST_TORCH)} or newer")
        return None
    return place


def _find_torch(python: Path) -> tuple[Path | None, tuple[int, ...]]:
    """Where a Python imports torch from, and the first two parts of its version; None when it cannot."""
    code = "import torch; print(torch.__file__); print(torch.__version__)"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if found.returncode:
        return None, ()
    file, version = found.stdout.split()
    return Path(file).parent.parent, tuple(int(part) for part in version.split(".")[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
