"""`moec train` and `moec run`: data and a compiled step into the training loop, with everything in one folder.

OUT/artifact/            the emitted step (without weights)
OUT/metrics.jsonl        one line per step
OUT/checkpoints/         the run's state
OUT/weights.safetensors  the weights after the last step
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from torch import nn

import moec
from moec.compiler.errors import CheckpointError
from moec.compiler.plan import Plan
from moec.models.adapters import training_view
from moec.runtime import PackedText, StepResult, TrainSummary, export_weights, latest_checkpoint
from moec.runtime import train as run_loop
from moec.runtime.loop import CHECKPOINTS
from moec.runtime.metrics import METRICS
from moec.runtime.tokenizer import FileTokenizer
from moec.step import CompiledStep

ARTIFACT = "artifact"
FINAL_WEIGHTS = "weights.safetensors"


@dataclass(frozen=True)
class TextOptions:
    """What to read. paths: files and folders. patterns: file names inside folders. tokenizer: None reads bytes."""

    paths: Sequence[Path]
    patterns: Sequence[str] = ()
    tokenizer: Path | None = None


@dataclass(frozen=True)
class RunOptions:
    """How long to train and what to write. steps: of the whole run, those before a resume included."""

    steps: int
    out: Path
    resume: bool = False
    checkpoint_every: int = 0
    tensorboard: bool = False


def train_model(
    model: nn.Module,
    plan: Plan,
    text: TextOptions,
    options: RunOptions,
    console: Console,
    on_step: Callable[[int, StepResult], None] | None = None,
) -> tuple[CompiledStep, TrainSummary]:
    """Compile a step for `model` and train; on resume the run's own artefact is used again.

    Everything that can be wrong with the data or the folder is found before the compilation.
    """
    _check_out(options)
    data = open_text(text, plan, training_view(model, plan).vocabulary)
    step = _compiled(model, plan, options, console)
    return step, run(step, data, options, console, on_step)


def open_text(text: TextOptions, plan: Plan, vocabulary: int | None) -> PackedText:
    """The batches of a plan over text; raises DataError when there is none or the tokenizer does not fit."""
    return PackedText(
        text.paths,
        batch=plan.batch,
        length=plan.length,
        accumulation=plan.accumulation,
        packing=plan.packing,
        tokenizer=FileTokenizer(text.tokenizer) if text.tokenizer else None,
        vocabulary=vocabulary,
        patterns=text.patterns,
    )


def run(
    step: CompiledStep,
    data: PackedText,
    options: RunOptions,
    console: Console,
    on_step: Callable[[int, StepResult], None] | None = None,
) -> TrainSummary:
    """Train with a step at hand and write the final weights."""
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
    )
    export_weights(step.state, options.out / FINAL_WEIGHTS)
    return summary


def _compiled(model: nn.Module, plan: Plan, options: RunOptions, console: Console) -> CompiledStep:
    folder = options.out / ARTIFACT
    if options.resume and folder.is_dir():
        return moec.load(folder, model, plan=plan)
    with console.status("compiling"):
        step = moec.compile(model, plan)
    # Renamed into place, so that a kill cannot leave half an artefact for a resume to find.
    partial = folder.with_name(f"{ARTIFACT}.partial")
    for old in (partial, folder):
        shutil.rmtree(old, ignore_errors=True)
    step.save(partial).rename(folder)
    step.folder = folder
    return step


def _check_out(options: RunOptions) -> None:
    holds_run = (options.out / METRICS).exists() or latest_checkpoint(options.out / CHECKPOINTS) is not None
    if holds_run and not options.resume:
        raise CheckpointError(
            f"{options.out} already holds a run", hint="resume it (--resume), or train into another folder"
        )
