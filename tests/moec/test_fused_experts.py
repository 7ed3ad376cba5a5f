"""Compiled steps with experts as expert_up and expert_down: numbers, what is kept for backward, ranks, verification."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moec
from moec.codegen.program import Section
from moec.compiler import dialect
from moec.compiler.dialect import lookup
from moec.compiler.dialect.registry import nbytes
from moec.compiler.errors import PlanError
from moec.compiler.partition import may_recompute
from moec.compiler.plan import Plan
from moec.driver import build
from moec.pass_checks import check_passes
from moec.preflight import example_inputs
from moec.random_batch import random_batches
from moec.rank_checks import verify_lockstep
from tests.ranks.models import model_of, needs_transformers, plan_of
from tests.spine import (
    PLAN,
    WIDTH,
    Language,
    assert_equal_gradients,
    batch_for,
    distance,
    eager,
    recomputed,
    seeded,
    small_k3,
)

FUSED = ("fuse_experts",)
B, T, INNER = 2, 16, 12
WHOLE = Plan(batch=B, length=T, enable=FUSED, check=True)
K3 = replace(PLAN, enable=FUSED)

SITU = "gate, up: tanh(gate / 4.0) * 4.0 * sigmoid(gate) * (tanh(up / 25.0) * 25.0)"
CLAMPED = "gate, up: (t0 := clamp_max(gate, 7.0)) * sigmoid(1.702 * t0) * (clamp_min(clamp_max(up, 7.0), -7.0) + 1.0)"
SWIGLU = "gate, up: silu(gate) * up"
LAYERS = {
    "k3-tiny": (SITU, 7),
    "mixtral": (SWIGLU, 2),
    "gpt_oss": (CLAMPED, 2),
    "deepseek_v3": (SWIGLU, 2),
    "qwen3_next": (SWIGLU, 4),
}


@needs_transformers
@pytest.mark.parametrize("name", LAYERS)
def test_every_expert_layer_is_fused_and_the_numbers_stay(name: str) -> None:
    activation, layers = LAYERS[name]
    model = model_of(name)
    step, plain = moec.compile(model, WHOLE), moec.compile(model, replace(WHOLE, enable=()))
    found = step.log.matches("fuse_experts")
    assert {match.what for _, match in found} == {f"gather up ({activation}) down weighted sum"}
    records = [record for record in step.log.records if record.name == "fuse_experts"]
    assert sum(len(record.matches) * len(record.instances) for record in records) == layers
    assert not any(record.near_misses or record.warning for record in records)
    assert not plain.log.matches("fuse_experts")
    batch = next(random_batches(WHOLE, step.vocabulary, 0))
    ours, wanted = step.loss(batch), plain.loss(batch)
    assert ours.keys() == wanted.keys()
    assert all(torch.equal(ours[key], wanted[key]) for key in wanted), "forward has the same bits"
    assert_equal_gradients(step.gradients(batch), plain.gradients(batch))


def test_a_step_is_the_same_step_again() -> None:
    gradients = []
    for _ in range(2):
        step = moec.compile(model_of("k3-tiny"), WHOLE)
        gradients.append(step.gradients(next(random_batches(WHOLE, step.vocabulary, 0))))
    assert all(torch.equal(value, gradients[1][name]) for name, value in gradients[0].items())


# router weights before the second product, and at the tokens


class Weighed(nn.Module):
    """Top-2 of 4 experts with SwiGLU; `before`: the router's weights on the activated rows, else on the tokens."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.first = nn.Parameter(torch.empty(4, 2 * INNER, WIDTH))
        self.second = nn.Parameter(torch.empty(4, WIDTH, INNER))
        self.before = before

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        weights, chosen = dialect.route(self.router(tokens), top_k=2, score="sigmoid")
        rows, order, offsets = dialect.permute(tokens, chosen, experts=4)
        by_row = weights.flatten()[order].unsqueeze(-1)
        rows = rows if self.before else rows * by_row
        gate, up = dialect.grouped_linear(rows, self.first, offsets).chunk(2, dim=-1)
        act = F.silu(gate) * up * by_row if self.before else F.silu(gate) * up
        rows = dialect.grouped_linear(act, self.second, offsets)
        return hidden + dialect.unpermute(rows, order, torch.ones_like(weights)).view_as(hidden)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_router_weights_within_the_experts(before: bool, frozen: bool) -> None:
    model = seeded(Language, Weighed(before), Weighed(before))
    for layer in model.layers:
        layer.first.requires_grad_(not frozen)
        layer.second.requires_grad_(not frozen)
    plan = replace(PLAN, enable=FUSED)
    step, batch = moec.compile(model, plan), batch_for(plan)
    loss, gradients = eager(model, batch)
    (text,) = {match.what for _, match in step.log.matches("fuse_experts")}
    assert text == (f"gather up ({SWIGLU}) weighted down sum" if before else
                    f"weighted gather up ({SWIGLU}) down weighted sum")  # fmt: skip
    assert distance(step.loss(batch)["lm_loss"], loss) <= 1e-6
    found = step.gradients(batch)
    assert_equal_gradients(found, gradients)
    assert found["layers.0.router.weight"].any()
    assert ("layers.0.first" in found) != frozen


# memory


def expert_section(plan: Plan, model: nn.Module | None = None) -> Section:
    found = build(model or small_k3(), plan)
    (section,) = (s for s in found.sections if s.template.name.startswith("feed_forward"))
    return section


def kept(section: Section) -> Counter[tuple[str, int, tuple[int, ...]]]:
    """(op, which of its results, shape) of what the experts' own ops hand to the backward."""
    found: Counter[tuple[str, int, tuple[int, ...]]] = Counter()
    for node in section.parts.saved:
        maker, index = (node.args[0], node.args[1]) if node.target is operator.getitem else (node, 0)
        definition = lookup(maker.target)  # type: ignore[union-attr]
        if definition is not None and definition.name in EXPERT_OPS:
            found[definition.name, int(index), tuple(node.meta["val"].shape)] += 1  # type: ignore[arg-type]
    return found


EXPERT_OPS = (
    "route", "permute", "grouped_linear", "gated_mlp_act", "unpermute", "expert_slots", "expert_up", "expert_down",
)  # fmt: skip


def test_backward_gets_the_product_and_neither_activated_nor_gathered_rows() -> None:
    """Of N k rows with width D: D + 2I + I + D values each before, 2I now."""
    model = small_k3(latent_size=0, expert_size=12, shared_size=0)
    config = model.config
    tokens = K3.batch * K3.length
    rows, wide, width = tokens * config.top_k, 2 * config.expert_size, config.expert_width
    plain = {
        ("permute", 0, (rows, width)),
        ("permute", 1, (rows,)),
        ("permute", 2, (config.experts,)),
        ("grouped_linear", 0, (rows, wide)),
        ("gated_mlp_act", 0, (rows, wide // 2)),
        ("grouped_linear", 0, (rows, width)),
        ("route", 0, (tokens, config.top_k)),
        ("route", 1, (tokens, config.top_k)),
    }
    fused = {
        ("expert_slots", 0, (rows,)),
        ("expert_slots", 1, (rows,)),
        ("expert_slots", 2, (config.experts,)),
        ("expert_up", 0, (rows, wide)),
        ("route", 0, (tokens, config.top_k)),
        ("route", 1, (tokens, config.top_k)),
    }
    before, after = expert_section(replace(K3, enable=()), model), expert_section(K3, model)
    assert kept(before) == Counter(plain)
    assert kept(after) == Counter(fused)
    less = 4 * rows * (wide // 2 + 2 * width)  # float32
    more = 8 * rows  # the place of each slot; the tokens are kept for the router in both
    assert before.parts.saved_bytes - after.parts.saved_bytes == less - more


def test_the_product_is_computed_again_where_the_plan_says_so() -> None:
    section = expert_section(replace(K3, cache=recomputed("*")), small_k3(latent_size=0, expert_size=12, shared_size=0))
    assert {op for op, _, _ in kept(section)} == {"route", "expert_slots"}
    ups = {
        side: graph.find_nodes(op="call_function", target=torch.ops.moec.expert_up.default)
        for side, graph in (("forward", section.parts.forward), ("backward", section.parts.backward))
    }
    (forward,), (backward,) = ups["forward"], ups["backward"]
    assert forward.kwargs == {"keep_pre": False}, "nothing reads it in forward"
    assert backward.kwargs == {"keep_act": False}, "nothing reads it in backward"
    sort = torch.ops.moec.expert_slots.default
    assert not section.parts.backward.find_nodes(op="call_function", target=sort)
    assert not any(may_recompute(node)[0] for node in section.parts.forward.find_nodes(op="call_function", target=sort))


def test_numbers_with_the_product_computed_again() -> None:
    plan = replace(K3, cache=recomputed("*"))
    step, plain = moec.compile(small_k3(), plan), moec.compile(small_k3(), replace(plan, enable=()))
    batch = next(random_batches(plan, step.vocabulary, 0))
    assert_equal_gradients(step.gradients(batch), plain.gradients(batch))


def test_frozen_experts_make_no_gradient_and_keep_nothing_for_it() -> None:
    model = small_k3()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." not in name)
    trained, frozen = expert_section(K3), expert_section(K3, model)
    calls = {
        name: frozen.parts.backward.find_nodes(op="call_function", target=getattr(torch.ops.moec, name).default)
        for name in ("expert_up_backward", "expert_down_backward")
    }
    ((up,), (down,)) = calls.values()
    assert up.args[1] is None, "the tokens, which only the gradient of the weight reads"
    assert [list(node.args[-1]) for node in (up, down)] == [[True, False, True, True], [True, False, True, True]]  # type: ignore[arg-type]
    assert [nbytes(node.meta["val"][1]) for node in (up, down)] == [0, 0]
    latent = next(node for node in trained.parts.saved if node.name not in {n.name for n in frozen.parts.saved})
    assert latent.name == calls_x(trained)
    step, plain = moec.compile(model, K3), moec.compile(model, replace(K3, enable=()))
    batch = next(random_batches(K3, step.vocabulary, 0))
    assert_equal_gradients(step.gradients(batch), plain.gradients(batch))


def calls_x(section: Section) -> str:
    """The tokens that the first product takes."""
    (up,) = section.parts.forward.find_nodes(op="call_function", target=torch.ops.moec.expert_up.default)
    return up.args[0].name  # type: ignore[union-attr]


# ranks, verification, plans


@pytest.mark.parametrize(
    ("fsdp", "ep", "mesh"), [(2, 2, {}), pytest.param(4, 2, {"capacity": 8.0}, marks=pytest.mark.slow)]
)
def test_ranks_equal_one_rank(fsdp: int, ep: int, mesh: dict[str, float]) -> None:
    """Rows come from other ranks: no gather, and they go back one by one."""
    plan = replace(plan_of(fsdp, ep, packing=True, **mesh), enable=FUSED)
    report = verify_lockstep(model_of("k3-tiny"), plan)
    assert report.equal, str(report)
    found = moec.compile(model_of("k3-tiny"), plan).log.matches("fuse_experts")
    assert {match.what for _, match in found} == {f"up ({SITU}) down"}


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "qwen3_next"])
def test_ranks_of_hugging_face_models_equal_one_rank(name: str) -> None:
    for fsdp, ep in ((2, 1), (2, 2), (4, 2)):
        report = verify_lockstep(model_of(name), replace(plan_of(fsdp, ep), enable=FUSED))
        assert report.equal, str(report)


def test_verification_looks_at_the_pass_on_any_device() -> None:
    plan = replace(WHOLE, enable=())
    model = model_of("k3-tiny")
    batch = {name: torch.randint(0, 50, value.shape) if name != "inverse_tokens" else torch.ones(())
             for name, value in example_inputs(model, plan).items()}  # fmt: skip
    checks = [check for check in check_passes(model, plan, batch) if check.name == "fuse_experts"]
    changed = [check for check in checks if check.changed]
    assert changed
    assert all(check.equal for check in checks)
    assert all(check.output_error == 0 for check in changed)


def test_a_pass_that_runs_anyway_cannot_be_enabled() -> None:
    with pytest.raises(PlanError, match=r"plan\.enable names recognize_mlp, which is no pass for one kind of device"):
        moec.compile(small_k3(), replace(PLAN, enable=("recognize_mlp",)))
