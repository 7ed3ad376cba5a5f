"""An error planted in each pass is found by the check of every pass on its own, which names the pass and the node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from moec.compiler.nodes import source_of
from moec.compiler.plan import Plan
from moec.eager import microbatches
from moec.pass_checks import PassCheck, check_passes
from moec.passes.normalize import FOLDS
from moec.passes.rewrite import Rewriter
from moec.random_batch import random_batches
from moec.verification import verify

from ..passes.support import ONE_RANK
from ..spine import VOCABULARY, WIDTH, Language, seeded, small_k3

_OPS = torch.ops.moec
_MUL = torch.ops.aten.mul.Tensor
Change = Callable[[Rewriter, Any], Any]


@dataclass(frozen=True)
class Plant:
    """A wrong argument of the op that a pass puts in; `model` has something for the pass to find."""

    op: torch._ops.OpOverload
    argument: str
    change: Change
    model: Callable[[], nn.Module] = small_k3

    def put(self, monkeypatch: pytest.MonkeyPatch) -> None:
        position = [argument.name for argument in self.op._schema.arguments].index(self.argument)
        real = Rewriter.call

        def call(rewriter: Rewriter, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            if target is self.op:
                values = list(args)
                values[position] = self.change(rewriter, values[position])
                args = tuple(values)
            return real(rewriter, target, *args, **kwargs)

        monkeypatch.setattr(Rewriter, "call", call)


def times(factor: float) -> Change:
    return lambda rewriter, value: value * factor


def instead(other: Any) -> Change:
    return lambda rewriter, value: other


def scaled(factor: float) -> Change:
    """Of a tensor."""
    return lambda rewriter, value: rewriter.call(_MUL, value, factor)


def sparse() -> nn.Module:
    return small_k3(full_attention="dsa", indexer_heads=8)


class Mixture(nn.Module):
    """Experts as transformers computes them by grouped products, with a router that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        sizes = {"hidden_size": WIDTH, "intermediate_size": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
        self.experts = MixtralExperts(MixtralConfig(**sizes, experts_implementation="grouped_mm"))
        self.router = nn.Linear(WIDTH, 4, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, WIDTH)
        weights, chosen = self.router(rows).softmax(-1).topk(2, dim=-1)
        return hidden + self.experts(rows, chosen, weights).reshape(hidden.shape)


def mixture() -> nn.Module:
    pytest.importorskip("transformers")
    return seeded(Language, Mixture(), Mixture()).bfloat16()  # type: ignore[no-any-return]  # grouped products are


PLANTS = {
    "recognize_depth_mix": Plant(_OPS.depth_mix.default, "eps", instead(1.0)),
    "recognize_norm": Plant(_OPS.rms_norm.default, "eps", instead(0.3)),
    "recognize_mlp": Plant(_OPS.gated_mlp_act.default, "a", times(0.5)),
    "recognize_conv": Plant(_OPS.short_conv.default, "activation", instead("none")),
    "fuse_dsa": Plant(_OPS.sparse_attention.default, "scale", times(1.5), sparse),
    "recognize_attention": Plant(_OPS.attention.default, "scale", times(1.5)),
    "recognize_route": Plant(_OPS.route.default, "scale", times(1.1)),
    "recognize_experts": Plant(_OPS.grouped_linear.default, "x", scaled(1.5), mixture),
    "chunk_loss": Plant(_OPS.linear_cross_entropy_sum.default, "logit_scale", times(1.1)),
    "fuse_attention_gate": Plant(_OPS.sigmoid_gate.default, "gate", scaled(1.1)),
    "fuse_kda": Plant(_OPS.kda.default, "lower_bound", times(1.1)),
    "fuse_experts": Plant(_OPS.expert_down.default, "weights", scaled(1.1)),
}
PLAN = Plan(batch=2, length=12)


def checked(model: nn.Module) -> list[PassCheck]:
    batch = next(random_batches(PLAN, VOCABULARY, seed=0))
    return check_passes(model, PLAN, microbatches(batch, torch.float32)[0])


def test_there_is_a_plant_for_every_pass() -> None:
    assert {*PLANTS, "normalize"} == {step.name for step in ONE_RANK}


@pytest.mark.parametrize("make", [small_k3, sparse, mixture])
def test_without_a_plant_all_passes_are_right(make: Callable[[], nn.Module]) -> None:
    assert [check for check in checked(make()) if not check.equal] == []


@pytest.mark.parametrize("name", PLANTS)
def test_an_error_in_a_pass_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant = PLANTS[name]
    plant.put(monkeypatch)
    wrong = [check for check in checked(plant.model()) if not check.equal]
    assert {check.name for check in wrong} == {name}
    op = f"moec.{plant.op._schema.name.split('::')[1]}"
    assert op in wrong[0].where, wrong[0].where


def test_an_error_in_normalize_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fold that drops every factor, not only 1."""

    def without_factor(node: fx.Node, rewriter: Rewriter) -> fx.Node | None:
        return None if isinstance(node.args[1], fx.Node) else source_of(node)

    monkeypatch.setitem(FOLDS, _MUL, without_factor)
    wrong = [check for check in checked(small_k3()) if not check.equal]
    assert {check.name for check in wrong} == {"normalize"}
    assert wrong[0].where.startswith("value of %")


def test_verify_names_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS["recognize_norm"].put(monkeypatch)
    report = verify(small_k3(), PLAN, steps=1)
    first = report.first_pass()
    assert first is not None
    assert first.name == "recognize_norm"
    assert f"numbers move in pass recognize_norm on {first.unit}" in str(report)
