"""Whatever a sharded run starts from, a rank holds its own part and one weight, and has the bits of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import moec
from moec.compiler.allocations import AllocationCount
from moec.compiler.plan import MeshPlan, Plan
from moec.driver import Compilation, build
from moec.placing import shards_of
from moec.runtime import ShardedState, StepState, export_weights, save_checkpoint
from moec.runtime.ranks import Ranks
from moec.runtime.weight_source import WeightSource
from moec.targets import build_target, fake_target
from moec.weights import save_published, weights_at

MESH = MeshPlan(fsdp=8, ep=4)
PLAN = Plan(batch=1, length=16, mesh=MESH)
PRESET = "k3-tiny"


@pytest.fixture(scope="module")
def whole() -> nn.Module:
    return build_target(PRESET, seed=5)


@pytest.fixture(scope="module")
def compiled() -> Compilation:
    return build(fake_target(PRESET), PLAN)


def shards(model: nn.Module, compiled: Compilation, rank: int, source: WeightSource | None = None) -> ShardedState:
    return shards_of(model, compiled.buckets, Ranks(MESH, rank), compiled.unreached, source)


def seed(model: nn.Module, whole: nn.Module, folder: Path) -> None:
    return None


def one_file(model: nn.Module, whole: nn.Module, folder: Path) -> WeightSource:
    return weights_at(model, export_weights(StepState.from_module(whole), folder / "w.safetensors"))


def published(model: nn.Module, whole: nn.Module, folder: Path) -> WeightSource:
    return weights_at(model, save_published(StepState.from_module(whole), whole, folder))


def checkpoint(model: nn.Module, whole: nn.Module, folder: Path) -> WeightSource:
    return weights_at(model, save_checkpoint(folder, StepState.from_module(whole), fingerprint={}))


@pytest.mark.parametrize("start", [seed, one_file, published, checkpoint], ids=lambda start: start.__name__)
def test_a_rank_never_holds_the_model(
    start: Callable[[nn.Module, nn.Module, Path], WeightSource | None],
    compiled: Compilation,
    whole: nn.Module,
    tmp_path: Path,
) -> None:
    model = fake_target(PRESET, seed=5)
    source = start(model, whole, tmp_path)
    total = sum(parameter.nbytes for parameter in whole.parameters())
    largest = max(parameter.nbytes for parameter in whole.parameters())
    found: dict[str, list[Tensor]] = {}
    for rank in range(MESH.world):
        with AllocationCount() as memory:
            state = shards(model, compiled, rank, source)
        own = sum(flat.nbytes for flat in state.flats.values())
        assert own < total / 4
        assert own <= memory.peak <= 3 * own + 2 * largest + 2**15, "own weights and moments, and one weight"
        for path, weight in state.weights.items():
            found.setdefault(path, []).append(weight)
    for path, parameter in whole.named_parameters():
        # Rank r has part r % ep of the experts first, then part r // ep of that.
        ranks = [e + MESH.ep * d for e in range(MESH.ep) for d in range(MESH.edp)]
        order = ranks if state.shards[path].role == "experts" else range(MESH.world)
        assert torch.equal(torch.cat([found[path][rank] for rank in order]).view_as(parameter), parameter), path


def test_a_model_that_is_built_whole_is_seen(compiled: Compilation, whole: nn.Module) -> None:
    """The bound above can fail: this is how a rank started before."""
    with AllocationCount() as memory:
        state = shards(build_target(PRESET, seed=5), compiled, 1)
    own = sum(flat.nbytes for flat in state.flats.values())
    largest = max(parameter.nbytes for parameter in whole.parameters())
    assert memory.peak > 3 * own + 2 * largest + 2**15


@pytest.mark.parametrize("where", ["deferred", "meta", "real"])
def test_one_rank_starts_from_files_in_place_of_the_models_weights(where: str, tmp_path: Path) -> None:
    small = "tests.moec.small_models:make"
    whole = build_target(small, seed=2)
    path = export_weights(StepState.from_module(whole), tmp_path / "w.safetensors")
    model = {"deferred": fake_target, "meta": _on_meta, "real": build_target}[where](small)
    step = moec.compile(model, Plan(batch=1, length=8), weights=path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters(), strict=True))
    ids = torch.randint(0, 256, (1, 8))
    step(ids, ids)
    assert not torch.equal(model.get_parameter("head.weight"), whole.get_parameter("head.weight"))
    folder = step.save(tmp_path / "artifact")
    again = moec.load(folder, build_target(small, seed=4), weights=path)
    assert torch.equal(again.state.weights["head.weight"], whole.get_parameter("head.weight"))


def test_a_deferred_model_on_one_rank_has_the_weights_of_its_seed() -> None:
    small = "tests.moec.small_models:make"
    whole = build_target(small, seed=3)
    torch.manual_seed(3)
    with moec.deferred_init():
        model = build_target(small, seed=3)
    moec.compile(model, Plan(batch=1, length=8))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters(), strict=True))


def test_parameters_of_a_deferred_model_that_share_memory_are_refused() -> None:
    with moec.deferred_init():
        model = nn.ParameterDict({"a": torch.empty(4, 4)})
        model["b"] = nn.Parameter(model["a"].detach()[1:])
    with pytest.raises(moec.MoecError, match="parameter a and parameter b share memory but are different tensors"):
        ShardedState.from_module(model, buckets={}, mesh=MESH, rank=0)


def _on_meta(target: str) -> nn.Module:
    return build_target(target).to("meta")
