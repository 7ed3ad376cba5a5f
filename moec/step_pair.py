"""A compiled step and the eager one side by side, kept at the same weights, with everything compared that they compute.

One step:
1. Forward and backward of both: losses, gradients, and what the routers count for their balance.
2. Both update with the compiled gradients and counts: gradient norm, parameters, buffers. Then the eager copy takes
   over the compiled parameters and buffers.
3. What was beyond its bound in 1 is tried again on the same batch with the weights slightly moved (in half precision
   after the last step): where two experts or two keys are nearly tied a rounding decides, and the decision of the other
   side is right too. A wrong step is still wrong there.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

import moec
from moec.comparison import BOUNDS, FULL, HALF_FLOOR, NOISE_RATIO, SCALAR_FLOOR, Comparison, Kind, error_of
from moec.compiler.plan import Plan
from moec.distance import largest_by_role, role
from moec.eager import EagerStep
from moec.runtime import StepState
from moec.step import CompiledStep

_TRIES = 3
_MOVE, _HALF_MOVE = 1e-3, 1e-2  # several roundings of the type, and far less than a few optimizer steps

Values = Mapping[str, Tensor | None]
Numbers = dict[Kind, Values]


class StepPair:
    """Both sides of the comparison over copies of `model`.

    counts: buffers that a step fills and its update reads. losses: (compiled, eager) of each step so far.
    """

    def __init__(self, model: nn.Module, plan: Plan, counts: set[str]) -> None:
        self.compiled: CompiledStep = moec.compile(copy.deepcopy(model), plan)
        self.eager = EagerStep(copy.deepcopy(model), plan)
        self.losses: list[tuple[float, float]] = []
        self._counts = counts
        self._dtype = _main_dtype(model)
        self._half = self._dtype in HALF_FLOOR
        self._precise: EagerStep | None = None
        self._noise: dict[tuple[Kind, str], float] = {}

    def step(self, number: int, batch: Mapping[str, Tensor]) -> list[Comparison]:
        """One step of both; the comparisons in the order in which things are computed, not yet settled."""
        rate = self.compiled.learning_rate()
        expected = self._eager_numbers(self.eager, batch)
        with _before_update(self.compiled) as (gradients, buffers):
            result = self.compiled(batch, lr=rate)
        parts = {name: value for name, value in result.metrics.items() if isinstance(value, Tensor)}
        found = _numbers({"lm_loss": result.loss, **parts}, {name: gradients.get(name) for name in self.eager.masters})
        found["routing counts"] = {name: buffers[name] for name in self._counts}
        judged = self._judge(number, batch, found, expected)
        self._copy_buffers({name: buffers[name] for name in self._counts})
        norm = self.eager.update(found["gradient"], rate)
        judged = self._try_again(number, batch, judged)  # before one side takes over the other's weights
        self.losses.append((float(result.loss), float(_tensor(expected["loss"]["lm_loss"]))))
        measured = self._compare("gradient norm", "", number, result.gradient_norm, norm)
        return [*judged.values(), measured, *self._compare_state(number)]

    def settled(self, comparisons: list[Comparison], batches: Sequence[Mapping[str, Tensor]]) -> list[Comparison]:
        """With the bounds that half precision leaves open: they follow from how far eager was off in any of the steps.

        What is beyond them is tried again nearby, as in full precision, which measures eager there as well.
        """
        found = [self._settle(comparison) for comparison in comparisons]
        for seed in range(_TRIES if self._half else 0):
            for number in sorted({comparison.step for comparison in found if not comparison.equal}):
                with self._moved_weights(seed):
                    batch = batches[number - 1]
                    again = self._judge(
                        number, batch, self._compiled_numbers(batch), self._eager_numbers(self.eager, batch)
                    )
                found = [self._better(one, again) for one in found]
        return found

    def noise(self, comparison: Comparison) -> float | None:
        """How far eager itself is from the next wider type, in tensors of the same role; None where nobody asked."""
        return self._noise.get((comparison.kind, role(comparison.name)))

    def _better(self, comparison: Comparison, again: Mapping[tuple[Kind, str], Comparison]) -> Comparison:
        """What a second try makes of a comparison of the same step that was beyond its bound."""
        if comparison.equal:
            return comparison
        settled = self._settle(comparison)
        other = again.get((comparison.kind, comparison.name))
        if settled.equal or other is None or other.step != comparison.step:
            return settled
        other = self._settle(other)
        return replace(other, nearby=True) if other.equal else settled

    def _settle(self, comparison: Comparison) -> Comparison:
        key = comparison.kind, role(comparison.name)
        if not self._half or key not in self._noise:
            return comparison
        floor = HALF_FLOOR[self._dtype] * (SCALAR_FLOOR if comparison.kind in ("loss", "part of loss") else 1.0)
        return replace(comparison, bound=max(NOISE_RATIO[self._dtype] * self._noise[key], floor))

    def _judge(
        self, number: int, batch: Mapping[str, Tensor], found: Numbers, expected: Numbers
    ) -> dict[tuple[Kind, str], Comparison]:
        """Against eager; in half precision, and where float32 fails that, against eager in the next wider type."""
        keys = [(kind, name) for kind, values in found.items() for name in values]
        direct = {(k, n): self._compare(k, n, number, found[k][n], expected[k][n]) for k, n in keys}
        doubtful = [key for key, comparison in direct.items() if self._half or not comparison.equal]
        if not doubtful or self._dtype == torch.float64:
            return direct
        precise = self._precise_numbers(batch)
        noise = self._measure_noise(found, expected, precise)
        for kind, name in doubtful:
            error = error_of(kind, found[kind][name], precise[kind][name])
            bound = math.inf if self._half else NOISE_RATIO[self._dtype] * noise[kind, role(name)]
            direct[kind, name] = Comparison(kind, name, number, error, max(bound, self._bound(kind)))
        return direct

    def _measure_noise(self, found: Numbers, expected: Numbers, precise: Numbers) -> dict[tuple[Kind, str], float]:
        """How far eager is from the more precise reference, by kind and role; the largest so far is kept."""
        noise: dict[tuple[Kind, str], float] = {}
        for kind, values in found.items():
            errors = {name: error_of(kind, expected[kind][name], precise[kind][name]) for name in values}
            noise |= {(kind, place): error for place, error in largest_by_role(errors).items()}
        self._noise |= {key: max(error, self._noise.get(key, 0.0)) for key, error in noise.items()}
        return noise

    def _try_again(
        self, number: int, batch: Mapping[str, Tensor], judged: dict[tuple[Kind, str], Comparison]
    ) -> dict[tuple[Kind, str], Comparison]:
        for seed in range(_TRIES):
            failing = [key for key, one in judged.items() if not one.equal and key[0] != "routing counts"]
            if not failing or self._half:
                break
            with self._moved_weights(seed):
                again = self._judge(
                    number, batch, self._compiled_numbers(batch), self._eager_numbers(self.eager, batch)
                )
            judged |= {key: replace(again[key], nearby=True) for key in failing if again[key].equal}
        return judged

    @torch.no_grad()
    def _compare_state(self, number: int) -> Iterator[Comparison]:
        """Parameters (their float32 masters where they have some) and buffers after the update.

        Each is taken over by the eager copy, since the sum behind a gradient may cancel so far that the last bit of a
        parameter shows in it.
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
        for name, buffer in eager.model.named_buffers():
            yield self._compare("buffer", name, number, state.buffers[name], buffer)
        self._copy_buffers(state.buffers)

    @torch.no_grad()
    def _copy_buffers(self, values: Mapping[str, Tensor]) -> None:
        for name, buffer in self.eager.model.named_buffers():
            if name in values:
                buffer.copy_(values[name])

    def _compiled_numbers(self, batch: Mapping[str, Tensor]) -> Numbers:
        gradients = self.compiled.gradients(batch)
        return _numbers(self.compiled.loss(batch), {name: gradients.get(name) for name in self.eager.masters})

    def _eager_numbers(self, step: EagerStep, batch: Mapping[str, Tensor]) -> Numbers:
        """Of an eager side; what it counts is taken out of its buffers."""
        numbers = _numbers(*step.gradients(batch))
        buffers = dict(step.model.named_buffers())
        counts = {name: buffers[name].clone() for name in self._counts}
        for name in self._counts:
            buffers[name].zero_()
        return numbers | {"routing counts": counts}

    def _precise_numbers(self, batch: Mapping[str, Tensor]) -> Numbers:
        """Of the eager copy in the next wider type, at the weights of the moment."""
        source = self.eager.model
        if self._precise is None:
            wider = copy.deepcopy(source).to(torch.float32 if self._half else torch.float64)
            self._precise = EagerStep(wider, replace(self.eager.plan, dtype=None))
        model = self._precise.model
        with torch.no_grad():
            for mine, theirs in ((model.parameters(), source.parameters()), (model.buffers(), source.buffers())):
                for value, original in zip(mine, theirs, strict=True):
                    value.copy_(original)
        return self._eager_numbers(self._precise, batch)

    @contextmanager
    def _moved_weights(self, seed: int) -> Iterator[None]:
        """Within the context all parameters of both sides are slightly off, in the same way."""
        size = _HALF_MOVE if self._half else _MOVE
        generator = torch.Generator().manual_seed(seed)
        pairs = [(self.compiled.state.weights[name], parameter) for name, parameter in self.eager.parameters.items()]
        before = [(weight.detach().clone(), parameter.detach().clone()) for weight, parameter in pairs]
        with torch.no_grad():
            for weight, parameter in pairs:
                factor = 1.0 + size * torch.randn(weight.shape, generator=generator).to(weight)
                weight.mul_(factor)
                parameter.mul_(factor)
        try:
            yield
        finally:
            with torch.no_grad():
                for pair, values in zip(pairs, before, strict=True):
                    for tensor, value in zip(pair, values, strict=True):
                        tensor.copy_(value)

    def _bound(self, kind: Kind) -> float:
        return BOUNDS.get(self._dtype, FULL)[kind]

    def _compare(self, kind: Kind, name: str, step: int, value: Tensor | None, reference: Tensor | None) -> Comparison:
        return Comparison(kind, name, step, error_of(kind, value, reference), self._bound(kind))


@contextmanager
def _before_update(step: CompiledStep) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Copies of the summed gradients and of the buffers as they are when the program's update begins."""
    program = step.program
    update = program.update
    gradients, buffers = dict[str, Tensor](), dict[str, Tensor]()

    def watched(state: StepState, lr: float) -> Tensor:
        gradients.update({name: value.clone() for name, value in state.gradients.items()})
        buffers.update({name: value.clone() for name, value in state.buffers.items()})
        return update(state, lr)

    program.update = watched  # type: ignore[attr-defined]
    try:
        yield gradients, buffers
    finally:
        program.update = update  # type: ignore[attr-defined]


def _numbers(losses: Mapping[str, Tensor], gradients: Values) -> Numbers:
    """What a forward and a backward give, by kind and name; None for a gradient that there is none of."""
    parts = {name: value for name, value in losses.items() if name not in ("lm_loss", "objective")}
    return {"loss": {"lm_loss": losses["lm_loss"]}, "part of loss": parts, "gradient": gradients}


def _tensor(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


def _main_dtype(model: nn.Module) -> torch.dtype:
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=lambda dtype: sizes[dtype])
