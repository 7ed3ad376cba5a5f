"""Run the Python blocks of pages, a process of its own for them: what they register must not reach other tests.

Reads {folder: [block, ...]} as JSON, and writes {folder: {"printed": [text, ...], "error": text}}. The blocks of a
page share one namespace and run in its folder, in order, up to the first that raises.
"""

from __future__ import annotations

import io
import json
import linecache
import os
import sys
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any


def main() -> None:
    """Run all pages."""
    pages = json.load(sys.stdin)
    print(json.dumps({folder: _run(Path(folder), blocks) for folder, blocks in pages.items()}))


def _run(folder: Path, blocks: list[str]) -> dict[str, Any]:
    os.chdir(folder)
    space: dict[str, Any] = {"__name__": folder.name}
    printed: list[str] = []
    for number, block in enumerate(blocks, 1):
        name = f"<{folder.name}, block {number}>"
        linecache.cache[name] = (len(block), None, block.splitlines(keepends=True), name)
        out = io.StringIO()
        try:
            with redirect_stdout(out):
                exec(compile(block, name, "exec"), space)
        except Exception:
            return {"printed": printed, "error": traceback.format_exc()}
        printed.append(out.getvalue())
    return {"printed": printed, "error": ""}


if __name__ == "__main__":
    main()
