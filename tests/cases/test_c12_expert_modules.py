"""C12: experts as separate modules, of which ranks use different ones: every rank reduces every gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moec
from moec.compiler.errors import CaptureError, CollectiveError, PlanError
from moec.compiler.plan import MeshPlan, Plan
from moec.eager import EagerStep
from moec.simulated import SimulatedRanks
from tests.runtime.processes import run_ranks

from ..spine import VOCABULARY, Language, Layer, assert_equal_gradients, seeded
from .planting import Op, plant
from .ranks import LENGTH, ROWS, assert_like_one_rank, in_process, on_ranks, plan_for

EXPERTS = 4


class Alone(Layer):
    """An expert whose gradients are reduced by a collective of its own."""

    moec_region = True


class Separate(nn.Module):
    """Each expert is a module of its own; token t goes to expert t % 4, as its embedding says."""

    def __init__(self, kind: type[Layer] = Layer, *, skipping: bool = False) -> None:
        super().__init__()
        self.experts = nn.ModuleList(kind() for _ in range(EXPERTS))
        self.skipping = skipping

    def forward(self, hidden: Tensor) -> Tensor:
        chosen = F.one_hot(hidden[..., :EXPERTS].argmax(-1), EXPERTS)
        total = hidden
        for index, expert in enumerate(self.experts):
            if self.skipping and not chosen[..., index].any():
                continue
            total = total + expert(hidden) * chosen[..., index : index + 1]
        return total


def model(kind: type[Layer] = Layer, *, skipping: bool = False) -> nn.Module:
    made: nn.Module = seeded(lambda: Language(Separate(kind, skipping=skipping), Layer()))
    with torch.no_grad():
        made.embed.weight[:, :EXPERTS] = 3 * F.one_hot(torch.arange(VOCABULARY) % EXPERTS, EXPERTS).float()  # type: ignore[union-attr, index]
    return made


def batch() -> dict[str, Tensor]:
    """Rows 0 and 1 use the experts 0 and 1 alone, rows 2 and 3 the experts 2 and 3."""
    generator = torch.Generator().manual_seed(0)
    groups = torch.randint(VOCABULARY // EXPERTS, (ROWS, LENGTH), generator=generator)
    halves = torch.randint(2, (ROWS, LENGTH), generator=generator)
    ids = EXPERTS * groups + halves + torch.tensor([0, 0, 2, 2]).unsqueeze(1)
    return {"input_ids": ids, "labels": ids}


def assert_all_experts_are_trained(many: SimulatedRanks, kind: type[Layer]) -> None:
    found = assert_like_one_rank(many, model(kind), batch())
    assert all(found[f"layers.0.experts.{expert}.down.weight"].any() for expert in range(EXPERTS))


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("ranks", "kind"), [(2, Layer), (4, Layer), (2, Alone)])
def test_c12_ranks_that_use_different_experts(ranks: int, kind: type[Layer]) -> None:
    assert_all_experts_are_trained(on_ranks(model(kind), ranks, 1), kind)


@pytest.mark.slow
def test_c12_processes_end() -> None:
    """Real ranks, which would wait for each other for ever: 30 seconds for all of it."""
    first, _ = run_ranks(2, in_process, partial(model, Alone), 2, 1, [batch()], timeout=30)
    _, wanted = EagerStep(model(Alone), plan_for(1, 1)).gradients(batch())
    assert_equal_gradients({name: value for name, value in first[0].items() if name != "loss"}, wanted)


def test_c12_a_rank_that_reduces_only_what_it_used_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As hooks on parameters do, which run where a gradient comes up."""
    many = on_ranks(model(Alone), 2, 1)

    def lazy(plain: Op) -> Op:
        def run(flat: Tensor, kind: str, ranks: int, role: str) -> Any:
            return plain(flat, kind, ranks, role) if flat.any() else flat[: len(flat) // ranks]

        return run

    plant(monkeypatch, many.origin, "c10d", reduce_scatter_tensor=lazy)
    with pytest.raises(CollectiveError, match=r"rank 1 .*reduce_scatter|ranks 0 and 1 do not fit"):
        assert_all_experts_are_trained(many, Alone)


def test_c12_separate_modules_are_not_spread() -> None:
    with pytest.raises(PlanError, match=r"mesh\.ep is 2, and no experts could be spread(.|\n)*\[E, \.\.\.\]"):
        moec.compile(model(), Plan(batch=2, length=LENGTH, mesh=MeshPlan(fsdp=2, ep=2)))


def test_c12_a_loop_over_the_experts_that_were_hit_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"layers\.0(.|\n)*depends on the data"):
        moec.compile(model(skipping=True), Plan(batch=2, length=LENGTH, mesh=MeshPlan(fsdp=2)))
