"""What a person sees while a run trains: a bar on a terminal, plain lines everywhere else."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_LINES = 20


class TrainingProgress:
    """Context that shows step, loss, tokens per second and the time left."""

    def __init__(self, console: Console, first: int, total: int) -> None:
        """first: completed steps at the start; total: steps at the end."""
        self._console, self._first, self._total = console, first, total
        self._every = max(1, (total - first) // _LINES)
        self._started = time.perf_counter()
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss {task.fields[loss]:.4f}"),
            TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=total, completed=first, loss=float("nan"), speed=0.0)

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Report a completed step."""
        if self._console.is_terminal:
            self._bar.update(self._task, completed=step, loss=loss, speed=tokens_per_second)
        elif step in (self._first + 1, self._total) or (step - self._first) % self._every == 0:
            left = (time.perf_counter() - self._started) / (step - self._first) * (self._total - step)
            self._console.print(
                f"step {step}/{self._total}  loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s  left {_clock(left)}",
                highlight=False,
            )


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
