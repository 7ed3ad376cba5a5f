"""`moec::region`: how the outer graph calls a layer template.

    region(template, path, inputs, weights) -> results
    region_backward(template, path, inputs, weights, grads) -> gradients of inputs, then of weights

The ops are opaque, so the outer graph holds one node per layer and direction whatever the layer contains. What a layer
saves for its backward does not show here: the emitted program hands it over by the layer's path. What a template means
is looked up in the table that `templates_in_scope` installs for the time of one compilation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


class RegionTemplate(Protocol):
    """What the ops need to know of a template."""

    def fake_forward(self, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """Fakes of the results."""
        ...

    def fake_backward(self, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """Fakes of the gradients, in the order of `grad_positions`."""
        ...

    @property
    def tangent_positions(self) -> Sequence[int]:
        """Positions in the results that pass a gradient back."""
        ...

    @property
    def grad_positions(self) -> Sequence[int]:
        """Positions in inputs + weights that get a gradient."""
        ...

    def run(self, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """Execute the template's graph on real tensors."""
        ...


_TEMPLATES: dict[str, RegionTemplate] = {}


@contextmanager
def templates_in_scope(templates: Mapping[str, RegionTemplate]) -> Iterator[None]:
    """Make template names known to the ops; nests, and restores the outer table on exit."""
    outer = dict(_TEMPLATES)
    _TEMPLATES.update(templates)
    try:
        yield
    finally:
        _TEMPLATES.clear()
        _TEMPLATES.update(outer)


@torch.library.custom_op("moec::region", mutates_args=())
def region(template: str, path: str, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """One call of a layer template; see the module docstring."""
    return [value.detach().clone() for value in _TEMPLATES[template].run(inputs, weights)]


@region.register_fake
def _region_fake(template: str, path: str, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    return _TEMPLATES[template].fake_forward(inputs, weights)


@torch.library.custom_op("moec::region_backward", mutates_args=())
def region_backward(
    template: str,
    path: str,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
) -> list[Tensor]:
    """Gradients of one call of a layer template. Only traced: autograd does not reach into an op that runs."""
    raise AssertionError("moec::region_backward stands for the emitted backward of a layer and never runs")


@region_backward.register_fake
def _region_backward_fake(
    template: str,
    path: str,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
) -> list[Tensor]:
    return _TEMPLATES[template].fake_backward(inputs, weights)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.template, ctx.path, region_inputs, weights = inputs
    ctx.input_count = len(region_inputs)
    ctx.save_for_backward(*region_inputs, *weights)


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    tensors, split = ctx.saved_tensors, ctx.input_count
    known = _TEMPLATES[ctx.template]
    tangents = [grads[i] for i in known.tangent_positions]
    found = region_backward(ctx.template, ctx.path, list(tensors[:split]), list(tensors[split:]), tangents)
    slots: list[Tensor | None] = [None] * len(tensors)
    for position, grad in zip(known.grad_positions, found, strict=True):
        slots[position] = grad
    return None, None, slots[:split], slots[split:]


region.register_autograd(_backward, setup_context=_setup_context)
