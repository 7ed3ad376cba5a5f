"""`moec.verify(model, plan)`: a compiled step against eager PyTorch, on the user's own model and plan.

1. A copy of the model trains for a few steps through its compiled step, another one in plain eager PyTorch (eager.py),
   on the same random batches. The model itself is left as it is.
2. Every step compares the loss, every gradient and, after the update, every parameter and buffer. An error is
   ||a - b|| / ||reference||; where the reference is zero or absent, the other must be too.
3. Both are updated with the compiled gradients, and go on from the compiled parameters. Free-running copies part
   although every step is right: AdamW makes a full step out of a gradient's sign, and the sign of a gradient near zero
   is rounding. Equal gradients at equal parameters and equal updates from equal gradients say the same, undisturbed.
4. float32 and float64: errors stay below fixed bounds. Half precision: a third copy, in float32, is the reference, and
   the compiled step may be at most 1.5 times as far from it as eager half precision is. float32 losses and gradients
   beyond their bound get the same chance against float64, within 3 times eager's error: some sums cancel so far that
   two right orders of adding differ. How far eager is off is the largest error among all tensors of a role (the same
   path but for layer numbers), in half precision in any step: in one tensor of few elements, or where a rounding sends
   one token to another expert, the ratio of two errors is chance.
5. Every pass is checked on its own (pass_checks.py), which names the first pass and node where numbers move.
6. The check is void, and says so, when the reference itself did not move: nothing would have been compared.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from torch import nn

from moec.comparison import FULL, Comparison, Progress, comparison_table, silent
from moec.compiler.errors import PlanError
from moec.compiler.plan import Plan
from moec.distance import relative_error
from moec.eager import microbatches
from moec.models.adapters import training_view
from moec.pass_checks import PassCheck, check_passes, pass_check_table
from moec.random_batch import random_batches, vocabulary_of
from moec.runtime.state import scale_dtype
from moec.settings import TO_VERIFY
from moec.step_pair import StepPair

_LEAST_MOVE = 100.0
_SHOWN = 10


@dataclass
class Report:
    """What `verify` found. losses: (compiled, eager) of each step. void: why nothing was proved, '' if it was.

    title: what was compared with what. rounding: how near to its bound the nearest gradient is, and how far eager is
    off there; '' where that was not measured.
    """

    comparisons: list[Comparison] = field(default_factory=list)
    passes: list[PassCheck] = field(default_factory=list)
    losses: list[tuple[float, float]] = field(default_factory=list)
    void: str = ""
    title: str = "compiled against eager"
    rounding: str = ""

    @property
    def equal(self) -> bool:
        return not self.void and not self.differences() and all(check.equal for check in self.passes)

    def differences(self) -> list[Comparison]:
        """Comparisons beyond their bound, in the order in which they were made."""
        return [comparison for comparison in self.comparisons if not comparison.equal]

    def first_pass(self) -> PassCheck | None:
        """The first pass after which numbers moved by more than its bound."""
        return next((check for check in self.passes if not check.equal), None)

    def __str__(self) -> str:
        console = Console(width=120, record=True, file=io.StringIO())
        for part in self.renderables():
            console.print(part)
        return console.export_text().rstrip()

    def renderables(self) -> Iterator[Any]:
        """Rich tables and lines, for a terminal."""
        yield comparison_table(self.comparisons, self.title)
        if self.passes:
            yield pass_check_table(self.passes)
        moved = self.first_pass()
        if moved is not None:
            yield f"[red]numbers move in pass {moved.name} on {moved.unit}[/red]: {escape(moved.where)}"
        differences = self.differences()
        for one in differences[:_SHOWN]:
            yield (
                f"[red]differs[/red] step {one.step}, {one.kind} {escape(one.name)}: "
                f"error {one.error:.3g}, bound {one.bound:.3g}"
            )
        if len(differences) > _SHOWN:
            yield f"... and {len(differences) - _SHOWN} more"
        nearby = [one for one in self.comparisons if one.nearby]
        if nearby:
            first = f"{escape(nearby[0].name)} of step {nearby[0].step} the first"
            yield (
                f"{len(nearby)} numbers, {first}, were compared with slightly moved weights: at the weights themselves "
                "a near tie was decided the other way"
            )
        if self.rounding:
            yield escape(self.rounding)
        if self.void:
            yield f"[red]proves nothing[/red]: {self.void}"
        yield "[green]equal[/green]" if self.equal else "[red]not equal[/red]"


def verify(
    model: nn.Module, plan: Plan | None = None, *, steps: int = 3, seed: int = 0, progress: Progress = silent
) -> Report:
    """Compare the compiled step of `model` and `plan` with eager PyTorch over `steps` optimizer steps.

    seed: of the random batches (random_batch.py). progress: is told what is being done. Errors of compilation are
    raised as by `moec.compile`.
    """
    if steps < 1:
        raise PlanError(f"steps is {steps}", hint="compare at least one step")
    plan = plan or Plan.from_dict(TO_VERIFY)
    view = training_view(model, plan)
    device = next(model.parameters()).device
    progress("compiling")
    pair = StepPair(model, plan, counts={counts for _, counts, _ in view.balanced})
    plan = pair.compiled.plan
    source = random_batches(plan, view.vocabulary or vocabulary_of(model), seed, view.images)
    batches = [{name: value.to(device) for name, value in next(source).items()} for _ in range(steps)]
    first = microbatches(batches[0], scale_dtype(model.parameters()))[0]
    report = Report(passes=check_passes(copy.deepcopy(model), plan, first, progress))
    comparisons: list[Comparison] = []
    for number, batch in enumerate(batches, 1):
        progress(f"step {number} of {steps}")
        comparisons += pair.step(number, batch)
    report.comparisons = pair.settled(comparisons, batches)
    report.losses = pair.losses
    report.rounding = _rounding(report.comparisons, pair)
    report.void = _void([eager for _, eager in pair.losses], pair.eager.model, model)
    return report


def _rounding(comparisons: list[Comparison], pair: StepPair) -> str:
    """Of the gradient nearest to its bound: an error of that size says little where eager has one of its own."""
    gradients = [one for one in comparisons if one.kind == "gradient" and one.bound]
    nearest = max(gradients, key=lambda one: one.error / one.bound, default=None)
    noise = None if nearest is None else pair.noise(nearest)
    if nearest is None or noise is None:
        return ""
    return (
        f"nearest to its bound is the gradient of {nearest.name} in step {nearest.step}: {nearest.error:.1e} of "
        f"{nearest.bound:.1e}; eager itself is up to {noise:.1e} from the next wider type in such gradients"
    )


def _void(losses: list[float], after: nn.Module, before: nn.Module) -> str:
    """Why the check proves nothing: a reference that hardly moves would pass a step that does nothing."""
    if not all(math.isfinite(loss) for loss in losses):
        return f"the eager loss is not finite: {losses}"
    moves = [relative_error(p, q) for p, q in zip(after.parameters(), before.parameters(), strict=True)]
    if max(moves, default=0.0) < _LEAST_MOVE * FULL["parameter"]:
        return f"no parameter of the eager model moved by more than {max(moves, default=0.0):.1e}"
    change = abs(losses[-1] - losses[0]) / abs(losses[0]) if losses[0] else 0.0
    if len(losses) > 1 and change < _LEAST_MOVE * FULL["loss"]:
        return f"the eager loss moved by {change:.1e} in {len(losses)} steps; raise optimizer.lr"
    return ""
