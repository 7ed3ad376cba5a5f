from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from moec.compiler import dialect
from moec.compiler.dialect.activation import KINDS
from tests.dialect.contract import assert_as_accurate, check_op, rand, relative_rms

LOW = torch.bfloat16
EAGER = {
    "silu": lambda gate, up, a, b: functional.silu(gate) * up,
    "gelu": lambda gate, up, a, b: functional.gelu(gate) * up,
    "gelu_tanh": lambda gate, up, a, b: functional.gelu(gate, approximate="tanh") * up,
    "relu2": lambda gate, up, a, b: functional.relu(gate).square() * up,
    "situ": lambda gate, up, a, b: a * torch.tanh(gate / a) * torch.sigmoid(gate) * (b * torch.tanh(up / b)),
    "clamped_swiglu": lambda gate, up, a, b: (
        gate.clamp(max=b) * torch.sigmoid(a * gate.clamp(max=b)) * (up.clamp(-b, b) + 1)
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_gated_mlp_act(kind: str) -> None:
    gate, up = rand(3, 4, 5), rand(3, 4, 5, seed=1)
    check_op("gated_mlp_act", (gate, up, kind, 1.7, 1.1))
    torch.testing.assert_close(dialect.gated_mlp_act(gate, up, kind, 1.7, 1.1), EAGER[kind](gate, up, 1.7, 1.1))


@pytest.mark.parametrize("kind", KINDS)
def test_low_precision(kind: str) -> None:
    gate, up = rand(64, 64, dtype=LOW), rand(64, 64, seed=1, dtype=LOW)
    found = dialect.gated_mlp_act(gate, up, kind, 4.0, 25.0)
    truth = EAGER[kind](gate.double(), up.double(), 4.0, 25.0)
    assert found.dtype == LOW
    assert relative_rms(found, truth) <= 1.01 * relative_rms(truth.to(LOW), truth)
    assert_as_accurate(
        lambda gate, up: dialect.gated_mlp_act(gate, up, kind, 4.0, 25.0),
        lambda gate, up: EAGER[kind](gate, up, 4.0, 25.0),
        (gate, up),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_large_inputs_stay_finite(kind: str) -> None:
    gate = torch.tensor([-3e4, -100.0, 0.0, 100.0, 3e4], requires_grad=True)
    out = dialect.gated_mlp_act(gate, torch.ones_like(gate), kind, 4.0, 25.0)
    (grad,) = torch.autograd.grad(out.sum(), gate)
    assert bool(out.isfinite().all() and grad.isfinite().all())


def test_situ_is_bounded() -> None:
    gate = torch.linspace(-1e3, 1e3, 101)
    assert float(dialect.gated_mlp_act(gate, gate, "situ", 4.0, 25.0).abs().max()) <= 100.0


def test_sigmoid_gate() -> None:
    x, gate = rand(2, 3, 4), rand(2, 3, 4, seed=1)
    check_op("sigmoid_gate", (x, gate))
    torch.testing.assert_close(dialect.sigmoid_gate(x, gate), x * gate.sigmoid())
    low = (rand(64, 64, dtype=LOW), rand(64, 64, seed=1, dtype=LOW))
    assert_as_accurate(dialect.sigmoid_gate, lambda x, gate: x * torch.sigmoid(gate), low)


def test_no_elements() -> None:
    empty = rand(0, 3)
    (grad,) = torch.autograd.grad(dialect.gated_mlp_act(empty, empty, "silu").sum(), empty)
    assert grad.shape == (0, 3)
    assert dialect.sigmoid_gate(empty, empty).shape == (0, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, y: dialect.gated_mlp_act(x, y, "silu"), "gated_mlp_act: up"),
        (lambda x, y: dialect.gated_mlp_act(x, x, "swish"), "gated_mlp_act: kind"),
        (lambda x, y: dialect.gated_mlp_act(x, x, "situ", 4.0), "gated_mlp_act: kind 'situ' needs a > 0 and b > 0"),
        (lambda x, y: dialect.sigmoid_gate(x, y), "sigmoid_gate: gate"),
    ],
)
def test_mistakes_name_op_and_argument(call: object, message: str) -> None:
    x: Tensor = rand(2, 3)
    with pytest.raises(ValueError, match=f"moec::{message}"):
        call(x, rand(2, 4))
