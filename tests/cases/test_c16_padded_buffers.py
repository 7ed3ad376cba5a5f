"""C16: rows of a receive buffer that nobody sent get no bias, and give none a gradient, whatever lies in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moec.compiler import dialect
from moec.simulated import SimulatedRanks

from ..spine import WIDTH, Language, Layer, seeded
from .planting import Op, plant
from .ranks import assert_like_one_rank, on_ranks
from .test_c11_empty_ranks import ALL, batch
from .test_c18_hot_expert import EXPERTS


class Biased(nn.Module):
    """Experts whose biases are far from zero."""

    def __init__(self) -> None:
        super().__init__()
        self.choose = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))
        self.up_bias = nn.Parameter(torch.empty(EXPERTS, WIDTH))
        self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))
        self.down_bias = nn.Parameter(torch.empty(EXPERTS, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        weights, experts = self.choose(tokens).softmax(-1).topk(2)
        rows, order, offsets = dialect.permute(tokens, experts, experts=EXPERTS)
        rows = F.silu(dialect.grouped_linear(rows, self.up, offsets, self.up_bias))
        rows = dialect.grouped_linear(rows, self.down, offsets, self.down_bias)
        return hidden + dialect.unpermute(rows, order, weights).view_as(hidden)


def model() -> nn.Module:
    made: nn.Module = seeded(lambda: Language(Biased(), Layer()))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("_bias"):
                parameter.add_(3.0)
    return made


def poisoned_ranks(fsdp: int, ep: int, monkeypatch: pytest.MonkeyPatch) -> SimulatedRanks:
    """Ranks with room for more rows than come, in which lies what is no number, both ways of an exchange."""
    many = on_ranks(model(), fsdp, ep, capacity=4.0)

    def poisoned(exchange: Op) -> Op:
        def run(rows: Tensor, counts: Tensor, **options: Any) -> Tensor:
            received: Tensor = exchange(rows, counts, **options)
            end = int(counts[1].clamp_max(options["capacity"]).sum())
            assert end < len(received)
            received[end:] = float("nan")
            return received

        return run

    plant(monkeypatch, many.origin, exchange_padded=poisoned)
    return many


def assert_only_sent_rows_count(many: SimulatedRanks) -> None:
    found = assert_like_one_rank(many, model(), batch(ALL))
    assert all(gradient.isfinite().all() for gradient in found.values())
    assert found["layers.0.down_bias"].any()


@pytest.mark.parametrize(("fsdp", "ep"), [(2, 2), (4, 4)])
def test_c16_rows_that_nobody_sent(fsdp: int, ep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_only_sent_rows_count(poisoned_ranks(fsdp, ep, monkeypatch))


def test_c16_a_bias_on_padding_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows past the last group get the last expert's bias, and their gradients are added to its own."""
    many = poisoned_ranks(2, 2, monkeypatch)

    def forward(plain: Op) -> Op:
        def run(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor, **options: Any) -> Tensor:
            result: Tensor = plain(x, weight, offsets, bias, **options)
            result[int(offsets[-1]) :] += bias[-1]
            return result

        return run

    def backward(plain: Op) -> Op:
        def run(grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor, **options: Any) -> Any:
            found = plain(grad, x, weight, offsets, bias, **options)
            found[2][-1] += grad[int(offsets[-1]) :].sum(0)
            return found

        return run

    plant(monkeypatch, many.origin, grouped_linear=forward, grouped_linear_backward=backward)
    with pytest.raises(AssertionError, match=r"down_bias: relative error nan"):
        assert_only_sent_rows_count(many)
