from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from moec.compiler import dialect
from tests.dialect.contract import assert_as_accurate, check_op, rand, relative_rms

LOW = torch.bfloat16


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("rms_norm", (rand(2, 3, 8), rand(8), 1e-5)),
        ("rms_norm", (rand(5, 7), rand(7), 1e-2, True)),
        ("rms_norm", (rand(5, 4), rand(4), 1e-5, True, True)),
        ("gated_norm", (rand(2, 3, 8), rand(2, 3, 8, seed=1), rand(8), 1e-5, "sigmoid")),
        ("gated_norm", (rand(4, 5), rand(4, 5, seed=1), rand(5), 1e-5, "silu", True)),
        ("l2_norm", (rand(2, 3, 8), 1e-6)),
    ],
    ids=["rms", "rms-zero-centered", "rms-cast-first", "gated-sigmoid", "gated-silu", "l2"],
)
def test_op(name: str, args: tuple[object, ...]) -> None:
    check_op(name, args)


def rms_norm_eager(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (unit * (1 + weight.to(wide.dtype) if zero_centered else weight.to(wide.dtype))).to(x.dtype)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=3), st.integers(1, 9), st.booleans())
def test_rms_norm_any_shape(leading: list[int], width: int, zero_centered: bool) -> None:
    x, weight = rand(*leading, width), rand(width)
    torch.testing.assert_close(
        dialect.rms_norm(x, weight, 1e-5, zero_centered), rms_norm_eager(x, weight, 1e-5, zero_centered)
    )


def test_torch_agrees() -> None:
    x, weight = rand(4, 16), rand(16)
    torch.testing.assert_close(dialect.rms_norm(x, weight, 1e-5), functional.rms_norm(x, (16,), weight, 1e-5))
    torch.testing.assert_close(dialect.l2_norm(x, 0.0), functional.normalize(x, dim=-1))


def test_cast_before_weight_is_the_order_of_hugging_face() -> None:
    x, weight = rand(64, 32).to(LOW), rand(32).to(LOW)
    unit = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(LOW)
    torch.testing.assert_close(dialect.rms_norm(x, weight, 1e-6, False, True), weight * unit, rtol=0, atol=0)
    wide = dialect.rms_norm(x, weight.float(), 1e-6, False, True)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide, weight.float() * unit, rtol=0, atol=0)


def test_low_precision_is_rounded_once() -> None:
    x, weight, gate = (rand(*shape, dtype=torch.float32) for shape in ((64, 128), (128,), (64, 128, 1)))
    x, gate = x.detach().to(LOW), gate.detach().squeeze(-1).to(LOW)
    exact = rms_norm_eager(x.double(), weight.double(), 1e-5)
    for found, truth in (
        (dialect.rms_norm(x, weight, 1e-5), exact),
        (dialect.gated_norm(x, gate, weight, 1e-5), exact * gate.double().sigmoid()),
        (dialect.l2_norm(x), functional.normalize(x.double(), dim=-1)),
    ):
        assert found.dtype == LOW
        assert relative_rms(found, truth) <= 1.01 * relative_rms(truth.to(LOW), truth) + 1e-7


def test_low_precision_gradients() -> None:
    x, gate, weight = (rand(*shape, dtype=LOW) for shape in ((32, 64), (32, 64, 1), (64,)))
    gate = gate.detach().squeeze(-1).requires_grad_()
    assert_as_accurate(lambda x, w: dialect.rms_norm(x, w, 1e-5), lambda x, w: rms_norm_eager(x, w, 1e-5), (x, weight))
    assert_as_accurate(
        lambda x, g, w: dialect.gated_norm(x, g, w, 1e-5, "silu"),
        lambda x, g, w: rms_norm_eager(x, w, 1e-5) * functional.silu(g),
        (x, gate, weight),
    )


def test_no_rows() -> None:
    x, weight = rand(0, 4), rand(4)
    (grad_x, grad_weight) = torch.autograd.grad(dialect.rms_norm(x, weight, 1e-5).sum(), (x, weight))
    assert grad_x.shape == (0, 4)
    torch.testing.assert_close(grad_weight, torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dialect.rms_norm(rand(2, 4), rand(3), 1e-5), "rms_norm: weight"),
        (lambda: dialect.rms_norm(rand(2, 4), rand(1, 4), 1e-5), "rms_norm: weight"),
        (lambda: dialect.gated_norm(rand(2, 4), rand(3, 4), rand(4), 1e-5), "gated_norm: gate"),
        (lambda: dialect.gated_norm(rand(2, 4), rand(2, 4), rand(4), 1e-5, "relu"), "gated_norm: activation"),
        (lambda: dialect.l2_norm(torch.tensor(1.0)), "l2_norm: x"),
    ],
)
def test_mistakes_name_op_and_argument(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"moec::{message}"):
        call()
