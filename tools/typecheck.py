"""Run mypy on the package `moec`: python tools/typecheck.py [mypy options]

The folders at the top level are `moec.compiler`, `moec.runtime` ... only after installation, and `./moec` would hide
them. So a folder of links with the installed shape is made from the table in pyproject.toml, and checked from inside.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(options: list[str]) -> int:
    folder = ROOT / "build" / "typecheck"
    _link_packages(folder)
    arguments = ["--package", "moec", "--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache"]
    return subprocess.run([sys.executable, "-m", "mypy", *arguments, *options], cwd=folder, check=False).returncode


def _link_packages(folder: Path) -> None:
    """FOLDER/moec with the files of ./moec and one link per subpackage, all pointing into the tree."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    package = folder / "moec"
    package.mkdir(parents=True, exist_ok=True)
    for stale in package.iterdir():
        stale.unlink()
    for item in (ROOT / "moec").iterdir():
        (package / item.name).symlink_to(item)
    for name, place in table.items():
        if name.count(".") == 1:
            (package / name.split(".")[1]).symlink_to(ROOT / place)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
