"""`moec verify --lockstep N` and `--ranks N`: the step of N ranks against the step of one rank on all their rows.

1. The one-rank step has the same plan but for the mesh, and all ranks' rows in each microbatch.
2. Every step compares the loss, every whole gradient, the gradient norm and, after the update, every whole parameter,
   master and buffer (which hold what the routers counted).
3. A loss or gradient beyond its bound is measured against eager PyTorch in the next wider type, since sums over ranks
   are added in another order, and products over fewer rows may be rounded in another way: it may be three times as far
   from it as the one-rank numbers of its role are, in half precision 1.5 times as far as these are in any step.
4. What routers count falls into bins, and a score that is rounded into the next one moves a bias: biases of balanced
   routers have the bound of counts.
5. The one-rank step updates with the gradients of the ranks and then takes over their parameters, for the reason that
   verification.py gives: what free-running copies show is how rounding grows.

The same function runs on simulated ranks (threads in lock step) and on real ones.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

import moec
from moec.comparison import (
    BOUNDS,
    FULL,
    HALF_FLOOR,
    NOISE_RATIO,
    SCALAR_FLOOR,
    Comparison,
    Kind,
    Progress,
    error_of,
    silent,
)
from moec.compiler.errors import PlanError
from moec.compiler.plan import MeshPlan, Plan
from moec.distance import largest_by_role, role
from moec.eager import EagerStep
from moec.models.adapters import training_view
from moec.placing import UnconnectedStep
from moec.random_batch import random_batches, vocabulary_of
from moec.runtime.protocol import StepResult
from moec.runtime.ranks import Ranks
from moec.runtime.sharded_state import ShardedState
from moec.runtime.state import StepState
from moec.runtime.whole import each_whole
from moec.simulated import split_rows
from moec.step import CompiledStep
from moec.verification import Report

Tensors = dict[str, Tensor]
Numbers = dict[Kind, Mapping[str, Tensor | None]]
REDUCED = 2.0**-7
"""How far a gradient may be off that is summed over ranks in bfloat16, which rounds each part by up to 2**-9."""


def joined_plan(plan: Plan) -> Plan:
    """The plan of one rank that takes the rows of all."""
    world = plan.mesh.world
    return replace(plan, batch=plan.batch * world, image_tokens=plan.image_tokens * world, mesh=MeshPlan())


def joined_batches(model: nn.Module, plan: Plan, steps: int, seed: int) -> list[Tensors]:
    """Random batches with the rows of all ranks, where the model is."""
    view = training_view(model, plan)
    vocabulary = view.vocabulary or vocabulary_of(model)
    source = random_batches(joined_plan(plan), vocabulary, seed, view.images, ranks=plan.mesh.world)
    device = next(model.parameters()).device
    return [{name: value.to(device) for name, value in next(source).items()} for _ in range(steps)]


def verify_lockstep(
    model: nn.Module, plan: Plan, *, steps: int = 3, seed: int = 0, progress: Progress = silent
) -> Report:
    """Compare simulated ranks with one rank; the model stays as it is."""
    if plan.mesh.world == 1:
        raise PlanError("the plan's mesh has one rank", where="plan.mesh", hint="set mesh.fsdp, and mesh.ep")
    progress("compiling")
    one = OneRank(copy.deepcopy(model), joined_plan(plan))
    many = cast(UnconnectedStep, moec.compile(copy.deepcopy(model), plan)).simulate_ranks()
    batches = joined_batches(model, many.plan, steps, seed)
    found = many.run(lambda rank: compare(many.steps[rank], one if rank == 0 else None, batches, rank, progress))
    return found[0]


def verify_ranks(
    model: nn.Module,
    plan: Plan,
    ranks: Ranks,
    reference: nn.Module | None,
    *,
    steps: int = 3,
    seed: int = 0,
    weights: Path | None = None,
    progress: Progress = silent,
) -> Report:
    """Compare connected ranks with one rank; all call it together, and the first one's report says what was found.

    model: may be without weights (`moec.deferred_init`), or start from those in files. reference: on the first rank a
    whole model with the same weights; that rank also gathers what it compares, and no other one ever holds more of it
    than one tensor.
    """
    progress("compiling")
    step = moec.compile(model, plan, weights=weights)
    batches = joined_batches(model, step.plan, steps, seed)
    one = None if reference is None else OneRank(reference, joined_plan(plan))
    return compare(step, one, batches, ranks.rank, progress)


class OneRank:
    """The reference: the compiled step of one rank over `model`, and a more precise run of it.

    dtype: of most of the model's parameters. biases: buffers that the balance of routers writes.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.step, self._model, self._plan = moec.compile(model, plan), model, plan
        self.dtype = _main_dtype(model)
        self.biases = {bias for bias, _, _ in training_view(model, plan).balanced}

    def numbers(self, batch: Tensors) -> Numbers:
        """Losses and gradients of one rank; changes nothing."""
        return _numbers(self.step.loss(batch), self.step.gradients(batch))

    def precise(self, batch: Tensors) -> Numbers:
        """The same in eager PyTorch, in the next wider type at the weights of the moment."""
        wider = copy.deepcopy(self._model).to(torch.float32 if self.dtype in HALF_FLOOR else torch.float64)
        return _numbers(*EagerStep(wider, replace(self._plan, dtype=None)).gradients(batch))


def compare(
    step: CompiledStep, one: OneRank | None, batches: Sequence[Tensors], rank: int, progress: Progress = silent
) -> Report:
    """What one rank does for the comparison; the rank that is given the reference gets a report of it.

    All ranks call this together, with the same batches.
    """
    mesh = step.plan.mesh
    title = f"{mesh.world} ranks (ep {mesh.ep}) against one"
    report, state = Report(title=title), cast(ShardedState, step.state)
    judge = None if one is None else _Judge(one, _bounds(state, step.plan))
    for number, batch in enumerate(batches, 1):
        progress(f"step {number} of {len(batches)}")
        rate = step.learning_rate()
        rows = split_rows(batch, step.plan)[rank]
        gradients = _gathered(state, step.gradients(rows), one is not None)
        result = step(rows, lr=rate)
        after = _whole_state(state, one is not None)
        if one is not None and judge is not None:
            judge.step(number, batch, rate, result, gradients, after)
            _take_over(one.step.state, after)
    if judge is not None:
        report.comparisons, report.losses = judge.settled(), judge.losses
    return report


@contextmanager
def _updating_with(step: CompiledStep, gradients: Mapping[str, Tensor]) -> Iterator[None]:
    """Within the context the step updates with other gradients than its own."""
    program = step.program
    update = program.update

    def watched(state: StepState, lr: float) -> Tensor:
        state.gradients = {name: value.clone() for name, value in gradients.items()}
        return update(state, lr)

    program.update = watched  # type: ignore[attr-defined]
    try:
        yield
    finally:
        program.update = update  # type: ignore[attr-defined]


@dataclass
class _Judge:
    """Compares with one rank, step by step. losses: (ranks, one rank) of each step so far."""

    one: OneRank
    bounds: Mapping[Kind, float]
    losses: list[tuple[float, float]] = field(default_factory=list)
    _found: list[Comparison] = field(default_factory=list)
    _noise: dict[tuple[Kind, str], float] = field(default_factory=dict)

    def step(
        self,
        number: int,
        batch: Tensors,
        rate: float,
        result: StepResult,
        gradients: Tensors,
        after: dict[Kind, Tensors],
    ) -> None:
        """Make the comparisons of one step, and run that of the one rank."""
        one = self.one
        parts = {name: value for name, value in result.metrics.items() if isinstance(value, Tensor)}
        self._found += self._numbers(number, batch, _numbers({"lm_loss": result.loss, **parts}, gradients))
        with _updating_with(one.step, gradients):
            reference = one.step(batch, lr=rate)
        self.losses.append((float(result.loss), float(reference.loss)))
        self._found.append(self._compare("gradient norm", "", number, result.gradient_norm, reference.gradient_norm))
        state = one.step.state
        wanted: dict[Kind, Mapping[str, Tensor]] = {
            "parameter": {**state.weights, **state.masters},
            "buffer": state.buffers,
        }
        for kind, values in wanted.items():
            for name, value in after[kind].items():
                self._found.append(self._compare(kind, name, number, value, values[name]))

    def settled(self) -> list[Comparison]:
        """All comparisons; in half precision with bounds that follow from all steps."""
        return [self._settle(one) if math.isinf(one.bound) else one for one in self._found]

    def _settle(self, comparison: Comparison) -> Comparison:
        scale = SCALAR_FLOOR if comparison.kind in ("loss", "part of loss") else 1.0
        noise = self._noise[comparison.kind, role(comparison.name)]
        bound = max(NOISE_RATIO[self.one.dtype] * noise, scale * HALF_FLOOR[self.one.dtype])
        return replace(comparison, bound=bound)

    def _numbers(self, number: int, batch: Tensors, found: Numbers) -> list[Comparison]:
        own = self.one.numbers(batch)
        names = {kind: {*values, *(found[kind] if kind == "gradient" else ())} for kind, values in own.items()}
        keys = [(kind, name) for kind, members in names.items() for name in sorted(members)]
        direct = [self._compare(k, n, number, found[k].get(n), own[k].get(n)) for k, n in keys]
        half = self.one.dtype in HALF_FLOOR
        if all(one.equal for one in direct) or (not half and self.one.dtype not in NOISE_RATIO):
            return direct
        precise = self.one.precise(batch)
        noise: dict[tuple[Kind, str], float] = {}
        for kind, values in precise.items():
            errors = {name: error_of(kind, own[kind].get(name), value) for name, value in values.items()}
            noise |= {(kind, place): error for place, error in largest_by_role(errors).items()}
        self._noise |= {key: max(error, self._noise.get(key, 0.0)) for key, error in noise.items()}
        for index, one in enumerate(direct):
            if not one.equal and one.name in precise[one.kind]:
                error = error_of(one.kind, found[one.kind].get(one.name), precise[one.kind][one.name])
                ratio = math.inf if half else NOISE_RATIO[self.one.dtype] * noise[one.kind, role(one.name)]
                direct[index] = replace(one, error=error, bound=max(one.bound, ratio))
        return direct

    def _compare(self, kind: Kind, name: str, step: int, value: Tensor | None, reference: Tensor | None) -> Comparison:
        bound = self.bounds["routing counts" if name in self.one.biases else kind]
        return Comparison(kind, name, step, error_of(kind, value, reference), bound)


def _numbers(losses: Mapping[str, Tensor], gradients: Mapping[str, Tensor | None]) -> Numbers:
    parts = {name: value for name, value in losses.items() if name not in ("lm_loss", "objective")}
    return {"loss": {"lm_loss": losses["lm_loss"]}, "part of loss": parts, "gradient": gradients}


def _whole_state(state: ShardedState, kept: bool) -> dict[Kind, Tensors]:
    weights = _gathered(state, None, kept)
    masters = _gathered(state, state.masters, kept)
    buffers = {path: buffer.clone() for path, buffer in state.buffers.items()}
    return {"rounding": weights, "parameter": {**weights, **masters}, "buffer": buffers}


def _gathered(state: ShardedState, of: Mapping[str, Tensor] | None, kept: bool) -> Tensors:
    """Whole tensors on the rank that keeps them; the others take part."""
    found = {}
    for path, tensor in each_whole(state, of):
        if kept:
            found[path] = tensor
    return found


@torch.no_grad()
def _take_over(state: StepState, values: Mapping[Kind, Tensors]) -> None:
    for path, value in values["rounding"].items():
        state.weights[path].copy_(value)
    for path, master in state.masters.items():
        master.copy_(values["parameter"][path])
    for path, value in values["buffer"].items():
        state.buffers[path].copy_(value)
    state.note_weights()


def _main_dtype(model: nn.Module) -> torch.dtype:
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=lambda dtype: sizes[dtype])


def _bounds(state: StepState, plan: Plan) -> Mapping[Kind, float]:
    dtypes = {weight.dtype for weight in state.weights.values()}
    bounds = next((bounds for dtype, bounds in BOUNDS.items() if dtypes == {dtype}), FULL)
    if plan.mesh.reduce_dtype == "bfloat16":
        return {**bounds, "gradient": REDUCED, "gradient norm": REDUCED}
    return bounds
