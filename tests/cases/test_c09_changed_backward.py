"""C09: an op whose backward changes gives the new gradient at the next compilation, through both doors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import moec

from ..spine import PLAN, Language, Layer, assert_equal_gradients, batch_for, eager, seeded


@torch.library.custom_op("moec_test::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    """x * 2, with a backward that the tests replace."""
    return x * 2


@scaled.register_fake
def _scaled_fake(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def register(factor: float) -> None:
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * factor

    scaled.register_autograd(backward)


class Scaled(Layer):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(scaled(hidden))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def through_a_step(model: Any) -> dict[str, Tensor]:
    return moec.compile(model, PLAN).gradients(batch_for(PLAN))


def through_the_backend(model: Any) -> dict[str, Tensor]:
    torch._dynamo.reset()
    model.zero_grad(set_to_none=True)
    torch.compile(model, backend="moec", fullgraph=True)(**batch_for(PLAN)).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("compiled", [through_a_step, through_the_backend])
def test_c09_the_new_backward_is_used(compiled: Any) -> None:
    model = seeded(Language, Scaled(), Scaled())
    register(2.0)
    _, first = eager(model, batch_for(PLAN))
    assert_equal_gradients(compiled(model), first)
    register(-3.0)
    _, second = eager(model, batch_for(PLAN))
    found = compiled(model)
    assert_equal_gradients(found, second)
    with pytest.raises(AssertionError):
        assert_equal_gradients(found, first)
