"""What the tests of `torch.compile(backend="moec")` share: a model with experts, and the comparison with eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moec.backend import BackendLog
from moec.compiler import dialect

from ..spine import VOCABULARY, WIDTH, assert_equal_gradients, distance

EXPERTS = 4


class Experts(nn.Module):
    """Top-1 experts as dialect ops; the counts per expert are data."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))
        self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        scores = self.router(tokens).sigmoid()
        weights, experts = scores.topk(1)
        rows, order, offsets = dialect.permute(tokens, experts, experts=EXPERTS)
        rows = F.silu(dialect.grouped_linear(rows, self.up, offsets))
        rows = dialect.grouped_linear(rows, self.down, offsets)
        return hidden + dialect.unpermute(rows, order, weights).view_as(hidden)


def compiled(model: Any, fullgraph: bool = True, **options: Any) -> tuple[Any, BackendLog]:
    log = BackendLog()
    return torch.compile(model, backend="moec", fullgraph=fullgraph, options={"log": log, **options}), log


def batch_of(length: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))
    return ids, ids.masked_fill(ids == 3, -100)


def loss_and_gradients(
    function: Callable[..., Tensor], model: nn.Module, *args: Tensor
) -> tuple[Tensor, dict[str, Any]]:
    model.zero_grad(set_to_none=True)
    loss = function(*args)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(function: Callable[..., Tensor], model: nn.Module, *args: Tensor, bound: float = 1e-5) -> None:
    """One forward and backward of both; buffers start and end the same."""
    before = copy.deepcopy(dict(model.named_buffers()))
    wanted, gradients = loss_and_gradients(model, model, *args)
    after = copy.deepcopy(dict(model.named_buffers()))
    for name, buffer in model.named_buffers():
        buffer.copy_(before[name])
    found, got = loss_and_gradients(function, model, *args)
    assert distance(found, wanted) <= max(1e-6, bound / 10)
    assert_equal_gradients(got, gradients, bound)
    for name, buffer in model.named_buffers():
        assert distance(buffer, after[name]) <= 1e-6, name


class Losses(nn.Module):
    """A model whose forward gives its loss, as the comparison wants it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, labels=labels).loss
