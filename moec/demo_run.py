"""What the demo does: a compiled run on all ranks, a measurement on held-out text, and the same first steps in eager.

All ranks call `run_demo` together. The first one also trains an equal model in eager PyTorch, alone, on the rows of
all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from moec.compiler.plan import MeshPlan, OptimizerPlan, Plan
from moec.demo_text import DemoText, read_text
from moec.eager import EagerStep
from moec.models.adapters import training_view
from moec.rank_checks import joined_plan
from moec.running import RunOptions, TextOptions, open_text
from moec.runtime import StepResult
from moec.runtime.control import first_rank_decides
from moec.runtime.groups import watch_of
from moec.runtime.ranks import Ranks
from moec.runtime.step import IGNORED
from moec.runtime.watch import watched
from moec.simulated import split_rows
from moec.step import CompiledStep
from moec.training import train_model

PLAN = Plan(
    batch=4,
    length=256,
    packing=True,
    mesh=MeshPlan(fsdp=2, ep=2),
    optimizer=OptimizerPlan(lr=6e-3, warmup_steps=30),
)
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
_SECONDS = 30.0
"""How long a rank may be silent before the others stop."""


@dataclass(frozen=True)
class Check:
    """One thing that a demo has to show, with its numbers."""

    passed: bool
    text: str

    def __str__(self) -> str:
        return f"{'passed' if self.passed else 'missed'}: {self.text}"


@dataclass(frozen=True)
class Outcome:
    """compiled, eager: losses per step; the eager run is shorter. held_out: nats per byte after the last step."""

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

    def checks(self) -> list[Check]:
        """Everything that a demo has to show."""
        first, largest = abs(self.compiled[0] - self.eager[0]), self.largest_difference
        held_out = f"held-out text takes {self.held_out:.3f} nats per byte"
        return [
            Check(
                first < FIRST_BOUND,
                f"the first losses, compiled and eager, differ by {first:.1e} nats, bound {FIRST_BOUND:g}",
            ),
            Check(largest < CURVE_BOUND, f"the two curves differ by at most {largest:.1e} nats, bound {CURVE_BOUND:g}"),
            Check(
                self.held_out < TARGET,
                f"{held_out}, target {TARGET}; byte frequencies alone give {self.text.bytes_alone:.3f}",
            ),
            Check(
                self.held_out < self.mixer_target,
                f"{held_out}, bound of mixers that work {self.mixer_target:.3f}; byte pairs alone give "
                f"{self.text.pairs_alone:.3f}",
            ),
        ]


def run_demo(
    model: nn.Module,
    twin: nn.Module | None,
    out: Path,
    console: Console,
    ranks: Ranks,
    steps: int = STEPS,
    eager_steps: int = EAGER_STEPS,
) -> Outcome:
    """Train `model` through its compiled step for `steps`, and `twin`, an equal model, in eager for `eager_steps`.

    model: may be without weights (`moec.deferred_init`). twin: whole, on the first rank alone.
    The outcome of the ranks that do not run in eager has no eager losses. When a rank dies, the others raise RankError.
    """
    joined = joined_plan(PLAN)
    text = read_text(train_bytes=steps * joined.batch * joined.length, rows=_ROWS, length=joined.length)
    options, rates = TextOptions([out / TEXT]), list[float]()

    def written() -> str:
        text.write(out / TEXT)
        return ""

    with watched(watch_of(ranks, _SECONDS, lambda: "start the demo again")):
        first_rank_decides(written, ranks, next(model.parameters()).device)
    step, summary = train_model(
        model,
        PLAN,
        options,
        RunOptions(steps, out, rank_seconds=_SECONDS),
        console,
        on_step=lambda _, result: rates.append(_rate(result)),
        ranks=ranks,
    )
    with watched(watch_of(ranks, _SECONDS, lambda: f"{summary.checkpoint} holds the run")):
        held_out = held_out_loss(step, text.held_out, ranks.rank)
    losses = [] if twin is None else _eager_losses(twin, joined, options, rates[:eager_steps], console)
    return Outcome(summary.losses, losses, held_out, text)


def held_out_loss(step: CompiledStep, rows: Tensor, rank: int = 0) -> float:
    """Mean loss in nats per byte over rows of token ids, int64 [rows, length], each a document of its own.

    All ranks call it together with the same rows; each takes its part of every batch.
    """
    plan = step.plan
    batches = [_documents(ids) for ids in rows.split(plan.batch * plan.mesh.world)]
    losses = [float(step.loss(split_rows(batch, plan)[rank])["lm_loss"]) for batch in batches]
    return sum(losses) / len(losses)


def _eager_losses(
    model: nn.Module, plan: Plan, text: TextOptions, rates: Sequence[float], console: Console
) -> list[float]:
    vocabulary = training_view(model, plan).vocabulary
    eager, data = EagerStep(model, plan), open_text(text, plan, vocabulary)
    shown = track(rates, "the same in eager PyTorch, on one rank", console=console, transient=True)
    return [float(eager(next(data), rate)) for rate in shown]


def _documents(ids: Tensor) -> Mapping[str, Tensor]:
    labels = ids.clone()
    labels[:, 0] = IGNORED
    return {"input_ids": ids, "labels": labels}


def _rate(result: StepResult) -> float:
    return float(result.metrics["lr"])
