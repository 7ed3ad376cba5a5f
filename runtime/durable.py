"""Files and folders that are whole or absent after a kill or a power loss.

The pattern: write everything under a temporary name in the same folder, flush it to disk, rename, flush the folder.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

PARTIAL = ".partial-"


def write_file(path: Path, content: bytes) -> None:
    """Replace a file by new content; a reader sees the old or the new one, never a part."""
    partial = path.with_name(PARTIAL + path.name)
    with partial.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    publish(partial, path)


def publish(partial: Path, path: Path) -> None:
    """Give finished and flushed content its final name; an existing file or folder of that name is replaced."""
    if path.is_dir():
        remove_folder(path)
    os.replace(partial, path)
    flush(path.parent)


def remove_folder(path: Path) -> None:
    """Delete a folder; its name is gone at once, so that no half-deleted folder is taken for a whole one."""
    doomed = path.with_name(f"{PARTIAL}{path.name}-old")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(path, doomed)
    flush(path.parent)
    shutil.rmtree(doomed)


def remove_partials(folder: Path) -> None:
    """Delete what an interrupted write left behind."""
    for path in folder.glob(PARTIAL + "*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def flush(path: Path) -> None:
    """Force a file's content, or a folder's list of names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
