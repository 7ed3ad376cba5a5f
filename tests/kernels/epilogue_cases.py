"""Activations as text and as plain PyTorch, and the values that a printed one is compared on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moec.compiler.expression import parse


@dataclass(frozen=True)
class Case:
    """text: the expression. plain: what it stands for, written independently."""

    text: str
    plain: Callable[..., Tensor]


def _situ(gate: Tensor, up: Tensor) -> Tensor:
    return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)


def _clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def _softplus(x: Tensor) -> Tensor:
    return F.softplus(x) + torch.log1p(torch.exp(-x.abs()))


def _waves(x: Tensor) -> Tensor:
    return x.sin() * x.cos() + (x * x + 1).sqrt() * x.erf()


def _invented(gate: Tensor, up: Tensor) -> Tensor:
    """Nobody's activation: a choice, a difference of exponentials, a root, a reciprocal and two bounds."""
    bent = torch.where(gate > up, torch.expm1(-gate.abs()), gate / (1 + gate.abs()))
    return bent * torch.rsqrt(1 + up * up) + torch.minimum(gate, up) * torch.sigmoid(torch.maximum(-gate, up)) / 3


CASES = {
    "swiglu": Case("gate, up: silu(gate) * up", lambda gate, up: F.silu(gate) * up),
    "up first": Case("up, gate: silu(gate) * up", lambda up, gate: F.silu(gate) * up),
    "situ": Case("gate, up: 4.0 * tanh(gate / 4.0) * sigmoid(gate) * (25.0 * tanh(up / 25.0))", _situ),
    "clamped swiglu": Case(
        "gate, up: (t := clamp_max(gate, 7.0)) * sigmoid(1.702 * t) * (clamp_min(clamp_max(up, 7.0), -7.0) + 1.0)",
        _clamped,
    ),
    "geglu": Case("gate, up: gelu(gate) * up", lambda gate, up: F.gelu(gate) * up),
    "geglu tanh": Case("gate, up: gelu_tanh(gate) * up", lambda gate, up: F.gelu(gate, approximate="tanh") * up),
    "relu squared": Case("x: (t := relu(x)) * t", lambda x: F.relu(x).square()),
    "gelu": Case("x: gelu(x)", F.gelu),
    "mish": Case("x: mish(x)", F.mish),
    "softplus": Case("x: softplus(x) + log1p(exp(-abs(x)))", _softplus),
    "waves": Case("x: sin(x) * cos(x) + sqrt(x * x + 1.0) * erf(x)", _waves),
    "constant slope": Case("x: 2.0 - x", lambda x: 2 - x),
    "invented": Case(
        "gate, up: where(gate > up, expm1(-abs(gate)), gate / (1.0 + abs(gate))) * rsqrt(1.0 + up * up)"
        " + minimum(gate, up) * sigmoid(maximum(-gate, up)) / 3.0",
        _invented,
    ),
}  # fmt: skip

FAR = [0.0, 1e-30, 1e-8, 0.01, 0.24, 0.26, 1.0, 6.9, 20.0, 88.0, 105.0, 1e4, 1e6]
FAR += [-value for value in FAR if value]


def values(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Inputs and a gradient: random ones, then every combination of `FAR`."""
    count = len(parse(case.text).inputs)
    generator = torch.Generator().manual_seed(count)
    spread = [3 * torch.randn(600, dtype=torch.float64, generator=generator) for _ in range(count)]
    far = torch.tensor(list(itertools.product(FAR, repeat=count)), dtype=torch.float64).unbind(1)
    inputs = [torch.cat(pair).to(dtype) for pair in zip(spread, far, strict=True)]
    return [*inputs, torch.randn(inputs[0].numel(), dtype=torch.float64, generator=generator).to(dtype)]


def wanted(case: Case, given: list[Tensor]) -> list[Tensor]:
    """The result and the gradients of the plain form, by autograd in float64."""
    leaves = [value.double().requires_grad_() for value in given[:-1]]
    result = case.plain(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, given[-1].double())]


def excess(case: Case, given: list[Tensor], found: list[Tensor], bound: float) -> list[float]:
    """The largest error of each result over its bound, which is relative to what the result is made of."""
    *inputs, grad = (value.double().abs() for value in given)
    reach = torch.stack(inputs).amax(0) + 1
    over = []
    for index, (one, two) in enumerate(zip(found, wanted(case, given), strict=True)):
        scale = two.abs() + (reach if index == 0 else grad * reach)
        over.append(float(((one.double() - two).abs() / (bound * scale)).nan_to_num(nan=torch.inf).max()))
    return over
