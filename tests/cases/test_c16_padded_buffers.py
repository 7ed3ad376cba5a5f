"""C16: rows of a receive buffer that nobody sent get no bias, and give none a gradient, whatever lies in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moec.compiler import dialect

from ..spine import WIDTH, Language, Layer, seeded
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


@pytest.mark.parametrize(("fsdp", "ep"), [(2, 2), (4, 4)])
def test_c16_rows_that_nobody_sent(fsdp: int, ep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    many = on_ranks(model(), fsdp, ep, capacity=4.0)
    unused = []
    exchange = torch.ops.moec.exchange_padded

    def poisoned(rows: Tensor, counts: Tensor, **options: Any) -> Tensor:
        received: Tensor = exchange(rows, counts, **options)
        end = int(counts[1].clamp_max(options["capacity"]).sum())
        unused.append(len(received) - end)
        received[end:] = float("nan")
        return received

    monkeypatch.setattr(torch.ops.moec, "exchange_padded", poisoned)
    found = assert_like_one_rank(many, model(), batch(ALL))
    assert min(unused) > 0
    assert found["layers.0.down_bias"].any()
