"""A step on simulated ranks: one rank with all rows is the reference; what differs between ranks is an error on all.

Cases C21 (all labels of a rank, of a microbatch, of the batch ignored) and C30 (one norm over all shards).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moec.compiler import dialect
from moec.compiler.errors import BatchError, DataError, NonFiniteError, RankError
from moec.compiler.plan import MeshPlan
from moec.runtime import StepState, clip_gradients, differences, random_state, update_balance
from moec.runtime.collective import record_collectives
from moec.runtime.control import first_rank_decides, gathered, gathered_texts, summed
from moec.runtime.ranks import Ranks
from moec.runtime.simulate import simulate
from tests.runtime import sharded_toy
from tests.runtime.ranked_program import PROGRAM, batch_of, plan_of, rows_of, step_of

CPU = torch.device("cpu")
MESHES = [MeshPlan(fsdp=2), MeshPlan(fsdp=2, ep=2), MeshPlan(fsdp=3, ep=3), MeshPlan(fsdp=4, ep=2)]


def on_all(mesh: MeshPlan, function: Callable[[int], Any], kind: type[Exception]) -> list[Exception]:
    """The errors of a kind that every rank has to raise; the function may not need the others after its error."""

    def run(rank: int) -> Exception:
        with pytest.raises(kind) as caught:
            function(rank)
        return caught.value

    return simulate(mesh, run)


def test_exchanges_of_the_runtime() -> None:
    mesh, texts = MeshPlan(fsdp=3), ["", "zwei €", "x" * 50]

    def run(rank: int) -> tuple[Any, ...]:
        return (
            summed(torch.tensor([rank, 1])).tolist(),
            gathered(torch.tensor([[rank, 2]]), 3).tolist(),
            gathered_texts(texts[rank], 3, CPU),
            gathered_texts("", 3, CPU),
            first_rank_decides(lambda: f"decided by {rank}", Ranks(mesh, rank), CPU),
        )

    expected = ([3, 3], [[[rank, 2]] for rank in range(3)], texts, ["", "", ""], "decided by 0")
    assert simulate(mesh, run) == [expected] * 3


def test_a_refusal_of_rank_0_is_one_of_all() -> None:
    def run(rank: int) -> None:
        def decide() -> str:
            assert rank == 0
            raise DataError("nothing to read", where="here", why="it is gone", hint="look")

        first_rank_decides(decide, Ranks(MeshPlan(fsdp=2), rank), CPU)

    def either(rank: int) -> str:
        with pytest.raises((DataError, RankError)) as caught:
            run(rank)
        return f"{type(caught.value).__name__}: {caught.value}"

    first, second = simulate(MeshPlan(fsdp=2), either)
    assert first == "DataError: nothing to read\n  where: here\n  why:   it is gone\n  do:    look"
    assert second == "AgreedError: rank 0 stopped: nothing to read\n  where: here\n  why:   it is gone\n  do:    look"


# Gradient norms (C30)


def with_gradients(mesh: MeshPlan, scale: float = 1.0) -> tuple[StepState, list[Any]]:
    """The state of one rank with random gradients, and those of all ranks with their rows of the same."""
    module = sharded_toy.model()
    reference, parts = StepState.from_module(module), sharded_toy.states(module, mesh)
    generator = torch.Generator().manual_seed(1)
    for path in reference.trainable:
        gradient = torch.randn(reference.weights[path].shape, generator=generator) * scale
        reference.gradients[path] = gradient.clone()
        for part in parts:
            rows = part.shards[path].rows
            part.gradients[path] = gradient.reshape(part.shards[path].shape or (1,))[rows.start : rows.stop].clone()
    return reference, parts


@pytest.mark.parametrize("bound", [0.5, 1e6, None])
@pytest.mark.parametrize("mesh", MESHES)
def test_the_norm_is_over_all_shards_and_the_factor_is_one(mesh: MeshPlan, bound: float | None) -> None:
    reference, parts = with_gradients(mesh)
    expected = clip_gradients(reference, bound)
    norms = simulate(mesh, lambda rank: clip_gradients(parts[rank], bound))
    assert len({norm.item() for norm in norms}) == 1
    assert norms[0].dtype == expected.dtype
    torch.testing.assert_close(norms[0], expected, rtol=1e-6, atol=0)
    for path, whole in sharded_toy.joined(parts, "gradients").items():
        torch.testing.assert_close(whole, reference.gradients[path], rtol=1e-6, atol=0)
    assert 0.5 < expected < 1e6


@pytest.mark.parametrize("mesh", MESHES)
def test_one_nan_in_an_expert_stops_every_rank_before_anything_is_scaled(mesh: MeshPlan) -> None:
    _, parts = with_gradients(mesh)
    owner = mesh.world - 1
    parts[owner].gradients["layers.1.experts"].view(-1)[0] = float("nan")
    before = [{path: value.clone() for path, value in part.gradients.items()} for part in parts]
    errors = on_all(mesh, lambda rank: clip_gradients(parts[rank], 0.1), NonFiniteError)
    assert {str(error) for error in errors} == {str(errors[0])}
    assert f"gradients of layers.1.experts (rank {owner})" in str(errors[0])
    for part, kept in zip(parts, before, strict=True):
        assert all(
            torch.equal(
                part.gradients[path],
                kept[path],
            )
            or path == "layers.1.experts"
            for path in kept
        )


def test_parameters_are_named_with_all_ranks_that_hold_bad_elements() -> None:
    mesh = MeshPlan(fsdp=3)
    _, parts = with_gradients(mesh)
    for rank in (0, 2):
        parts[rank].gradients["embed.weight"].fill_(float("inf"))
    parts[1].gradients["layers.0.proj.bias"].fill_(float("nan"))
    errors = on_all(mesh, lambda rank: clip_gradients(parts[rank], None), NonFiniteError)
    assert "gradients of embed.weight (ranks 0, 2), layers.0.proj.bias (rank 1)" in str(errors[2])


def test_ranks_without_a_gradient_take_part() -> None:
    mesh = MeshPlan(fsdp=2)
    _, parts = with_gradients(mesh)
    parts[0].clear_gradients()
    own = StepState({}, {}, ())
    own.gradients = parts[1].gradients
    expected = clip_gradients(own, None)
    first, second = simulate(mesh, lambda rank: clip_gradients(parts[rank], 1.0))
    torch.testing.assert_close(first, expected, rtol=1e-6, atol=0)
    assert torch.equal(first, second)


# Balancing


def test_routers_are_balanced_by_the_counts_of_all_ranks() -> None:
    mesh = MeshPlan(fsdp=2)
    logits = torch.randn(2, 64, 6, generator=torch.Generator().manual_seed(0)) + torch.linspace(-2, 2, 6)

    def state_of(world: int, rank: int) -> StepState:
        module = sharded_toy.model()
        for layer in module.layers:
            layer.register_buffer("histogram", torch.zeros(6, 1000, dtype=torch.int64))
            layer.bias.zero_()
        state = StepState.from_module(module) if world == 1 else sharded_toy.state(module, mesh, rank)
        rows = logits if world == 1 else logits[rank : rank + 1]
        for index, layer in enumerate(module.layers):
            for part in rows:
                layer.histogram += dialect.route_histogram(part * (index + 1), layer.bias, top_k=2)
        return state

    routers = [(f"layers.{i}.bias", f"layers.{i}.histogram", 2) for i in range(2)]
    reference = state_of(1, 0)
    update_balance(reference, routers)
    states = [state_of(2, rank) for rank in range(2)]

    def run(rank: int) -> int:
        with record_collectives() as calls:
            update_balance(states[rank], iter(routers))
        return len(calls)

    assert simulate(mesh, run) == [1, 1]
    for state in states:
        for bias, histogram, _ in routers:
            assert reference.buffers[bias].any()
            assert torch.equal(state.buffers[bias], reference.buffers[bias])
            assert not state.buffers[histogram].any()


# Whole steps (C21)


def weights_after(
    tmp_path: Path, world: int, batches: list[dict[str, Tensor]]
) -> tuple[Tensor, list[tuple[float, float, int, dict[str, float]]]]:
    """The table after a step per batch, whose rows are dealt to the ranks, and the results of rank 0."""
    rows = batches[0]["input_ids"].shape[1] // world
    plan = plan_of(world, rows)
    steps = [step_of(tmp_path / str(world), plan, rank) for rank in range(world)]

    def run(rank: int) -> list[tuple[float, float, int, dict[str, float]]]:
        found = []
        for batch in batches:
            result = steps[rank](rows_of(batch, rank, rows))
            metrics = {name: float(value) for name, value in result.metrics.items()}
            found.append((float(result.loss), float(result.gradient_norm), result.tokens, metrics))
        return found

    results = simulate(plan.mesh, run)
    assert all(result == results[0] for result in results)
    return torch.cat([step.state.weights["table"].detach() for step in steps]), results[0]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("case", ["some", "rank", "microbatch", "rank and microbatch"])
def test_three_steps_equal_those_of_one_rank(tmp_path: Path, world: int, case: str) -> None:
    batches = [batch_of(12, seed) for seed in range(3)]
    rows = 12 // world
    for batch in batches:
        if "rank" in case:
            batch["labels"][:, rows : 2 * rows] = -100
        if "microbatch" in case:
            batch["labels"][0] = -100
    table, results = weights_after(tmp_path, world, batches)
    expected, reference = weights_after(tmp_path, 1, batches)
    torch.testing.assert_close(table, expected, rtol=1e-5, atol=1e-7)
    for (loss, norm, tokens, metrics), (loss_, norm_, tokens_, metrics_) in zip(results, reference, strict=True):
        assert loss == pytest.approx(loss_, rel=1e-6)
        assert norm == pytest.approx(norm_, rel=1e-6)
        assert tokens == tokens_ == 144
        assert metrics == metrics_
        assert 0 < metrics["seen"] < 144


def test_no_valid_label_on_any_rank_is_a_loss_of_zero_and_a_warning(tmp_path: Path) -> None:
    batch = batch_of(4, seed=0, ignored=2.0)
    with pytest.warns(UserWarning, match="no label of this batch is valid"):
        table, results = weights_after(tmp_path, 2, [batch])
    assert [result[:2] for result in results] == [(0.0, 0.0)]
    assert torch.isfinite(table).all()


def test_losses_and_gradients_without_an_update(tmp_path: Path) -> None:
    batch, plan = batch_of(4, seed=1), plan_of(2)
    steps = [step_of(tmp_path / "ranks", plan, rank) for rank in range(2)]
    reference = step_of(tmp_path / "one", plan_of(1, 4))
    losses = simulate(plan.mesh, lambda rank: steps[rank].loss(rows_of(batch, rank, 2)))
    gradients = simulate(plan.mesh, lambda rank: steps[rank].gradients(rows_of(batch, rank, 2)))
    for name, value in reference.loss(batch).items():
        assert all(found[name].dtype == value.dtype for found in losses)
        torch.testing.assert_close(losses[1][name], value, rtol=1e-6, atol=0)
    whole = torch.cat([found["table"] for found in gradients])
    torch.testing.assert_close(whole, reference.gradients(batch)["table"], rtol=1e-5, atol=1e-7)


def test_a_batch_that_one_rank_refuses_is_refused_by_all(tmp_path: Path) -> None:
    plan, batch = plan_of(2), batch_of(4, seed=2)
    steps = [step_of(tmp_path, plan, rank) for rank in range(2)]
    batch["input_ids"][0, 3, 2] = 99
    first, second = on_all(plan.mesh, lambda rank: steps[rank](rows_of(batch, rank, 2)), BatchError)
    assert str(first).startswith("rank 1 refuses its batch: input_ids holds 99 at [0, 1, 2]")
    assert str(second).startswith("input_ids holds 99 at [0, 1, 2]")
    assert all(step.state.step == 0 for step in steps)
    good = batch_of(4, seed=3)
    results = simulate(plan.mesh, lambda rank: steps[rank](rows_of(good, rank, 2)))
    assert float(results[0].loss) > 0


def test_a_layer_that_overflows_on_one_rank_is_named_on_all(tmp_path: Path) -> None:
    plan, batch = plan_of(2), batch_of(4, seed=4)
    steps = [step_of(tmp_path, plan, rank) for rank in range(2)]
    steps[1].state.buffers["layer.scale"][1] = float("inf")
    for step in steps:
        step._met = True  # the handshake compares buffers, and would find this one first
    errors = on_all(plan.mesh, lambda rank: steps[rank](rows_of(batch, rank, 2)), NonFiniteError)
    for error in errors:
        assert "gradients of table (ranks 0, 1)" in str(error)
        assert "layer is the first layer whose output holds" in str(error)
        assert "(rank 1)" in str(error)
    assert torch.equal(
        torch.cat([step.state.weights["table"].detach() for step in steps]),
        step_of(tmp_path / "one", plan_of(1)).state.weights["table"].detach(),
    )
    assert "layer_forward" in vars(steps[0].program)
    assert all(step.program.layer_forward.__module__ == step.program.__name__ for step in steps)


# The handshake


def edited(rank: int, step: Any, case: str) -> None:
    if rank != 1:
        return
    if case == "plan":
        step.plan = dataclasses.replace(step.plan, check=True)
    elif case == "collectives":
        step.program.COLLECTIVES = [*step.program.COLLECTIVES[:1], ("all_reduce", "control", "float64", 1)]
    elif case == "weights":
        step.state.exp_avg.clear()
    elif case == "buffers":
        step.state.buffers["layer.scale"][0] = 0.75


HANDSHAKES = {
    "plan": ("plan differs between ranks 0 and 1", "'check: False' on rank 0, 'check: True' on rank 1"),
    "program": ("program differs between ranks 0 and 1", 'w["scale"] * 2, [ids]\' on rank 1'),
    "collectives": (
        "collectives differs between ranks 0 and 1 in line 2",
        "'reduce_scatter on \"scatter\" of 12 float32' on rank 0, 'all_reduce on \"control\" of 1 float64' on rank 1",
    ),
    "weights": (
        "weights differs",
        "'table: torch.float32 [7, 3], trained' on rank 0, 'table: torch.float32 [7, 3], not",
    ),
    "buffers": ("buffers differs", "'layer.scale: torch.float32 [3], values"),
    "versions": ("versions differs between ranks 0 and 1 in line 2", "'torch 9.9' on rank 1"),
}


@pytest.mark.parametrize("case", HANDSHAKES)
def test_ranks_that_would_run_different_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    plan, batch = plan_of(3), batch_of(6, seed=5)
    changed = PROGRAM.replace('w["scale"], [ids]', 'w["scale"] * 2, [ids]')
    assert changed != PROGRAM
    texts = [PROGRAM, changed if case == "program" else PROGRAM, PROGRAM]
    steps = [step_of(tmp_path / str(rank), plan, rank, texts[rank]) for rank in range(3)]
    for rank, step in enumerate(steps):
        edited(rank, step, case)

    def run(rank: int) -> None:
        if case == "versions":
            lines = "moec 0", "torch 9.9" if rank == 1 else "torch 2.13"
            monkeypatch.setattr("moec.runtime.handshake.versions", lambda: lines)
        steps[rank](rows_of(batch, rank, 2))

    errors = on_all(plan.mesh, run, RankError)
    assert {str(error) for error in errors} == {str(errors[0])}
    for part in HANDSHAKES[case]:
        assert part in str(errors[0])
    assert all(step.state.step == 0 for step in steps)


def test_equal_ranks_exchange_digests_once(tmp_path: Path) -> None:
    plan, batch = plan_of(2), batch_of(4, seed=6)
    steps = [step_of(tmp_path, plan, rank) for rank in range(2)]

    def run(rank: int) -> list[list[int]]:
        sent = []
        for _ in range(2):
            with record_collectives() as calls:
                steps[rank](rows_of(batch, rank, 2))
            sent.append([call.nbytes for call in calls if call.role == "control"])
        return sent

    first, second = simulate(plan.mesh, run)[0]
    assert first == [6 * 32, *second]
    assert second == [16, 8, 24]  # valid tokens and refusals; the sum of squares; three results


def test_the_first_difference_in_words() -> None:
    same = {"plan": ["a", "b"], "program": ["c"]}
    assert differences.first_difference([same, same]) == ""
    longer = {"plan": ["a", "b", "x" * 300], "program": ["d"]}
    found = differences.first_difference([same, same, longer, longer])
    assert found.startswith("plan differs between ranks 0 and 2 in line 3: nothing on rank 0, 'xxx")
    assert found.endswith("...' on rank 2 (ranks 2, 3 differ from rank 0)")
    assert len(found) < 350
    assert differences.digest(["a", "b"]) != differences.digest(["ab"])


# Streams of random numbers


def test_ranks_draw_from_streams_of_their_own() -> None:
    def run(rank: int) -> list[float]:
        torch.manual_seed(7)
        random_state.separate(rank)
        return nn.Dropout(0.5)(torch.ones(64)).tolist()

    first, second, third = simulate(MeshPlan(fsdp=3), run)
    assert first != second != third != first
    assert simulate(MeshPlan(fsdp=3), run) == [first, second, third]
    torch.manual_seed(7)
    random_state.separate(0, step=5)
    assert nn.Dropout(0.5)(torch.ones(64)).tolist() != first
