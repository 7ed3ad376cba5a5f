"""The predicted memory of a step is what a count of its allocations finds, for several models and plans."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moec
from moec.compiler.allocations import AllocationCount, held_bytes
from moec.compiler.errors import ArtifactError
from moec.compiler.memory_table import memory_table, size_text
from moec.compiler.plan import CachePlan, MeshPlan, Plan
from moec.compiler.workspace import Workspaces
from moec.driver import build as compile_parts
from moec.models.huggingface.adapter import from_config
from moec.models.huggingface.tiny import tiny_config
from moec.placing import shards_of
from moec.random_batch import random_batches
from moec.runtime.footprint import state_bytes
from moec.runtime.inventory import Inventory
from moec.runtime.ranks import Ranks
from moec.runtime.state import StepState
from tests.spine import VOCABULARY, Language, Layer, recomputed, seeded, small_k3

BOUND = 0.02
PLAN = Plan(batch=2, length=32)


def huggingface(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return from_config(tiny_config(kind)).train()


def tied() -> nn.Module:
    return seeded(Language, Layer(), Layer(), Layer(), tied=True)


CASES: dict[str, tuple[Callable[[], nn.Module], Plan]] = {
    "layers": (tied, PLAN),
    "kda and mla": (lambda: small_k3(layers=4), PLAN),
    "dsa, two microbatches": (lambda: small_k3(full_attention="dsa"), replace(PLAN, accumulation=3, packing=True)),
    "recomputed": (lambda: small_k3(layers=4), replace(PLAN, cache=recomputed("layers.*"))),
    "some recomputed": (small_k3, replace(PLAN, cache=recomputed("layers.1.*"))),
    "bfloat16": (lambda: small_k3().bfloat16(), replace(PLAN, accumulation=2)),
    "mixtral": (lambda: huggingface("mixtral"), PLAN),
    "gpt_oss recomputed": (lambda: huggingface("gpt_oss"), replace(PLAN, cache=recomputed("*"))),
}


QUICK = ("layers", "some recomputed")


def measured(step: Any, batches: Iterator[dict[str, Tensor]]) -> int:
    """The most that one step allocates, beside its state; after a step that makes what is made once."""
    step(next(batches))
    step.state.clear_gradients()
    gc.collect()
    batch = next(batches)
    with AllocationCount() as count:
        step(batch)
    return count.peak


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES])
def test_the_predicted_peak_is_the_counted_one(name: str) -> None:
    make, plan = CASES[name]
    step = moec.compile(make(), plan)
    found, state = (
        measured(step, random_batches(plan, step.vocabulary or VOCABULARY, 0)),
        held_bytes(step.state.tensors()),
    )
    memory = step.memory
    assert memory.state.total == state
    assert abs(memory.peak - state - found) <= BOUND * found, f"{memory.peak - state:,} predicted, {found:,} counted"
    assert memory.gradients == held_bytes(step.state.gradients)
    copied = {path: step.state.buffers[path] for path in step.written if not path.endswith("histogram")}
    assert memory.copies == held_bytes(copied)
    assert 0 < memory.saved < memory.peak


def test_a_forgotten_workspace_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workspaces, "of", lambda self, node: 0)
    step = moec.compile(small_k3(), PLAN)
    found = measured(step, random_batches(PLAN, step.vocabulary, 0))
    assert step.memory.peak - step.memory.state.total < (1 - BOUND) * found


def test_recomputation_saves_less_and_the_peak_is_named() -> None:
    kept, again = (moec.compile(tied(), replace(PLAN, cache=c)).memory for c in (CachePlan(), recomputed("*")))
    assert again.saved < kept.saved
    assert again.peak < kept.peak
    assert again.saved_by_template["layer"] < kept.saved_by_template["layer"]
    assert " in backward of layers." in kept.where or kept.where.startswith("the sum of gradients of ")


def test_memory_is_in_the_log_and_an_artefact_without_it_says_so(tmp_path: Any) -> None:
    step = moec.compile(tied(), PLAN)
    step.save(tmp_path / "saved", weights=True)
    again = moec.load(tmp_path / "saved")
    assert again.memory == step.memory
    assert "predicted memory of one rank" in str(step.log)
    assert memory_table(step.memory).row_count == 5
    step.log.memory = None
    with pytest.raises(ArtifactError, match="says nothing about memory"):
        step.memory  # noqa: B018


@pytest.mark.parametrize("ranks", [1, 4])
def test_state_is_counted_as_it_is_made(ranks: int) -> None:
    mesh = MeshPlan(fsdp=ranks, ep=min(ranks, 2))
    model = small_k3().bfloat16()
    result = compile_parts(model, replace(PLAN, mesh=mesh))
    sizes = state_bytes(Inventory.of(model, result.unreached), result.buckets, mesh)
    state = (
        StepState.from_module(model, result.unreached)
        if ranks == 1
        else shards_of(model, result.buckets, Ranks(mesh, 0), result.unreached)
    )
    assert sizes.masters == held_bytes(state.masters) > 0
    assert sizes.moments == held_bytes({**state.exp_avg}) + held_bytes({**state.exp_avg_sq})
    assert sizes.weights == held_bytes(state.weights)
    assert sizes.buffers == held_bytes(state.buffers)


def test_sizes_read_well() -> None:
    assert [size_text(n) for n in (5, 1 << 20, 1234 << 10, 3 << 29, 1025 << 30)] == [
        "5 B",
        "1 MiB",
        "1.21 MiB",
        "1.5 GiB",
        "1,025 GiB",
    ]
