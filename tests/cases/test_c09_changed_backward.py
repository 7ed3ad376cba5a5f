"""C09: an op whose backward changes gives the new gradient at the next compilation, through both doors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import moec
from moec import backend, driver

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


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def through_a_step(model: Any) -> dict[str, Tensor]:
    return moec.compile(model, PLAN).gradients(batch_for(PLAN))


def through_the_backend(model: Any) -> dict[str, Tensor]:
    torch._dynamo.reset()
    model.zero_grad(set_to_none=True)
    torch.compile(model, backend="moec", fullgraph=True)(**batch_for(PLAN)).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def assert_the_new_backward_is_used(compiled: Any) -> None:
    model = seeded(Language, Scaled(), Scaled())
    register(2.0)
    _, first = eager(model, batch_for(PLAN))
    assert_equal_gradients(compiled(model), first)
    register(-3.0)
    _, second = eager(model, batch_for(PLAN))
    assert_equal_gradients(compiled(model), second)
    with pytest.raises(AssertionError):
        assert_equal_gradients(first, second)


@pytest.mark.parametrize("compiled", [through_a_step, through_the_backend])
def test_c09_the_new_backward_is_used(compiled: Any) -> None:
    assert_the_new_backward_is_used(compiled)


def remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which is called once: a cache whose key does not know the backward of an op."""
    found: list[Any] = []

    def run(*args: Any, **options: Any) -> Any:
        if not found:
            found.append(function(*args, **options))
        return found[0]

    return run


def test_c09_a_program_from_a_cache_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "write_program", remembering(driver.write_program))
    with pytest.raises(AssertionError, match="relative error"):
        assert_the_new_backward_is_used(through_a_step)


def test_c09_a_graph_from_a_cache_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = backend.aot_autograd
    compile_once = remembering(lambda options, *args: plain(**options)(*args))
    monkeypatch.setattr(backend, "aot_autograd", lambda **options: lambda *args: compile_once(options, *args))
    with pytest.raises(AssertionError, match="relative error"):
        assert_the_new_backward_is_used(through_the_backend)
