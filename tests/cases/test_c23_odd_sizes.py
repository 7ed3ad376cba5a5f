"""C23: a vocabulary of 513, a width of 60 and 6 experts are sizes like any other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import moec
from moec.compiler import dialect
from moec.compiler.plan import LossPlan, Plan
from moec.simulated import SimulatedRanks

from ..dialect.checks import assert_close, value_and_grads
from ..dialect.test_loss_shards import sharded_loss
from ..spine import assert_equal_gradients, batch_for, distance, eager, mean_loss, seeded
from .planting import Op, plant
from .ranks import assert_like_one_rank, on_ranks, plan_for

VOCABULARY, WIDTH, EXPERTS = 513, 60, 6


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.empty(EXPERTS, 30, WIDTH))
        self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, 15))

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(3)
        rows, order, offsets = dialect.permute(tokens, chosen, experts=EXPERTS)
        gate, up = dialect.grouped_linear(rows, self.up, offsets).chunk(2, -1)
        rows = dialect.grouped_linear(nn.functional.silu(gate) * up, self.down, offsets)
        return hidden + dialect.unpermute(rows, order, weights).view_as(hidden)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.layers = nn.ModuleList([Experts(), Experts()])

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return mean_loss(self.head(hidden), labels)


def test_c23_odd_sizes_are_eagers() -> None:
    plan = Plan(batch=3, length=7, loss=LossPlan(rows=5, columns=100))
    model = seeded(Model)
    batch = batch_for(plan)
    batch["input_ids"][:, 1] = batch["labels"][:, 1] = VOCABULARY - 1
    loss, gradients = eager(model, batch)
    step = moec.compile(model, plan)
    assert distance(step.loss(batch)["lm_loss"], loss) <= 1e-6
    assert_equal_gradients(step.gradients(batch), gradients)
    assert gradients["embed.weight"] is not None
    assert gradients["embed.weight"][VOCABULARY - 1].any(), "the last row takes part"


def assert_ranks_hold_all_rows(many: SimulatedRanks) -> None:
    batch = batch_for(plan_for(1, 1))
    batch["input_ids"][:, 1] = batch["labels"][:, 1] = VOCABULARY - 1
    found = assert_like_one_rank(many, seeded(Model), batch)
    assert found["embed.weight"].shape == (VOCABULARY, WIDTH)
    assert found["layers.1.up"].shape[0] == EXPERTS


@pytest.mark.parametrize(("fsdp", "ep"), [(2, 2), (4, 2), (4, 4)])
def test_c23_odd_sizes_over_ranks(fsdp: int, ep: int) -> None:
    """With ep = 4 a rank is left without experts; with ep = 2 on four ranks, three experts lie on two."""
    assert_ranks_hold_all_rows(on_ranks(seeded(Model), fsdp, ep))


def test_c23_rows_that_do_not_divide_and_are_dropped_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    many = on_ranks(seeded(Model), 2, 2)

    def even(plain: Op) -> Op:
        def run(gathered: Tensor, ranks: int, offset: int, shape: list[int], dtype: torch.dtype) -> Tensor:
            whole: Tensor = plain(gathered, ranks, offset, shape, dtype)
            whole[shape[0] // ranks * ranks :] = 0
            return whole

        return run

    plant(monkeypatch, many.origin, unshard=even)
    with pytest.raises(AssertionError):
        assert_ranks_hold_all_rows(many)


@pytest.mark.parametrize("ranks", [2, 4])
def test_c23_a_vocabulary_of_513_over_ranks(ranks: int) -> None:
    """Shards of uneven size give the loss and the gradients of the whole on every (simulated) rank."""
    generator = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(rows, WIDTH, generator=generator).double() / 4 for rows in (9, VOCABULARY))
    labels = torch.tensor([0, VOCABULARY - 1, 128, 129, 256, 257, 384, 385, -100])
    sizes = [part.shape[0] for part in weight.tensor_split(ranks)]
    assert len(set(sizes)) == 2
    inputs = [hidden, weight]
    whole = value_and_grads(lambda h, w: nn.functional.cross_entropy(h @ w.t(), labels, reduction="none"), inputs)
    for rank in range(ranks):
        found = value_and_grads(lambda h, w, r=rank: sharded_loss([h, w], labels, sizes)[r], inputs)
        assert_close(found, whole)
