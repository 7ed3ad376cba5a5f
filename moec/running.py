"""A compiled step and text into the training loop: what `moec train` and `moec run` share.

Imports neither models nor passes, so that an artefact runs where there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from moec.compiler.errors import PlanError
from moec.compiler.plan import Plan
from moec.runtime import PackedText, StepResult, TrainSummary, export_weights
from moec.runtime import train as run_loop
from moec.runtime.groups import watch_of
from moec.runtime.ranks import Ranks
from moec.runtime.tokenizer import FileTokenizer
from moec.runtime.watch import watched
from moec.step import CompiledStep

FINAL_WEIGHTS = "weights.safetensors"


@dataclass(frozen=True)
class TextOptions:
    """What to read. paths: files and folders. patterns: file names inside folders. tokenizer: None reads bytes.

    seed: of the order in which documents are read.
    """

    paths: Sequence[Path]
    patterns: Sequence[str] = ()
    tokenizer: Path | None = None
    seed: int = 0


@dataclass(frozen=True)
class RunOptions:
    """How long to train and what to write.

    steps: of the whole run, those before a resume included. rank_seconds: how long one of several ranks may be silent
    before the others stop.
    """

    steps: int
    out: Path
    resume: bool = False
    checkpoint_every: int = 0
    tensorboard: bool = False
    rank_seconds: float = 30.0


def open_text(text: TextOptions, plan: Plan, vocabulary: int | None, ranks: Ranks | None = None) -> PackedText:
    """The batches of a plan over text, on several ranks the rows of this one.

    Raises DataError when there is none or the tokenizer does not fit, PlanError for a plan that needs more than text.
    """
    if plan.image_tokens:
        raise PlanError(
            f"plan field image_tokens is {plan.image_tokens}",
            where="plan.image_tokens",
            why="text files hold no image features",
            hint="set image_tokens: 0, or call the step from Python with batches of your own",
        )
    return PackedText(
        text.paths,
        batch=plan.batch,
        length=plan.length,
        accumulation=plan.accumulation,
        packing=plan.packing,
        tokenizer=FileTokenizer(text.tokenizer) if text.tokenizer else None,
        vocabulary=vocabulary,
        patterns=text.patterns,
        seed=text.seed,
        ranks=plan.mesh.world,
        rank=ranks.rank if ranks is not None else 0,
    )


def run(
    step: CompiledStep,
    data: PackedText,
    options: RunOptions,
    console: Console,
    on_step: Callable[[int, StepResult], None] | None = None,
    ranks: Ranks | None = None,
) -> TrainSummary:
    """Train, and write the final weights to OUT/weights.safetensors."""
    step.total_steps = options.steps
    summary = run_loop(
        step,
        data,
        steps=options.steps,
        out=options.out,
        resume=options.resume,
        checkpoint_every=options.checkpoint_every,
        tensorboard=options.tensorboard,
        console=console,
        on_step=on_step,
        ranks=ranks,
        rank_seconds=options.rank_seconds,
    )
    with watched(watch_of(ranks or Ranks(), options.rank_seconds, lambda: f"{summary.checkpoint} holds the run")):
        export_weights(step.state, options.out / FINAL_WEIGHTS)
    return summary
