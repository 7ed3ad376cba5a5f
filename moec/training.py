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

from rich.console import Console
from torch import nn

import moec
from moec.artifact import check_fingerprint, write_plan
from moec.artifact_files import ARTIFACT, PLAN
from moec.compiler.errors import ArtifactError, CheckpointError
from moec.compiler.plan import Plan
from moec.emit import emit
from moec.models.adapters import training_view
from moec.running import RunOptions, TextOptions, open_text, run
from moec.runtime import StepResult, TrainSummary, latest_checkpoint
from moec.runtime.control import first_rank_decides
from moec.runtime.groups import watch_of
from moec.runtime.handshake import lines_of, shake_hands
from moec.runtime.identity import may_change, rows_per_step
from moec.runtime.loop import CHECKPOINTS, check_request
from moec.runtime.metrics import METRICS
from moec.runtime.ranks import Ranks
from moec.runtime.watch import watched
from moec.step import CompiledStep
from moec.weights import check_weights


def train_model(
    model: nn.Module,
    plan: Plan,
    text: TextOptions,
    options: RunOptions,
    console: Console,
    on_step: Callable[[int, StepResult], None] | None = None,
    ranks: Ranks | None = None,
    weights: Path | None = None,
) -> tuple[CompiledStep, TrainSummary]:
    """Compile a step for `model` and train; on resume the run's own artefact is used again where it fits.

    weights: where a new run takes its first weights from, in place of the model's own (moec/weights.py).

    Everything that can be wrong with the data, the weights or the folder is found before the compilation. On several
    connected ranks all call it together, with OUT in a file system that they share: rank 0 compiles, and all load what
    it wrote.
    """
    ranks = ranks or Ranks()
    with watched(watch_of(ranks, options.rank_seconds, lambda: "no step was made; start all ranks again")):
        _agree(model, plan, text, options, ranks)
        _check_out(options)
        data = open_text(text, plan, training_view(model, plan).vocabulary, ranks)
        start = _start(model, options, ranks, weights)
        if ranks.world == 1:
            step = _compiled(model, plan, options, console, start)
        else:
            step = _compiled_once(model, plan, options, console, ranks, start)
    return step, run(step, data, options, console, on_step, ranks)


def _agree(model: nn.Module, plan: Plan, text: TextOptions, options: RunOptions, ranks: Ranks) -> None:
    """Ranks that were asked for different things are told so, on every rank, before the first one compiles."""
    if ranks.world == 1:
        return
    run = {"steps": options.steps, "resume": options.resume, "checkpoint_every": options.checkpoint_every}
    described = {name: f"{p.dtype} {list(p.shape)}" for name, p in model.named_parameters(remove_duplicate=False)}
    sections = {
        "plan": lines_of(plan.to_dict()),
        "model": lines_of(described),
        "run": lines_of(run | {"seed": text.seed, "patterns": list(text.patterns)}),
    }
    shake_hands(sections, ranks.world, next(model.parameters()).device)


def _check_out(options: RunOptions) -> None:
    out = options.out
    check_request(options.steps, options.checkpoint_every, out)
    if options.resume and not out.is_dir():
        raise CheckpointError(f"there is no run in {out} to resume", hint="check the folder given as --out")
    holds_run = (out / METRICS).exists() or latest_checkpoint(out / CHECKPOINTS) is not None
    if holds_run and not options.resume:
        raise CheckpointError(f"{out} already holds a run", hint="resume it (--resume), or train into another folder")


def _check_rows(folder: Path, plan: Plan) -> None:
    """What a step reads is found to differ before the artefact of the run is replaced."""
    before, now = rows_per_step(Plan.from_yaml(folder / PLAN)), rows_per_step(plan)
    if before == now:
        return
    batch, rest = divmod(before, plan.accumulation * plan.mesh.world)
    raise CheckpointError(
        f"a step of this run reads {before} rows, with this plan it would read {now}",
        where=f"batch {plan.batch} x accumulation {plan.accumulation} x {plan.mesh.world} ranks",
        why="a resumed run goes on with the same steps",
        hint="choose batch, accumulation and ranks with the same product" + ("" if rest else f", as batch={batch}"),
    )


def _say_what_differs(error: ArtifactError, out: Path, console: Console) -> None:
    """Why the artefact of a resumed run is compiled again; CheckpointError for what has to stay."""
    if not may_change(error.where):
        raise CheckpointError(
            f"the run in {out} is another one: {error.where} differs",
            where=error.where,
            why=error.why,
            hint="resume it with the same model and plan, or train into another folder (--out)",
        ) from error
    console.print(f"compiling again: {error.where} differs, {error.why}", highlight=False, markup=False)


def _start(model: nn.Module, options: RunOptions, ranks: Ranks, weights: Path | None) -> Path | None:
    """Where the step takes its weights from: the last checkpoint where there is one to resume from, or `weights`."""
    if options.resume:
        device = next(model.parameters()).device
        latest = first_rank_decides(lambda: str(latest_checkpoint(options.out / CHECKPOINTS) or ""), ranks, device)
        if latest:
            return Path(latest)
    if weights is not None:
        check_weights(model, weights, ranks)
    return weights


def _compiled(model: nn.Module, plan: Plan, options: RunOptions, console: Console, start: Path | None) -> CompiledStep:
    folder = options.out / ARTIFACT
    if options.resume and folder.is_dir():
        _check_rows(folder, plan)
        try:
            step = moec.load(folder, model, plan=plan, weights=start)
            write_plan(folder, step.plan)
            return step
        except ArtifactError as error:
            _say_what_differs(error, options.out, console)
    with console.status("compiling"):
        step = moec.compile(model, plan, weights=start)
    step.save(_make_room(folder)).rename(folder)
    step.folder = folder
    return step


def _compiled_once(
    model: nn.Module, plan: Plan, options: RunOptions, console: Console, ranks: Ranks, start: Path | None
) -> CompiledStep:
    folder = options.out / ARTIFACT

    def written() -> str:
        if options.resume and folder.is_dir():
            _check_rows(folder, plan)
            try:
                check_fingerprint(folder, plan, model)
                return ""
            except ArtifactError as error:
                _say_what_differs(error, options.out, console)
        with console.status("compiling"):
            partial = _make_room(folder)
            emit(model, plan, partial)
        partial.rename(folder)
        return ""

    first_rank_decides(written, ranks, next(model.parameters()).device)
    return moec.load(folder, model, plan=plan, weights=start)


def _make_room(folder: Path) -> Path:
    """Where to write an artefact before it is renamed into place: a kill then leaves none for a resume to find."""
    partial = folder.with_name(f"{ARTIFACT}.partial")
    for old in (partial, folder):
        shutil.rmtree(old, ignore_errors=True)
    return partial
