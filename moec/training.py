"""`moec train`: compile a model's step and train it, with everything in one folder.

OUT/artifact/            the emitted step, without weights
OUT/metrics.jsonl        one line per step
OUT/checkpoints/         the run's state
OUT/weights.safetensors  the weights after the last step
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

import moec
from moec.artifact import ARTIFACT, PLAN, write_plan
from moec.compiler.errors import ArtifactError, CheckpointError
from moec.compiler.plan import Plan
from moec.models.adapters import training_view
from moec.running import RunOptions, TextOptions, open_text, run
from moec.runtime import StepResult, TrainSummary, latest_checkpoint
from moec.runtime.identity import may_change
from moec.runtime.loop import CHECKPOINTS, check_request
from moec.runtime.metrics import METRICS
from moec.step import CompiledStep


def train_model(
    model: nn.Module,
    plan: Plan,
    text: TextOptions,
    options: RunOptions,
    console: Console,
    on_step: Callable[[int, StepResult], None] | None = None,
) -> tuple[CompiledStep, TrainSummary]:
    """Compile a step for `model` and train; on resume the run's own artefact is used again where it fits.

    Everything that can be wrong with the data or the folder is found before the compilation.
    """
    _check_out(options)
    data = open_text(text, plan, training_view(model, plan).vocabulary)
    step = _compiled(model, plan, options, console)
    return step, run(step, data, options, console, on_step)


def earlier_plan(out: Path) -> dict[str, Any]:
    """Fields of the plan that the run in `out` has been trained with; none when there is none yet."""
    path = out / ARTIFACT / PLAN
    return Plan.from_yaml(path).to_dict() if path.is_file() else {}


def _check_out(options: RunOptions) -> None:
    out = options.out
    check_request(options.steps, options.checkpoint_every, out)
    if options.resume and not out.is_dir():
        raise CheckpointError(f"there is no run in {out} to resume", hint="check the folder given as --out")
    holds_run = (out / METRICS).exists() or latest_checkpoint(out / CHECKPOINTS) is not None
    if holds_run and not options.resume:
        raise CheckpointError(f"{out} already holds a run", hint="resume it (--resume), or train into another folder")


def _compiled(model: nn.Module, plan: Plan, options: RunOptions, console: Console) -> CompiledStep:
    folder = options.out / ARTIFACT
    if options.resume and folder.is_dir():
        try:
            step = moec.load(folder, model, plan=plan)
            write_plan(folder, plan)
            return step
        except ArtifactError as error:
            if not may_change(error.where):
                raise
            console.print(f"compiling again: {error.where} differs, {error.why}", highlight=False, markup=False)
    with console.status("compiling"):
        step = moec.compile(model, plan)
    # Renamed into place, so that a kill cannot leave half an artefact for a resume to find.
    partial = folder.with_name(f"{ARTIFACT}.partial")
    for old in (partial, folder):
        shutil.rmtree(old, ignore_errors=True)
    step.save(partial).rename(folder)
    step.folder = folder
    return step
