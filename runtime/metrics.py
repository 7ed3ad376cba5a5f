"""Numbers of a run, one record per step: `metrics.jsonl`, and TensorBoard when asked for.

Every line is handed to the operating system when it is written, so a killed process loses at most the line it was
writing. On resume the file is cut behind the last line of the resumed step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from moec.compiler.errors import CheckpointError, MoecError

METRICS = "metrics.jsonl"


class Sink(Protocol):
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of one step; steps count from 1."""
        ...

    def close(self) -> None: ...


class JsonLines:
    """`OUT/metrics.jsonl`: one JSON object per line, "step" first; NaN and infinity are null."""

    def __init__(self, out: Path, after_step: int) -> None:
        """Open the file for appending and drop every line of a later step than `after_step`."""
        self._path = out / METRICS
        _cut(self._path, after_step)
        self._stream = self._path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        numbers = {name: value if math.isfinite(value) else None for name, value in values.items()}
        try:
            self._stream.write(json.dumps({"step": step, **numbers}) + "\n")
            self._stream.flush()
        except OSError as error:
            raise CheckpointError(
                f"the metrics of step {step} could not be written",
                where=str(self._path),
                why=error.strerror or str(error),
                hint="free space and resume the run; its last checkpoint is whole",
            ) from error

    def close(self) -> None:
        with suppress(OSError):  # a line that could not be written is tried again
            self._stream.close()


class TensorBoard:
    """Event files in `OUT/tensorboard/`; needs the extra `tensorboard`."""

    def __init__(self, out: Path, after_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MoecError("TensorBoard is not installed", hint="pip install 'moec[tensorboard]'") from error
        self._writer: Any = SummaryWriter(str(out / "tensorboard"), purge_step=after_step + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """All whole records of a run's metrics.jsonl."""
    path = out / METRICS
    return [record for record, _ in _records(path)] if path.is_file() else []


def _cut(path: Path, after_step: int) -> None:
    if not path.is_file():
        return
    end = max((end for record, end in _records(path) if record["step"] <= after_step), default=0)
    with path.open("rb+") as stream:
        stream.truncate(end)


def _records(path: Path) -> list[tuple[dict[str, Any], int]]:
    """Whole records with the offset behind each; a last line without its line end was cut off by a kill."""
    records, end = [], 0
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        end += len(line)
        records.append((json.loads(line), end))
    return records
