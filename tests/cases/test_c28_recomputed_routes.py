"""C28: experts are chosen once. Near-ties that fall another way when logits are computed again change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moec
from moec.compiler import dialect, partition
from moec.compiler.plan import CachePlan, Plan

from ..spine import WIDTH, Language, Layer, batch_for, seeded

EXPERTS = 4
PLAN = Plan(batch=2, length=64)
_noise = torch.Generator()


@torch.library.custom_op("moec_tests::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    """x and noise of 1e-7 that differs at every call, as of a product whose sum has no fixed order."""
    return x + 1e-7 * torch.randn(x.shape, generator=_noise, dtype=x.dtype)


noise.register_fake(torch.empty_like)
noise.register_autograd(lambda context, grad: grad)


class Tied(nn.Module):
    """Every expert has a twin with the same logit, but other weights."""

    def __init__(self, recognized: bool) -> None:
        super().__init__()
        self.recognized = recognized
        self.choose = nn.Linear(WIDTH, EXPERTS // 2)
        self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))
        self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        logits = torch.ops.moec_tests.noise(self.choose(tokens).repeat(1, 2))
        if self.recognized:
            weights, experts = logits.softmax(-1).topk(1)
        else:
            order = logits.argsort(-1, descending=True)[:, :1]
            weights, experts = logits.sigmoid().gather(1, order), order
        rows, order, offsets = dialect.permute(tokens, experts, experts=EXPERTS)
        rows = F.silu(dialect.grouped_linear(rows, self.up, offsets))
        rows = dialect.grouped_linear(rows, self.down, offsets)
        return hidden + dialect.unpermute(rows, order, weights).view_as(hidden)


def gradients(recognized: bool, cache: CachePlan) -> tuple[dict[str, Tensor], moec.CompiledStep]:
    step = moec.compile(
        seeded(lambda: Language(Tied(recognized), Layer(), Tied(recognized))), Plan(batch=2, length=64, cache=cache)
    )
    _noise.manual_seed(0)
    return {path: value.clone() for path, value in step.gradients(batch_for(PLAN)).items()}, step


def distance(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    return max(float((one[path] - two[path]).norm() / one[path].norm().clamp_min(1e-12)) for path in one)


def tight(recognized: bool) -> CachePlan:
    """A limit at which the solver recomputes as much as it can."""
    peak = gradients(recognized, CachePlan(policy="recompute"))[1].memory.peak
    return CachePlan(hbm=peak, host=0, policy="auto")


@pytest.mark.parametrize("recognized", [True, False])
@pytest.mark.parametrize("solver", [False, True])
def test_c28_near_ties_fall_once(recognized: bool, solver: bool) -> None:
    kept, _ = gradients(recognized, CachePlan())
    cache = tight(recognized) if solver else CachePlan(policy="recompute")
    found, step = gradients(recognized, cache)
    again = [p.op for rows in step.log.placements.values() for p in rows if p.decision == "recompute"]
    assert again
    assert distance(kept, found) < 1e-5


@pytest.mark.parametrize("recognized", [True, False])
def test_c28_a_choice_that_is_taken_again_is_seen(recognized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, _ = gradients(recognized, CachePlan())
    monkeypatch.setattr(partition, "may_recompute", lambda node: (not str(node.target).startswith("moec.region"), ""))
    found: Any = gradients(recognized, CachePlan(policy="recompute"))[0]
    assert distance(kept, found) > 1e-3
