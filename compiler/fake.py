"""Fake tensors: shapes and dtypes without storage, so that a model of any size can be traced anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moec.compiler._torch_compat import FakeTensor, FakeTensorMode, ShapeEnv


def fake_mode_of(module: nn.Module) -> FakeTensorMode:
    """The mode a model without weights was built under, or a new one."""
    for tensor in _named_slots(module):
        value = tensor[2]
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


@contextmanager
def fake_weights(module: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Within the context every parameter and buffer of `module` is a fake of itself; the real ones come back on exit.

    Tied tensors stay tied. Meta tensors become fakes of the CPU, so that a model built on meta can be traced.
    """
    slots = list(_named_slots(module))
    fakes: dict[int, Tensor] = {}
    try:
        for table, name, value in slots:
            if not isinstance(value, FakeTensor):
                table[name] = fakes.setdefault(id(value), _fake_of(value, mode))
        yield
    finally:
        for table, name, value in slots:
            table[name] = value


def fake_like(tensor: Tensor, mode: FakeTensorMode, *, requires_grad: bool | None = None) -> Tensor:
    """A fresh leaf fake with the size (symbolic too), stride, dtype and device of `tensor`."""
    with mode:
        fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    wanted = tensor.requires_grad if requires_grad is None else requires_grad
    return fake.requires_grad_(wanted and tensor.dtype.is_floating_point)


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no values to look at: a fake, or one on the meta device."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def _fake_of(value: Tensor, mode: FakeTensorMode) -> Tensor:
    device = torch.device("cpu") if value.is_meta else value.device
    with mode:
        fake = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
    if isinstance(value, nn.Parameter):
        return nn.Parameter(fake, requires_grad=value.requires_grad)
    return fake


def _named_slots(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    for child in module.modules():
        tables: tuple[dict[str, Any], ...] = (child._parameters, child._buffers)
        for table in tables:
            for name, value in list(table.items()):
                if value is not None:
                    yield table, name, value
