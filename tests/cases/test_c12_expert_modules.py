"""C12: experts as separate modules, of which ranks use different ones: every rank reduces every gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moec
from moec.compiler.errors import CaptureError, PlanError
from moec.compiler.plan import MeshPlan, Plan

from ..spine import VOCABULARY, Language, Layer, seeded
from .ranks import LENGTH, ROWS, assert_like_one_rank, on_ranks

EXPERTS = 4


class Separate(nn.Module):
    """Each expert is a module of its own; token t goes to expert t % 4, as its embedding says."""

    def __init__(self, *, skipping: bool = False) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Layer() for _ in range(EXPERTS))
        self.skipping = skipping

    def forward(self, hidden: Tensor) -> Tensor:
        chosen = F.one_hot(hidden[..., :EXPERTS].argmax(-1), EXPERTS)
        total = hidden
        for index, expert in enumerate(self.experts):
            if self.skipping and not chosen[..., index].any():
                continue
            total = total + expert(hidden) * chosen[..., index : index + 1]
        return total


def model(*, skipping: bool = False) -> nn.Module:
    made: nn.Module = seeded(lambda: Language(Separate(skipping=skipping), Layer()))
    with torch.no_grad():
        made.embed.weight[:, :EXPERTS] = 3 * F.one_hot(torch.arange(VOCABULARY) % EXPERTS, EXPERTS).float()  # type: ignore[union-attr, index]
    return made


@pytest.mark.parametrize("ranks", [2, 4])
def test_c12_ranks_that_use_different_experts(ranks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    groups = torch.randint(VOCABULARY // EXPERTS, (ROWS, LENGTH), generator=generator)
    halves = torch.randint(2, (ROWS, LENGTH), generator=generator)
    ids = EXPERTS * groups + halves + torch.tensor([0, 0, 2, 2]).unsqueeze(1)  # rows 0, 1: {0, 1}; rows 2, 3: {2, 3}
    many = on_ranks(model(), ranks, 1)
    found = assert_like_one_rank(many, model(), {"input_ids": ids, "labels": ids})
    assert all(found[f"layers.0.experts.{expert}.down.weight"].any() for expert in range(EXPERTS))


def test_c12_separate_modules_are_not_spread() -> None:
    with pytest.raises(PlanError, match=r"mesh\.ep is 2, and no experts could be spread(.|\n)*\[E, \.\.\.\]"):
        moec.compile(model(), Plan(batch=2, length=LENGTH, mesh=MeshPlan(fsdp=2, ep=2)))


def test_c12_a_loop_over_the_experts_that_were_hit_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"layers\.0(.|\n)*depends on the data"):
        moec.compile(model(skipping=True), Plan(batch=2, length=LENGTH, mesh=MeshPlan(fsdp=2)))
