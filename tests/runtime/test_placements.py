"""On real ranks the caller's parameters are DTensors over the shards, and go with every step."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from moec.compiler.errors import ArtifactError, ModelChangedError
from moec.compiler.plan import MeshPlan
from moec.runtime import adamw, parameter_groups
from tests.runtime.processes import run_ranks
from tests.runtime.sharded_toy import model, state

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("fsdp", "ep"), [(2, 1), (2, 2), (3, 3), (4, 2)])
def test_the_callers_model_lives_on_the_shards(fsdp: int, ep: int) -> None:
    reference = model(experts=8 if ep == 3 else 6)
    for found in run_ranks(fsdp, _live, fsdp, ep):
        assert found.pop("kinds") == {"DTensor", "Tensor"}
        for path, weight in reference.named_parameters():
            first, stepped, written = found[path]
            assert torch.equal(first, weight)
            assert torch.equal(stepped, weight - 0.5 * weight.requires_grad)
            assert torch.equal(written, torch.full_like(weight, 2.0))


def _live(rank: int, fsdp: int, ep: int) -> dict[str, Any]:
    whole = model(experts=8 if ep == 3 else 6)
    part = state(whole, MeshPlan(fsdp=fsdp, ep=ep), rank)
    old = weakref.ref(whole.layers[0].proj.weight)
    flags = {path: parameter.requires_grad for path, parameter in whole.named_parameters()}
    part.place_in(whole)
    assert old() is None, "the whole weight is still in memory"
    assert whole.head.weight is whole.embed.weight
    assert {path: parameter.requires_grad for path, parameter in whole.named_parameters()} == flags
    assert all(isinstance(parameter, nn.Parameter) for parameter in whole.parameters())
    kinds = {type(p.data).__name__ for p in whole.parameters()}
    first = _full(whole)
    part.follow_weights()
    for path in part.trainable:
        part.weights[path].sub_(0.5)
    part.note_weights()
    stepped = _full(whole)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.fill_(2.0)
    part.follow_weights()
    for path in part.weights:
        assert part.weights[path].eq(2.0).all(), path
    part.note_weights()
    written = _full(whole)
    return {"kinds": kinds, **{path: (first[path], stepped[path], written[path]) for path in first}}


def _full(whole: nn.Module) -> dict[str, torch.Tensor]:
    return {
        path: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for path, value in whole.state_dict(keep_vars=True).items()
        if isinstance(value, nn.Parameter)
    }


def test_a_low_precision_master_follows_its_parameter() -> None:
    run_ranks(2, _follow)


def _follow(rank: int) -> None:
    whole = model(dtype=torch.bfloat16)
    part = state(whole, MeshPlan(fsdp=2), rank)
    part.place_in(whole)
    part.masters["layers.0.proj.weight"].add_(1e-6)
    precise = part.masters["layers.0.proj.weight"].clone()
    with torch.no_grad():
        whole.layers[0].proj.bias.fill_(3)
    part.follow_weights()
    assert part.masters["layers.0.proj.bias"].eq(3).all()
    assert torch.equal(part.masters["layers.0.proj.weight"], precise)
    part.note_weights()
    for path in part.trainable:
        part.gradients[path] = torch.ones_like(part.exp_avg[path])
    for group in parameter_groups(part).values():
        adamw(part, group, lr=0.5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    expected = (precise - 0.5).bfloat16()
    assert torch.allclose(whole.layers[0].proj.weight.to_local(), expected, rtol=1e-2)


def test_a_parameter_that_left_the_shards_is_noticed() -> None:
    run_ranks(2, _leave)


def _leave(rank: int) -> None:
    for leave in (_assign, _convert):
        whole = model()
        part = state(whole, MeshPlan(fsdp=2), rank)
        part.place_in(whole)
        part.follow_weights()
        leave(whole)
        with pytest.raises(ModelChangedError, match=r"parameter layers\.0\.proj\.weight was moved or assigned anew"):
            part.follow_weights()
        dist.barrier()


def _assign(whole: Any) -> None:
    whole.layers[0].proj.weight = nn.Parameter(torch.zeros(3))


def _convert(whole: Any) -> None:
    whole.layers[0].proj.to(torch.float64)


def test_a_mesh_of_another_size_is_refused() -> None:
    run_ranks(2, _refuse)


def _refuse(rank: int) -> None:
    part = state(model(), MeshPlan(fsdp=3), rank)
    with pytest.raises(ArtifactError, match=r"shards of 3 ranks cannot become DTensors\n  why:   there are 2 ranks"):
        part.tensors()
