"""What the demo does: a compiled run, a measurement on held-out text, and the same first steps in eager PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from moec.compiler.plan import OptimizerPlan, Plan
from moec.demo_text import DemoText, prepare_text
from moec.eager import EagerStep
from moec.running import RunOptions, TextOptions, open_text
from moec.runtime import StepResult
from moec.runtime.step import IGNORED
from moec.step import CompiledStep
from moec.training import train_model

PLAN = Plan(batch=8, length=256, packing=True, optimizer=OptimizerPlan(lr=6e-3, warmup_steps=30))
"""The long warm-up keeps rounding small: without it two eager runs part by 0.1 nats within 20 steps."""
STEPS = 120
EAGER_STEPS = 20
TARGET = 2.8
"""Nats per byte at the end; byte frequencies alone give about 3.2."""
PAIRS_MARGIN = 0.1
"""How far the loss must be below that of byte pairs, in nats: dead mixers stay 0.07 above it, working ones get 0.27
below."""
FIRST_BOUND = 1e-5
"""Largest difference of the two first losses, in nats: these are computed with equal weights."""
CURVE_BOUND = 0.1
"""Largest difference of the two curves: routing makes a rounding into another expert for a token, and curves part."""
TEXT = "text"
_ROWS = 64


@dataclass(frozen=True)
class Outcome:
    """compiled, eager: losses per step (the eager run is shorter). held_out: nats per byte after the last step."""

    compiled: Sequence[float]
    eager: Sequence[float]
    held_out: float
    text: DemoText

    @property
    def largest_difference(self) -> float:
        """Of the two curves, in nats."""
        return max(abs(a - b) for a, b in zip(self.compiled, self.eager, strict=False))

    @property
    def mixer_target(self) -> float:
        """Nats per byte that no model reaches without mixers that work."""
        return self.text.pairs_alone - PAIRS_MARGIN

    def failures(self) -> list[str]:
        """What missed its bound; empty when all is well."""
        found = []
        if not self.held_out < TARGET:
            found.append(f"the loss on held-out text is {self.held_out:.3f}, the target is {TARGET}")
        if not self.held_out < self.mixer_target:
            found.append(
                f"the loss on held-out text is {self.held_out:.3f}, not below {self.mixer_target:.3f}: byte pairs "
                f"alone give {self.text.pairs_alone:.3f}, so the mixers carry too little from earlier bytes"
            )
        first = abs(self.compiled[0] - self.eager[0])
        if not first < FIRST_BOUND:
            found.append(f"the first compiled and eager losses differ by {first:.2e}, bound {FIRST_BOUND:g}")
        if not self.largest_difference < CURVE_BOUND:
            found.append(f"compiled and eager losses differ by {self.largest_difference:.2e}, bound {CURVE_BOUND:g}")
        return found


def run_demo(
    model: nn.Module, twin: nn.Module, out: Path, console: Console, steps: int = STEPS, eager_steps: int = EAGER_STEPS
) -> Outcome:
    """Train `model` through its compiled step for `steps`, and `twin`, an equal model, in eager for `eager_steps`."""
    text = prepare_text(out / TEXT, train_bytes=steps * PLAN.batch * PLAN.length, rows=_ROWS, length=PLAN.length)
    options, rates = TextOptions([text.folder]), list[float]()
    step, summary = train_model(
        model, PLAN, options, RunOptions(steps, out), console, on_step=lambda _, result: rates.append(_rate(result))
    )
    held_out = held_out_loss(step, text.held_out)
    eager, data = EagerStep(twin, PLAN), open_text(options, PLAN, step.vocabulary)
    shown = track(rates[:eager_steps], "the same in eager PyTorch", console=console, transient=True)
    losses = [float(eager(next(data), rate)) for rate in shown]
    return Outcome(summary.losses, losses, held_out, text)


def held_out_loss(step: CompiledStep, rows: Tensor) -> float:
    """Mean loss in nats per byte over rows of token ids, int64 [rows, length], each a document of its own."""
    batches = [_documents(ids) for ids in rows.split(step.plan.batch)]
    return sum(float(step.loss(batch)["lm_loss"]) for batch in batches) / len(batches)


def _documents(ids: Tensor) -> Mapping[str, Tensor]:
    labels = ids.clone()
    labels[:, 0] = IGNORED
    return {"input_ids": ids, "labels": labels}


def _rate(result: StepResult) -> float:
    return float(result.metrics["lr"])
