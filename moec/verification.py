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
   two right orders of adding differ. How far eager is off is the largest error among the tensors of one role (the same
   path but for layer numbers); within one tensor of few elements the ratio of two roundings is chance.
5. Every pass is checked on its own (pass_checks.py), which names the first pass and node where numbers move.
6. The check is void, and says so, when the reference itself did not move: nothing would have been compared.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import moec
from moec.compiler.errors import PlanError
from moec.compiler.plan import Plan
from moec.distance import largest_by_role, relative_error, role
from moec.eager import EagerStep, microbatches
from moec.models.adapters import training_view
from moec.pass_checks import PassCheck, check_passes, pass_check_table
from moec.random_batch import random_batches, vocabulary_of
from moec.runtime import StepState
from moec.step import CompiledStep

Kind = Literal["loss", "gradient", "gradient norm", "parameter", "rounding", "buffer", "balanced bias"]

DEFAULTS = {"batch": 2, "length": 128}
"""Plan fields of `moec verify` where the user gives none: equality does not need long rows."""

_FULL: dict[Kind, float] = {
    "loss": 1e-6,
    "gradient": 1e-5,
    "gradient norm": 1e-5,
    "parameter": 1e-5,
    "rounding": 0.0,
    "buffer": 1e-5,
    # Counted in bins: one score that rounds into the next bin moves the quantile by a part of a bin.
    "balanced bias": 2e-2,
}
_BOUNDS: dict[torch.dtype, dict[Kind, float]] = {
    torch.float32: _FULL,
    torch.float64: {kind: 1e-5 * bound for kind, bound in _FULL.items()} | {"balanced bias": 2e-2},
}
_RATIO = {torch.float32: 3.0, torch.bfloat16: 1.5, torch.float16: 1.5}
# Two errors far below one rounding of the type are chance, and so is their ratio.
_HALF_FLOOR = {torch.bfloat16: 2.0**-11, torch.float16: 2.0**-14}
_LEAST_MOVE = 100.0
_SHOWN = 10


@dataclass(frozen=True)
class Comparison:
    """One tensor of the compiled step against the reference.

    step: 1 .. steps. error: relative, infinity where only one of the two is zero or absent. bound: what it may be.
    """

    kind: Kind
    name: str
    step: int
    error: float
    bound: float

    @property
    def equal(self) -> bool:
        return self.error <= self.bound


@dataclass
class Report:
    """What `verify` found. losses: (compiled, reference) of each step. void: why nothing was proved, '' if it was."""

    comparisons: list[Comparison] = field(default_factory=list)
    passes: list[PassCheck] = field(default_factory=list)
    losses: list[tuple[float, float]] = field(default_factory=list)
    void: str = ""

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
        yield _comparison_table(self.comparisons)
        yield pass_check_table(self.passes)
        moved = self.first_pass()
        if moved is not None:
            yield f"[red]numbers move in pass {moved.name} on {moved.unit}[/red]: {moved.where}"
        differences = self.differences()
        for one in differences[:_SHOWN]:
            yield (
                f"[red]differs[/red] step {one.step}, {one.kind} {one.name}: "
                f"error {one.error:.3g}, bound {one.bound:.3g}"
            )
        if len(differences) > _SHOWN:
            yield f"... and {len(differences) - _SHOWN} more"
        if self.void:
            yield f"[red]proves nothing[/red]: {self.void}"
        yield "[green]equal[/green]" if self.equal else "[red]not equal[/red]"


def verify(model: nn.Module, plan: Plan | None = None, *, steps: int = 3, seed: int = 0) -> Report:
    """Compare the compiled step of `model` and `plan` with eager PyTorch over `steps` optimizer steps.

    seed: of the random batches (random_batch.py). Errors of compilation are raised as by `moec.compile`.
    """
    if steps < 1:
        raise PlanError(f"steps is {steps}", hint="compare at least one step")
    plan = plan or Plan.from_dict(DEFAULTS)
    view = training_view(model, plan)
    device = next(model.parameters()).device
    source = random_batches(plan, view.vocabulary or vocabulary_of(model), seed)
    batches = [{name: value.to(device) for name, value in next(source).items()} for _ in range(steps)]
    report = Report(passes=check_passes(copy.deepcopy(model), plan, microbatches(batches[0])[0]))
    pair = _Pair(model, plan, balanced={bias for bias, _, _ in view.balanced})
    for number, batch in enumerate(batches, 1):
        report.comparisons += pair.step(number, batch)
    report.losses = pair.losses
    report.void = _void([reference for _, reference in pair.losses], pair.eager.model, model)
    return report


Values = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class _Numbers:
    """What a forward and backward give: the reported losses, and every gradient (None where there is none)."""

    losses: Mapping[str, Tensor]
    gradients: Values

    def of(self, kind: Kind) -> Values:
        return self.losses if kind == "loss" else self.gradients

    def items(self) -> Iterator[tuple[Kind, str, Tensor | None]]:
        yield from (("loss", name, value) for name, value in self.losses.items())
        yield from (("gradient", name, value) for name, value in self.gradients.items())


class _Pair:
    """The compiled copy and the eager one, kept at the same weights; a more precise eager one is made when needed."""

    def __init__(self, model: nn.Module, plan: Plan, balanced: set[str]) -> None:
        self.compiled: CompiledStep = moec.compile(copy.deepcopy(model), plan)
        self.eager = EagerStep(copy.deepcopy(model), plan)
        self.dtype = _main_dtype(model)
        self.balanced = balanced
        self.losses: list[tuple[float, float]] = []
        self._precise: EagerStep | None = None

    def step(self, number: int, batch: Mapping[str, Tensor]) -> Iterator[Comparison]:
        """One step of each, with everything that is compared in the order in which it is computed."""
        rate = self.compiled.learning_rate()
        eager = _Numbers(*self.eager.gradients(batch))
        with _raw_gradients(self.compiled) as raw:
            result = self.compiled(batch, lr=rate)
        reported = {name: value for name, value in result.metrics.items() if isinstance(value, Tensor)}
        gradients = {name: raw.get(name) for name in self.eager.parameters}
        found = _Numbers({"lm_loss": result.loss, **reported}, gradients)
        yield from self._compare_numbers(number, batch, found, eager)
        norm = self.eager.update(gradients, rate)
        yield self._compare("gradient norm", "", number, result.gradient_norm, norm)
        yield from self._compare_state(number)
        self.losses.append((float(result.loss), float(eager.losses["lm_loss"])))

    def _compare_numbers(
        self, number: int, batch: Mapping[str, Tensor], found: _Numbers, eager: _Numbers
    ) -> Iterator[Comparison]:
        direct = [self._compare(kind, name, number, v, eager.of(kind)[name]) for kind, name, v in found.items()]
        half = self.dtype in _HALF_FLOOR
        if not half and (self.dtype == torch.float64 or all(comparison.equal for comparison in direct)):
            yield from direct
            return
        reference = self._precise_numbers(batch)
        kinds: tuple[Kind, ...] = ("loss", "gradient")
        for kind in kinds:
            values = found.of(kind), eager.of(kind), reference.of(kind)
            yield from self._compare_to_precise(kind, number, *values)

    def _compare_to_precise(
        self, kind: Kind, number: int, found: Values, eager: Values, precise: Values
    ) -> Iterator[Comparison]:
        """Within a multiple of how far eager is from the more precise reference."""
        noise = largest_by_role({name: relative_error(eager[name], precise[name]) for name in found})
        for name, value in found.items():
            bound = max(_RATIO[self.dtype] * noise[role(name)], self._floor(kind))
            yield Comparison(kind, name, number, relative_error(value, precise[name]), bound)

    def _bound(self, kind: Kind) -> float:
        return _BOUNDS.get(self.dtype, _FULL)[kind]

    def _floor(self, kind: Kind) -> float:
        return _HALF_FLOOR.get(self.dtype, self._bound(kind))

    @torch.no_grad()
    def _compare_state(self, number: int) -> Iterator[Comparison]:
        """Parameters (their float32 masters where they have some) and buffers after the update.

        Each is taken over by the eager copy: the sum behind a gradient may cancel so far that the last bit of a
        parameter shows in it, and one count in another bin sends tokens to other experts.
        """
        state, eager = self.compiled.state, self.eager
        for name, parameter in eager.model.named_parameters():
            weight, master = state.weights[name], eager.masters.get(name, parameter)
            value = state.masters.get(name, weight)
            yield self._compare("parameter", name, number, value, master)
            if name in state.masters:
                yield self._compare("rounding", name, number, weight, value.to(weight.dtype))
            master.copy_(value)
            parameter.copy_(weight)
        buffers = dict(eager.model.named_buffers())
        yield from self._compare_biases(number, {name: buffers[name] for name in buffers if name in self.balanced})
        for name, buffer in buffers.items():
            if name not in self.balanced:
                yield self._compare("buffer", name, number, state.buffers[name], buffer)
            buffer.copy_(state.buffers[name])

    def _compare_biases(self, number: int, eager: dict[str, Tensor]) -> Iterator[Comparison]:
        found = {name: self.compiled.state.buffers[name] for name in eager}
        if self.dtype in _HALF_FLOOR:
            assert self._precise is not None
            precise = dict(self._precise.model.named_buffers())
            yield from self._compare_to_precise("balanced bias", number, found, eager, precise)
        else:
            yield from (self._compare("balanced bias", name, number, found[name], eager[name]) for name in eager)

    def _compare(self, kind: Kind, name: str, step: int, value: Tensor | None, reference: Tensor | None) -> Comparison:
        return Comparison(kind, name, step, relative_error(value, reference), self._bound(kind))

    @torch.no_grad()
    def _precise_numbers(self, batch: Mapping[str, Tensor]) -> _Numbers:
        """Forward and backward of the eager copy in the next wider type, at the weights of the moment."""
        wider = torch.float64 if self.dtype in _BOUNDS else torch.float32
        source = self.eager.model
        if self._precise is None:
            self._precise = EagerStep(copy.deepcopy(source).to(wider), replace(self.eager.plan, dtype=None))
        model = self._precise.model
        for mine, theirs in ((model.parameters(), source.parameters()), (model.buffers(), source.buffers())):
            for value, original in zip(mine, theirs, strict=True):
                value.copy_(original)
        with torch.enable_grad():
            numbers = _Numbers(*self._precise.gradients(batch))
        self._precise.rebalance()
        return numbers


@contextmanager
def _raw_gradients(step: CompiledStep) -> Iterator[dict[str, Tensor]]:
    """Copies of the summed gradients as they are when the program's update begins, before it clips them."""
    program, found = step.program, dict[str, Tensor]()
    update = program.update

    def watched(state: StepState, lr: float) -> Tensor:
        found.update({name: gradient.clone() for name, gradient in state.gradients.items()})
        return update(state, lr)

    program.update = watched  # type: ignore[attr-defined]
    try:
        yield found
    finally:
        program.update = update  # type: ignore[attr-defined]


def _void(losses: list[float], after: nn.Module, before: nn.Module) -> str:
    """Why the check proves nothing: a reference that hardly moves would pass a step that does nothing."""
    if not all(math.isfinite(loss) for loss in losses):
        return f"the eager loss is not finite: {losses}"
    moves = [relative_error(p, q) for p, q in zip(after.parameters(), before.parameters(), strict=True)]
    if max(moves, default=0.0) < _LEAST_MOVE * _FULL["parameter"]:
        return f"no parameter of the eager model moved by more than {max(moves, default=0.0):.1e}"
    change = abs(losses[-1] - losses[0]) / abs(losses[0]) if losses[0] else 0.0
    if len(losses) > 1 and change < _LEAST_MOVE * _FULL["loss"]:
        return f"the eager loss moved by {change:.1e} in {len(losses)} steps; raise optimizer.lr"
    return ""


def _main_dtype(model: nn.Module) -> torch.dtype:
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=lambda dtype: sizes[dtype])


def _comparison_table(comparisons: list[Comparison]) -> Table:
    table = Table(title="compiled against eager", title_justify="left", pad_edge=False)
    for title in ("step", "what", "count", "largest error", "bound there", "at", ""):
        table.add_column(title, justify="left" if title in ("what", "at", "") else "right", overflow="fold")
    groups: dict[tuple[int, Kind], list[Comparison]] = {}
    for item in comparisons:
        groups.setdefault((item.step, item.kind), []).append(item)
    for (step, kind), members in groups.items():
        worst = max(members, key=lambda item: (not item.equal, item.error))
        verdict = "[green]equal[/green]" if all(item.equal for item in members) else "[red]differs[/red]"
        table.add_row(
            str(step), kind, str(len(members)), f"{worst.error:.1e}", f"{worst.bound:.1e}", worst.name, verdict
        )
    return table
