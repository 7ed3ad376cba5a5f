"""Fake weights: nothing is allocated or changed, ties survive, and everything comes back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moec.compiler._torch_compat import FakeTensor, FakeTensorMode, ShapeEnv
from moec.compiler.fake import fake_like, fake_mode_of, fake_weights

from ..spine import Language, Layer


def test_weights_are_fakes_within_and_themselves_after() -> None:
    model = Language(Layer(), tied=True)
    model.register_buffer("count", torch.zeros(2, dtype=torch.int64))
    model.layers[0].gate.weight.requires_grad_(False)
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with fake_weights(model, fake_mode_of(model)):
        within = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        assert within.keys() == before.keys()
        for name, value in within.items():
            assert isinstance(value, FakeTensor), name
            assert (value.shape, value.dtype, value.requires_grad) == (
                before[name].shape,
                before[name].dtype,
                before[name].requires_grad,
            )
        assert model.head.weight is model.embed.weight
        assert isinstance(model.embed.weight, nn.Parameter)
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert all(after[name] is value for name, value in before.items())


def test_an_exception_brings_the_weights_back() -> None:
    model = nn.Linear(2, 2)
    weight = model.weight
    with pytest.raises(RuntimeError), fake_weights(model, fake_mode_of(model)):
        raise RuntimeError
    assert model.weight is weight


def test_meta_weights_become_fakes_of_the_cpu() -> None:
    model = nn.Linear(2, 2, device="meta")
    with fake_weights(model, fake_mode_of(model)):
        assert model.weight.device.type == "cpu"
    assert model.weight.is_meta


def test_a_model_of_fakes_keeps_its_mode() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        model = nn.Linear(2, 2)
    assert fake_mode_of(model) is mode
    with fake_weights(model, mode):
        assert model.weight.fake_mode is mode  # type: ignore[union-attr]


def test_a_fake_is_a_leaf_with_the_same_layout() -> None:
    mode = FakeTensorMode()
    real = torch.randn(3, 4).t().requires_grad_()
    fake = fake_like(real, mode)
    assert (fake.shape, fake.stride(), fake.is_leaf, fake.requires_grad) == (real.shape, real.stride(), True, True)
    assert not fake_like(real, mode, requires_grad=False).requires_grad
    assert not fake_like(torch.zeros(2, dtype=torch.int64), mode, requires_grad=True).requires_grad
