"""The training loop: batches through a compiled step, with metrics, progress, checkpoints and exact resume.

A run's folder holds `metrics.jsonl`, `checkpoints/`, `resumes.jsonl` once it was resumed, and `tensorboard/` when asked
for. For steps start+1 .. steps:
1. take a batch; 2. run the step; 3. stop when the loss is not finite; 4. write the metrics; 5. save a checkpoint every
`checkpoint_every` steps and after the last one.

On several ranks all call `train` together; rank 0 decides where the run starts, prints, and writes everything but the
shards of checkpoints. When a rank dies, the others stop and name it, and the last checkpoint.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from moec.compiler.errors import CheckpointError, NonFiniteError, PlanError
from moec.runtime import random_state
from moec.runtime.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from moec.runtime.control import first_rank_decides
from moec.runtime.metrics import METRICS, JsonLines, Sink, TensorBoard
from moec.runtime.progress import TrainingProgress
from moec.runtime.protocol import Batches, OptimizerStep, StepResult
from moec.runtime.ranks import Ranks
from moec.runtime.watch import Watch, watched

CHECKPOINTS = "checkpoints"
RESUMES = "resumes.jsonl"


@dataclass(frozen=True)
class TrainSummary:
    """What one call of `train` did.

    first_step, last_step: completed steps at the start and at the end. losses: of the steps between, in nats per
    token. tokens: processed in them. seconds: spent in the loop, checkpoints included. checkpoint: the last one.
    """

    first_step: int
    last_step: int
    losses: tuple[float, ...]
    tokens: int
    seconds: float
    checkpoint: Path


def train(
    step: OptimizerStep,
    data: Batches,
    *,
    steps: int,
    out: str | Path,
    resume: bool = False,
    checkpoint_every: int = 0,
    keep: int = 3,
    tensorboard: bool = False,
    on_step: Callable[[int, StepResult], None] | None = None,
    console: Console | None = None,
    ranks: Ranks | None = None,
    rank_seconds: float = 30.0,
) -> TrainSummary:
    """Train until `steps` optimizer steps are completed, those before a resume included.

    resume: go on from the last checkpoint in `out`, or from the beginning if the run was stopped before its first.
    checkpoint_every: steps between checkpoints, 0 for one at the end only. keep: how many stay.
    on_step: called after each step with the number of completed steps and the result, on every rank.
    ranks: which one this is of several. rank_seconds: how long a rank may be silent before it counts as dead.

    Raises CheckpointError when `out` holds a run and `resume` is not set, or when there is nothing to resume, and
    NonFiniteError when loss or gradients are not finite; it names the last good checkpoint. Gradients are checked
    before the update, so the weights are those of the step before; a loss that is not finite although its gradients
    are is found after the update. RankError when another rank has died or raised.
    """
    check_request(steps, checkpoint_every, Path(out))
    ranks = ranks or Ranks()
    printed = (console or Console()) if ranks.is_first else Console(quiet=True)
    run = _Run(step, data, Path(out), keep, printed, ranks)
    with watched(_watch(run, rank_seconds)):
        return _train(run, steps, resume, checkpoint_every, tensorboard, on_step)


def _train(
    run: _Run,
    steps: int,
    resume: bool,
    checkpoint_every: int,
    tensorboard: bool,
    on_step: Callable[[int, StepResult], None] | None,
) -> TrainSummary:
    start = run.resume() if resume else run.start()
    run.console.print(run.data.describe(), highlight=False, markup=False, soft_wrap=True)
    losses: list[float] = []
    tokens, began = 0, time.perf_counter()
    with ExitStack() as stack:
        sinks: list[Sink] = []
        if run.ranks.is_first:
            sinks.append(stack.enter_context(closing(JsonLines(run.out, start))))
        if run.ranks.is_first and tensorboard:
            sinks.append(stack.enter_context(closing(TensorBoard(run.out, start))))
        progress = stack.enter_context(TrainingProgress(run.console, start, steps))
        for number in range(start + 1, steps + 1):
            record, result = run.step(number)
            for sink in sinks:
                sink.write(number, record)
            progress.show(number, record["loss"], record["tokens_per_second"])
            losses.append(record["loss"])
            tokens += result.tokens
            if on_step is not None:
                on_step(number, result)
            if number == steps or (checkpoint_every and number % checkpoint_every == 0):
                run.save()
    return TrainSummary(
        first_step=start,
        last_step=run.compiled.state.step,
        losses=tuple(losses),
        tokens=tokens,
        seconds=time.perf_counter() - began,
        checkpoint=run.last_checkpoint(),
    )


def check_request(steps: int, checkpoint_every: int, out: Path) -> None:
    """Raise what `train` would raise for wrong numbers, or for a folder that is none, before anything is compiled."""
    if steps < 1:
        raise PlanError(f"steps is {steps}", hint="train for at least one step")
    if checkpoint_every < 0:
        raise PlanError(f"checkpoint_every is {checkpoint_every}", hint="give steps, or 0 to save at the end only")
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out} is a file", hint="give a folder to write")


@dataclass
class _Run:
    """One run and its folder."""

    compiled: OptimizerStep
    data: Batches
    out: Path
    keep: int
    console: Console
    ranks: Ranks

    @property
    def checkpoints(self) -> Path:
        return self.out / CHECKPOINTS

    def start(self) -> int:
        """Make the folder of a new run; returns the completed steps."""
        self._first_decides(self._make_folder)
        self._separate_streams()
        return self.compiled.state.step

    def _make_folder(self) -> str:
        if (self.out / METRICS).exists() or latest_checkpoint(self.checkpoints) is not None:
            raise CheckpointError(
                f"{self.out} already holds a run",
                hint="resume it (--resume), or train into another folder",
            )
        self.out.mkdir(parents=True, exist_ok=True)
        return ""

    def resume(self) -> int:
        """Load the last checkpoint; returns the completed steps."""
        name = self._first_decides(self._last_name)
        if not name:
            self._say(f"no checkpoint in {self.out} yet, starting from the beginning")
            self._separate_streams()
            return self.compiled.state.step
        latest = self.checkpoints / name
        changes = load_checkpoint(
            latest,
            self.compiled.state,
            fingerprint=self.compiled.fingerprint,
            settings=self.compiled.settings,
            restore_data=self.data.load_state_dict,
        )
        self._say(f"resuming from {latest}")
        for name, (before, now) in changes.items():
            self._say(f"  {name} was {before}, now it is {now}")
        step = self.compiled.state.step
        if self.ranks.is_first:
            with (self.out / RESUMES).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"step": step, "checkpoint": latest.name, "changed": changes}) + "\n")
        return step

    def _last_name(self) -> str:
        if not self.out.is_dir():
            raise CheckpointError(f"there is no run in {self.out} to resume", hint="check the folder given as out")
        latest = latest_checkpoint(self.checkpoints)
        return latest.name if latest is not None else ""

    def _first_decides(self, decide: Callable[[], str]) -> str:
        return first_rank_decides(decide, self.ranks, self.compiled.state.device)

    def _separate_streams(self) -> None:
        if self.ranks.world > 1:
            random_state.separate(self.ranks.rank)

    def step(self, number: int) -> tuple[dict[str, float], StepResult]:
        """Run one step; returns its record for the metrics and its result."""
        began = time.perf_counter()
        try:
            result = self.compiled(next(self.data))
        except NonFiniteError as error:
            raise NonFiniteError(error.what, where=error.where, why=error.why, hint=self._way_back()) from error
        loss = float(result.loss)
        if not math.isfinite(loss):
            raise NonFiniteError(
                f"step {number}: the loss is {loss}",
                why="the gradients were finite, so the update was made",
                hint=self._way_back(),
            )
        seconds = time.perf_counter() - began
        record = {
            "loss": loss,
            "gradient_norm": float(result.gradient_norm),
            "tokens": result.tokens,
            "seconds": seconds,
            "tokens_per_second": result.tokens / seconds,
        }
        return record | {name: float(value) for name, value in result.metrics.items()}, result

    def save(self) -> None:
        save_checkpoint(
            self.checkpoints,
            self.compiled.state,
            fingerprint=self.compiled.fingerprint,
            settings=self.compiled.settings,
            data=self.data.state_dict(),
            keep=self.keep,
        )

    def last_checkpoint(self) -> Path:
        latest = latest_checkpoint(self.checkpoints)
        assert latest is not None, "the last step saves one"
        return latest

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _way_back(self) -> str:
        latest = latest_checkpoint(self.checkpoints)
        if latest is None:
            return f"{self.last_good()}: start a new run with a lower learning rate"
        return f"{self.last_good()}; resume from it with a lower learning rate or other data"

    def last_good(self) -> str:
        """What there is to go back to, in words."""
        latest = latest_checkpoint(self.checkpoints)
        return f"the last good checkpoint is {latest}" if latest else "there is no checkpoint yet"


def _watch(run: _Run, seconds: float) -> Watch | None:
    if run.ranks.world == 1:
        return None
    from moec.runtime.groups import watch_of  # loads torch.distributed, which one rank does not need

    return watch_of(run.ranks, seconds, lambda: f"{run.last_good()}; start all ranks again and resume")
