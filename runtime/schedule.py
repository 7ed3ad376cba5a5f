"""The learning rate as a pure function of the step: linear warm-up, then a cosine or a constant."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from moec.compiler.errors import BatchError, PlanError


def check_rate(lr: object) -> None:
    """Raise BatchError for a learning rate, given with a batch, that no update can use; None is the schedule's."""
    number = isinstance(lr, (int, float)) and not isinstance(lr, bool)
    if lr is not None and not (number and math.isfinite(lr) and lr >= 0):  # type: ignore[arg-type,operator]
        raise BatchError(f"lr is {lr!r}", hint="give a finite number >= 0, or leave it out for the plan's schedule")


@dataclass(frozen=True)
class Schedule:
    """Learning rate by step.

    kind: "cosine" falls from `peak` to `peak * min_ratio` at `total_steps` and stays there; "constant" stays at `peak`.
    warmup_steps: step i < warmup_steps (from 0) gets peak * (i + 1) / warmup_steps; the first step is never zero.
    total_steps: length of the whole run, warm-up included; "constant" does not use it.
    """

    peak: float
    kind: Literal["cosine", "constant"] = "cosine"
    warmup_steps: int = 0
    total_steps: int = 0
    min_ratio: float = 0.1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.peak) and self.peak >= 0):
            raise PlanError(f"the learning rate is {self.peak}", hint="give a finite number >= 0")
        if self.kind not in ("cosine", "constant"):
            raise PlanError(f"unknown schedule {self.kind!r}", hint='use "cosine" or "constant"')
        if self.warmup_steps < 0:
            raise PlanError(f"warmup_steps is {self.warmup_steps}", hint="give a number >= 0")
        if not 0 <= self.min_ratio <= 1:
            raise PlanError(f"min_ratio is {self.min_ratio}", hint="give a number from 0 to 1")
        if self.kind == "cosine" and self.total_steps <= self.warmup_steps:
            raise PlanError(
                f"a cosine over {self.total_steps} steps has no room after {self.warmup_steps} warm-up steps",
                hint="train for more steps, or shorten the warm-up",
            )

    def __call__(self, step: int) -> float:
        """The learning rate of the step with index `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        floor = self.peak * self.min_ratio
        return floor + (self.peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
