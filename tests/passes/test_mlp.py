"""recognize_mlp: each activation, gate and up from two projections or one, and what is left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moec.passes.recognize_mlp import RecognizeMlp

from .support import Call, assert_golden, check, counts, graph_text, reasons, what

I = 4  # noqa: E741
GELU, TANH = F.gelu, lambda x: F.gelu(x, approximate="tanh")


def _situ(g: Tensor, u: Tensor) -> Tensor:
    return 4.0 * torch.tanh(g / 4.0) * torch.sigmoid(g) * (25.0 * torch.tanh(u / 25.0))


def _clamped(g: Tensor, u: Tensor) -> Tensor:
    g, u = g.clamp(max=1.0), u.clamp(min=-1.0, max=1.0)
    return (u + 1) * (g * torch.sigmoid(g * 1.702))


ACTIVATIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "silu": (lambda g, u: F.silu(g) * u, "silu"),
    "silu flipped": (lambda g, u: u * F.silu(g), "silu"),
    "silu written": (lambda g, u: g * torch.sigmoid(g) * u, "silu"),
    "gelu": (lambda g, u: GELU(g) * u, "gelu"),
    "gelu tanh": (lambda g, u: TANH(g) * u, "gelu_tanh"),
    "relu squared": (lambda g, u: F.relu(g).square() * u, "relu2"),
    "situ": (_situ, "situ(4, 25)"),
    "clamped": (_clamped, "clamped_swiglu(1.702, 1)"),
}


CASES = [(name, source) for name in sorted(ACTIVATIONS) for source in ("two linears", "chunk")]
CASES += [(name, source) for name in ("silu", "clamped") for source in ("split", "slices", "interleaved")]


@pytest.mark.parametrize(("name", "source"), CASES)
def test_every_activation_and_source(name: str, source: str) -> None:
    activation, text = ACTIVATIONS[name]

    def function(x: Tensor, w: Tensor) -> Tensor:
        if source == "two linears":
            return activation(F.linear(x, w[:I]), F.linear(x, w[I:]))
        both = F.linear(x, w)
        gate, up = {
            "chunk": lambda: both.chunk(2, dim=-1),
            "split": lambda: both.split([I, I], dim=-1),
            "slices": lambda: (both[..., :I], both[..., I:]),
            "interleaved": lambda: (both[..., ::2], both[..., 1::2]),
        }[source]()
        return activation(gate, up)

    unit, report = check(RecognizeMlp(), Call(function, w=torch.randn(2 * I, 3)), torch.randn(2, 5, 3))
    assert counts(unit) == {"gated_mlp_act": 1}
    assert what(report) == [f"gated_mlp_act {text}"]
    assert not report.near_misses


def test_golden_text() -> None:
    module = Call(lambda x, w: _situ(*F.linear(x, w).chunk(2, dim=-1)), w=torch.randn(2 * I, 3))
    unit, _ = check(RecognizeMlp(), module, torch.randn(2, 3))
    assert_golden("gated_mlp_situ", graph_text(unit))


def test_bfloat16_rounds_once() -> None:
    module = Call(lambda x, w: F.silu(F.linear(x, w)) * F.linear(x, w + 1), w=torch.randn(I, 3).to(torch.bfloat16))
    unit, _ = check(RecognizeMlp(), module, torch.randn(2, 3).to(torch.bfloat16), bound=2e-2)
    assert counts(unit) == {"gated_mlp_act": 1}


def test_up_may_have_a_bias() -> None:
    module = Call(lambda x, w, b: F.silu(F.linear(x, w)) * (F.linear(x, w) + b), w=torch.randn(I, 3), b=torch.randn(I))
    unit, _ = check(RecognizeMlp(), module, torch.randn(2, 3))
    assert counts(unit) == {"gated_mlp_act": 1}


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, w: F.silu(F.linear(x, w)) * F.linear(x, w[:1]), "gate and up differ in shape"),
        (lambda x, w: F.silu(F.linear(x, w)) * x[..., :1].expand(2, I).sin(), "up is not a projection but sin"),
        (lambda x, w: F.silu(F.linear(x, w).sin()) * F.linear(x, w), "gate is not a projection but sin"),
        (lambda x, w: (y := F.silu(F.linear(x, w))) * F.linear(x, w) + y, "is used outside the pattern too"),
        (
            lambda x, w: _clamped(F.linear(x, w), F.linear(x, w).clamp(-2, 1) * 1.5),
            "up is not a projection but mul",
        ),
    ],
)
def test_near_misses(function: Callable[[Tensor, Tensor], Tensor], reason: str) -> None:
    unit, report = check(RecognizeMlp(), Call(function, w=torch.randn(I, 3)), torch.randn(2, 3), exact=True)
    assert reason in "\n".join(reasons(report))
    assert not counts(unit)


def test_uneven_clamps_are_another_activation() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        g, u = F.linear(x, w).clamp(max=1.0), F.linear(x, w).clamp(-1.0, 2.0)
        return (u + 1) * (g * torch.sigmoid(g * 1.702))

    unit, report = check(RecognizeMlp(), Call(function, w=torch.randn(I, 3)), torch.randn(2, 3), exact=True)
    assert "gate is clamped at 1.0, up to [-1.0, 2.0]" in "\n".join(reasons(report))
    assert not counts(unit)
