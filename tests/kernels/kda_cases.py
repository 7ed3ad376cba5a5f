"""Inputs for the KDA kernels, and how far their results lie from the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAMES = ("q", "k", "v", "gate", "beta", "A_log", "dt_bias", "conv_q", "conv_k", "conv_v", "output_gate", "norm_weight")
STATELESS = 22
"""Arguments of `moec::kda`; what follows is the initial state."""


def inputs(
    length: int,
    *,
    batch: int = 1,
    heads: int = 1,
    value_heads: int = 1,
    width: int = 16,
    value_width: int = 16,
    kind: str = "bounded",
    gates: str = "mixed",
    scalar: bool = False,
    conv: bool = True,
    taps: int = 4,
    norm: bool = True,
    activation: str = "sigmoid",
    packed: bool = False,
    state: bool = False,
    lower_bound: float = -5.0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> list[Any]:
    """Arguments of `moec::kda`, or of `moec::kda_with_state` if `state`.

    gates: "mixed" channels, fast to slow; all "fast" or "slow"; all at the "bound".
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    keys, values = heads * width, value_heads * value_width
    gate_width = value_heads * (1 if scalar else width)
    shift = {
        "mixed": torch.linspace(-7, 3, gate_width, dtype=torch.float64),
        "fast": torch.full((gate_width,), 1.0, dtype=torch.float64),
        "slow": torch.full((gate_width,), -9.0, dtype=torch.float64),
        "bound": torch.full((gate_width,), 8.0, dtype=torch.float64),
    }[gates]
    filters = [random(size, taps) * 0.5 if conv else None for size in (keys, keys, values)]
    documents = None
    if packed:
        starts = torch.rand(batch, length, generator=generator) < 8 / max(length, 8)
        documents = starts.to(torch.int64).cumsum(1)
    tensors: list[Any] = [
        random(batch, length, keys),
        random(batch, length, keys),
        random(batch, length, values),
        random(batch, length, gate_width),
        random(batch, length, value_heads),
        random(value_heads) * 0.3,
        shift,
        *filters,
        random(batch, length, values) if norm else None,
        1 + 0.2 * random(value_width) if norm else None,
    ]
    kept = torch.float32 if dtype == torch.bfloat16 else dtype
    weights = {5, 6, 7, 8, 9, 11}
    tensors = [
        value if value is None else value.to(device, kept if place in weights else dtype)
        for place, value in enumerate(tensors)
    ]
    documents = None if documents is None else documents.to(device)
    options = [heads, value_heads, kind, lower_bound, 1e-6, 1e-5, activation, width**-0.5, 64]
    initial = [random(batch, value_heads, width, value_width).to(device, kept)] if state else []
    return [*tensors, documents, *options, *initial]


def grad_for(arguments: list[Any], seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    v = arguments[2]
    return torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v.device, v.dtype)


def state_grad_for(arguments: list[Any], seed: int = 2) -> list[Tensor]:
    """The gradient of the final state, if the op has one."""
    generator = torch.Generator().manual_seed(seed)
    initial = arguments[STATELESS:]
    return [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device, x.dtype) for x in initial]


def results(arguments: list[Any], grad: Tensor, kernels: bool = True) -> list[Tensor]:
    """Output, final state if there is one, and gradients, by the kernels or the reference."""
    name = ("kda" if len(arguments) == STATELESS else "kda_with_state") + "_triton" * kernels
    forward, backward = getattr(torch.ops.moec, name), getattr(torch.ops.moec, f"{name}_backward")
    found = forward(*arguments)
    given = list(found) if isinstance(found, tuple) else [found]
    return [*given, *backward(grad, *state_grad_for(arguments), *arguments)]


def reference(arguments: list[Any], grad: Tensor) -> list[Tensor]:
    """`results` of the reference op, in float64."""
    double = [
        value.double() if isinstance(value, Tensor) and value.is_floating_point() else value for value in arguments
    ]
    return results(double, grad.double(), kernels=False)


def errors(found: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """|found - expected| / |expected| of the output "y", the final state "end" and each gradient, by name; not a number
    is infinite."""
    names = ("y", *NAMES) if len(found) == 1 + len(NAMES) else ("y", "end", *NAMES, "initial_state")
    result = {}
    for name, value, truth in zip(names, found, expected, strict=True):
        if truth.numel():
            assert value.shape == truth.shape, (name, value.shape, truth.shape)
            scale = float(truth.double().norm()) or 1.0
            error = float((value.double() - truth.double()).norm()) / scale
            result[name] = error if error == error else float("inf")
    return result
