"""Caching by rules: every mixture gives the same bits, layers that differ get templates, and memory is as predicted."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import moec
from moec.compiler import cache_problem, cache_timing
from moec.compiler.allocations import AllocationCount
from moec.compiler.errors import PlanError
from moec.compiler.plan import CachePlan, CacheRule, MeshPlan, Plan
from moec.driver import build as compile_parts
from moec.models.huggingface.adapter import from_config
from moec.models.huggingface.tiny import tiny_config
from moec.overview import pass_report
from moec.random_batch import random_batches
from tests.spine import PLAN, VOCABULARY, Language, Layer, batch_for, recomputed, seeded, small_k3

MIXTURE = (
    CacheRule("offload"),
    CacheRule("recompute", "*layers.0"),
    CacheRule("keep", "*", "aten.mm"),
    CacheRule("offload", "*", "input"),
)
POLICIES: dict[str, Any] = {
    "recompute": "recompute",
    "offload": (CacheRule("offload"),),
    "inputs too": (CacheRule("offload"), CacheRule("offload", "*", "input")),
    "mixture": MIXTURE,
}


def three() -> nn.Module:
    return seeded(lambda: Language(Layer(), Layer(), Layer()))


def with_policy(policy: Any, plan: Plan = PLAN) -> Plan:
    return dataclasses.replace(plan, cache=CachePlan(policy=policy), check=True)


def run(model: nn.Module, plan: Plan, steps: int) -> tuple[list[Tensor], dict[str, Tensor], moec.CompiledStep]:
    """Losses, the weights after them, and the step."""
    step = moec.compile(model, plan)
    batches = random_batches(plan, step.vocabulary or VOCABULARY, 0)
    losses = [step(next(batches)).loss for _ in range(steps)]
    return losses, {name: weight.detach().clone() for name, weight in model.named_parameters()}, step


def assert_same_bits(one: tuple[list[Tensor], dict[str, Tensor], Any], two: Any) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one[0], two[0], strict=True))
    assert all(torch.equal(weight, two[1][name]) for name, weight in one[1].items())


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_the_same_bits(policy: str) -> None:
    kept = run(three(), with_policy("keep"), 3)
    found = run(three(), with_policy(POLICIES[policy]), 3)
    assert_same_bits(kept, found)
    decisions = {p.decision for rows in found[2].log.placements.values() for p in rows}
    expected = {"recompute": {"keep", "recompute"}, "mixture": {"keep", "offload", "recompute"}}
    assert decisions == expected.get(policy, {"offload"})


def test_rules_mean_values_outside_of_layers_too() -> None:
    rules = (CacheRule("recompute", "*", "aten.sum"), CacheRule("offload", "head", "moec.*"))
    kept, found = run(three(), with_policy("keep"), 3), run(three(), with_policy(rules), 3)
    assert_same_bits(kept, found)
    rows = found[2].log.placements
    decisions = {(row.path, row.op.removesuffix(".default"), row.decision) for row in rows["model"]}
    assert {one for one in decisions if one[2] != "keep"} == {
        ("", "aten.sum", "recompute"),
        ("head", "aten.sum", "recompute"),
        ("head", "moec.linear_cross_entropy_sum", "offload"),
    }
    assert {row.decision for row in rows["layer"]} == {"keep"}
    text = (found[2].folder / "step.py").read_text()
    assert text.count("= cache.offload(") == text.count("= cache.fetch(") == 4
    for name in ("losses", "hidden_slope", "weight_slope", "bias_slope"):
        assert f"cache.release([host_{name}])" in text
        assert f"cache.prefetch([host_{name}])" in text


def test_to_recompute_everything_means_layers_alone() -> None:
    kept, again = (compile_parts(three(), with_policy(policy)).log.placements for policy in ("keep", "recompute"))
    assert again["model"] == kept["model"]
    assert {row.decision for row in again["layer"]} == {"recompute"}


@pytest.mark.slow
def test_mixes_of_layers_go_every_way_and_keep_the_bits() -> None:
    """The sums and outputs that depth mixes read lie outside of layers."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return small_k3(layers=4)

    rules = (
        CacheRule("offload"),
        CacheRule("offload", "*", "input"),
        CacheRule("recompute", "*", "aten.add.Tensor"),
        CacheRule("recompute", "embed"),
    )
    plan = Plan(batch=2, length=16, accumulation=2)
    kept, found = run(make(), with_policy("keep", plan), 2), run(make(), with_policy(rules, plan), 2)
    assert_same_bits(kept, found)
    ways = {(row.op.partition(".")[0], row.op, row.decision) for row in found[2].log.placements["model"]}
    assert {decision for _, _, decision in ways} == {"offload", "recompute"}
    assert ("aten", "aten.add.Tensor", "recompute") in ways
    assert ("aten", "aten.embedding.default", "recompute") in ways
    assert ("moec", "moec.region.default", "offload") in ways


@pytest.mark.slow
def test_the_solver_decides_outside_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_problem, "SMALLEST_OFFLOAD", 1)
    for module in (cache_problem, cache_timing):
        monkeypatch.setattr(module, "copy_seconds", lambda node, device: 0.0)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return small_k3(layers=4)

    plan = dataclasses.replace(PLAN, length=64)
    kept = run(make(), plan, 2)
    least = moec.compile(make(), with_policy("recompute", plan)).memory.peak
    found = run(make(), dataclasses.replace(plan, cache=CachePlan(hbm=least, policy="auto"), check=True), 2)
    assert_same_bits(kept, found)
    assert found[2].memory.peak <= least
    rows = found[2].log.placements["model"]
    decided = {row.op: row.reason for row in rows if row.decision != "keep"}
    assert "moec.region.default" in decided
    assert all(reason.startswith("the solver ") for reason in decided.values())
    # Backward begins with these.
    assert {row.decision for row in rows if "linear_cross_entropy" in row.op or "depth_mix" in row.op} == {"keep"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["k3-tiny", "k3-dsa-tiny", "mixtral", "deepseek_v3"])
def test_whole_models_give_the_same_bits(name: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        if name.startswith("k3"):
            return small_k3(full_attention="dsa" if "dsa" in name else "mla", layers=4)
        return from_config(tiny_config(name)).train()

    plan = Plan(batch=2, length=16, accumulation=2)
    kept = run(make(), with_policy("keep", plan), 2)
    for policy in ("recompute", MIXTURE):
        assert_same_bits(kept, run(make(), with_policy(policy, plan), 2))


@pytest.mark.filterwarnings("ignore:the pool of")
def test_twenty_steps_with_a_pool_smaller_than_a_step_needs() -> None:
    kept = run(three(), with_policy("keep"), 20)
    model = three()
    step = moec.compile(model, with_policy(POLICIES["offload"]))
    step.program.HOST_POOL = step.memory.host // 3  # type: ignore[attr-defined]
    batches = random_batches(step.plan, VOCABULARY, 0)
    losses = [step(next(batches)).loss for _ in range(20)]
    assert_same_bits(kept, (losses, dict(model.named_parameters())))
    cache = step.state.host_cache(0)
    assert cache.kept_bytes > 0
    assert 0 < cache.pool.most_used <= cache.pool.capacity < step.memory.host


@pytest.mark.parametrize("policy", ["offload", "mixture"])
def test_the_peak_with_host_memory_is_as_predicted(policy: str) -> None:
    plan = dataclasses.replace(with_policy(POLICIES[policy]), length=64)
    *_, step = run(three(), plan, 1)
    batch = next(random_batches(plan, VOCABULARY, 1))
    step.state.clear_gradients()
    with AllocationCount() as count:
        step(batch)
    predicted = step.memory.peak - step.memory.state.total
    assert abs(predicted - count.peak) <= 0.02 * count.peak
    assert 0 < step.memory.host <= step.state.host_cache(0).pool.most_used <= 1.6 * step.memory.host


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "policies"),
    [
        (MeshPlan(fsdp=2, ep=2), ("recompute", POLICIES["offload"], MIXTURE)),
        (MeshPlan(fsdp=2, gather="keep"), (POLICIES["offload"],)),
    ],
    ids=["again", "keep"],
)
def test_ranks_in_lock_step_give_the_same_bits(mesh: MeshPlan, policies: tuple[Any, ...]) -> None:
    def losses(policy: Any) -> list[Tensor]:
        plan = dataclasses.replace(with_policy(policy, Plan(batch=1, length=16)), mesh=mesh)
        step = moec.compile(small_k3(), plan)
        moved = [row.op for rows in step.log.placements.values() for row in rows if row.decision == "offload"]
        assert bool(moved) == (policy not in ("keep", "recompute"))
        assert not any(op.startswith("_c10d_functional") for op in moved), "gathered weights are not moved"
        ranks = step.simulate_ranks(2)  # type: ignore[attr-defined]
        both = dataclasses.replace(plan, batch=2)
        return [ranks(batch_for(both, seed=n)).loss for n in range(3)]

    kept = losses("keep")
    for policy in policies:
        assert all(torch.equal(a, b) for a, b in zip(kept, losses(policy), strict=True))


def test_a_rule_for_one_layer_splits_its_template() -> None:
    result = compile_parts(three(), dataclasses.replace(PLAN, cache=recomputed("layers.0"), check=True))
    assert result.program is not None
    text = result.program.text
    assert 'saved["layers.0"] = layer_recomputed_forward(' in text
    assert 'saved["layers.1"] = layer_forward(' in text
    kept = {name: sum(p.decision == "keep" for p in rows) for name, rows in result.log.placements.items()}
    assert kept["layer_recomputed"] == 0 < kept["layer"]


def test_one_operator_can_be_meant_and_the_last_rule_counts() -> None:
    rules = (CacheRule("recompute", "layers.*"), CacheRule("offload", "layers.*", "moec.gated_mlp_act"))
    result = compile_parts(three(), with_policy(rules))
    decisions = {row.op: (row.decision, row.reason) for row in result.log.placements["layer"]}
    assert decisions["moec.gated_mlp_act.default"] == ("offload", "the plan's rule to offload layers.*")
    assert decisions["aten.mm.default"] == ("recompute", "the plan's rule to recompute layers.*")
    assert "cache.offload(gated_mlp_act" in result.program.text  # type: ignore[union-attr]


def test_a_decision_is_not_taken_twice_whatever_a_rule_says() -> None:
    result = compile_parts(small_k3(), with_policy("recompute"))
    rows = [row for rows in result.log.placements.values() for row in rows if "route" in row.op or "permute" in row.op]
    assert rows
    assert {row.decision for row in rows if row.op.startswith(("moec.route.", "moec.permute."))} == {"keep"}


@pytest.mark.parametrize(
    ("cache", "where", "what"),
    [
        (
            CachePlan(policy=(CacheRule("keep", "layer.0"),)),
            "plan.cache.policy",
            "'layer.0' covers no value",
        ),
        (
            CachePlan(policy=(CacheRule("offload", "*", "moec.kda"),)),
            "plan.cache.policy",
            "with op 'moec.kda' covers no",
        ),
        (CachePlan(hbm="10KiB"), "plan.cache.hbm", "of hbm, the plan has 10 KiB"),
        (CachePlan(host=100, policy=(CacheRule("offload"),)), "plan.cache.host", "of host, the plan has 100 B"),
    ],
)
def test_what_cannot_be_is_refused(cache: CachePlan, where: str, what: str) -> None:
    with pytest.raises(PlanError) as caught:
        moec.compile(three(), dataclasses.replace(PLAN, cache=cache))
    assert caught.value.where == where
    assert what in caught.value.what
    assert caught.value.hint


def test_the_needed_memory_that_an_error_names_suffices() -> None:
    needed = moec.compile(three(), PLAN).memory.peak
    moec.compile(three(), dataclasses.replace(PLAN, cache=CachePlan(hbm=needed)))
    with pytest.raises(PlanError, match=f"at least {needed}B"):
        moec.compile(three(), dataclasses.replace(PLAN, cache=CachePlan(hbm=needed - 1)))


def found_by_solver(hbm: int, host: int | None) -> tuple[list[Tensor], dict[str, Tensor], moec.CompiledStep]:
    cache = CachePlan(hbm=hbm, host=host, policy="auto")
    return run(three(), dataclasses.replace(PLAN, length=64, cache=cache, check=True), 2)


@pytest.mark.parametrize("host", [None, 0])
def test_the_solver_stays_within_the_limits_and_keeps_the_bits(
    host: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_problem, "SMALLEST_OFFLOAD", 1)
    for module in (cache_problem, cache_timing):
        monkeypatch.setattr(module, "copy_seconds", lambda node, device: 0.0)
    plan = dataclasses.replace(PLAN, length=64)
    kept = run(three(), plan, 2)
    most = kept[2].memory.peak
    least = moec.compile(three(), with_policy("recompute", plan)).memory.peak
    hbm = (most + least) // 2
    found = found_by_solver(hbm, host)
    assert_same_bits(kept, found)
    memory = found[2].memory
    assert least <= memory.peak <= hbm < most
    assert (memory.host > 0) == (host is None)
    (change, *_) = [change for _, change in found[2].log.matches("place_cache") if not change.path]
    assert "ms by its costs, at most" in change.what
    reasons = {p.reason for rows in found[2].log.placements.values() for p in rows if p.decision != "keep"}
    assert reasons
    assert all(reason.startswith("the solver ") for reason in reasons)


def test_the_solver_keeps_everything_where_it_fits() -> None:
    most = moec.compile(three(), dataclasses.replace(PLAN, length=64)).memory.peak
    *_, step = found_by_solver(most, None)
    assert step.memory.peak == most
    assert {p.decision for rows in step.log.placements.values() for p in rows} == {"keep"}


def test_an_infeasible_limit_names_one_that_suffices() -> None:
    with pytest.raises(PlanError, match="no choice fits into 20 KiB") as caught:
        found_by_solver(20 << 10, 0)
    assert caught.value.where == "plan.cache.hbm"
    least = int(caught.value.hint.partition("at least ")[2].partition("B")[0])
    assert found_by_solver(least, 0)[2].memory.peak <= least


def test_the_solver_needs_a_limit() -> None:
    with pytest.raises(PlanError, match=r"cache.hbm is not set, cache.policy is auto"):
        CachePlan(policy="auto")


def test_inspect_shows_every_value_with_its_way_and_why() -> None:
    step = moec.compile(three(), with_policy((CacheRule("offload", "layers.*", "moec.gated_mlp_act"),)))
    console = Console(width=200, record=True, file=io.StringIO())
    for part in pass_report(step.folder, "place_cache"):
        console.print(part)
    (row,) = [line for line in console.export_text().splitlines() if "moec.gated_mlp_act.default" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")][-3:] == [
        "0.4",
        "offload",
        "the plan's rule to offload layers.*",
    ]
