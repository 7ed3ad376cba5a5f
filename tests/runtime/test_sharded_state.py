"""Each rank holds its rows of every weight, in the memory that is gathered, and the ranks together hold all of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from moec.compiler import dialect
from moec.compiler.errors import ArtifactError, UnsupportedModelError
from moec.compiler.layout import BucketInstance, BucketLayout, expert_places
from moec.compiler.plan import MeshPlan
from moec.runtime import ShardedState, StepState, adamw, clip_gradients, parameter_groups
from moec.runtime.simulate import simulate
from moec.runtime.whole import whole_weights
from tests.runtime.sharded_toy import Model, buckets, joined, model, state, states

MESHES = [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (4, 2), (4, 4), (6, 3), (8, 2)]


@pytest.mark.parametrize(("fsdp", "ep"), MESHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_ranks_hold_every_row_once(fsdp: int, ep: int, dtype: torch.dtype) -> None:
    whole = model(dtype=dtype)
    parts = states(whole, MeshPlan(fsdp=fsdp, ep=ep))
    expected = {path: weight for path, weight in whole.named_parameters() if path != "unused"}
    for group in ("weights", "masters"):
        found = joined(parts, group)
        assert set(found) == {p for p in expected if group == "weights" or p in parts[0].masters}
        assert all(
            torch.equal(found[path].to(weight.dtype), weight) for path, weight in expected.items() if path in found
        )
    for path, shard in parts[0].shards.items():
        assert sum(len(part.shards[path].rows) for part in parts) == (shard.shape or (1,))[0]
        assert sum(part.weights[path].numel() for part in parts) == expected[path].numel()
    assert parts[0].masters.keys() == {p for p, w in expected.items() if w.requires_grad and w.dtype == torch.bfloat16}


@pytest.mark.parametrize(("fsdp", "ep"), MESHES)
def test_a_gathered_bucket_unshards_to_the_weights(fsdp: int, ep: int) -> None:
    """Dense ranks in rank order; experts from the ranks that share an ep_index."""
    whole, mesh = model(), MeshPlan(fsdp=fsdp, ep=ep)
    parts = states(whole, mesh)
    for name, bucket in parts[0].buckets.items():
        for start in range(ep if bucket.layout.role == "experts" else 1):
            members = parts if bucket.layout.role == "dense" else parts[start::ep]
            gathered = torch.cat([part.shard(name) for part in members])
            for path, weight in bucket.paths():
                found = dialect.unshard(gathered, bucket.layout.ranks, weight.offset, weight.shape, weight.torch_dtype)
                expected = whole.get_parameter(path).detach()
                if bucket.layout.role == "experts":
                    expected = expected[start * weight.size : (start + 1) * weight.size]
                assert torch.equal(found[: len(expected)] if found.dim() else found, expected)


def test_experts_that_no_rank_count_divides_are_padded_in_the_bucket_alone() -> None:
    parts = states(model(experts=8), MeshPlan(fsdp=3, ep=3))
    shards = [part.shards["layers.0.experts"] for part in parts]
    assert [shard.rows for shard in shards] == [range(3), range(3, 6), range(6, 8)]
    assert [part.weights["layers.0.experts"].shape[0] for part in parts] == [3, 3, 2]
    assert [part.exp_avg["layers.0.experts"].shape[0] for part in parts] == [3, 3, 2]
    assert len({part.shard("layers.0:experts").shape for part in parts}) == 1


def test_an_update_is_in_the_bucket_at_once() -> None:
    part = state(model(), MeshPlan(fsdp=2), 1)
    before = part.shard("layers.0").clone()
    part.weights["layers.0.proj.weight"].mul_(2)
    changed = part.shard("layers.0") != before
    weight = part.buckets["layers.0"].layout.weight("proj.weight")
    inside = torch.zeros_like(changed)
    inside[weight.offset : weight.offset + part.weights["layers.0.proj.weight"].numel() * 4] = True
    assert changed.any()
    assert not changed[~inside].any()


@pytest.mark.parametrize(("fsdp", "ep"), [(2, 1), (3, 3), (4, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_steps_on_shards_equal_three_steps_on_the_whole(fsdp: int, ep: int, dtype: torch.dtype) -> None:
    """Gradients of two microbatches, packed, summed over ranks, accumulated and applied by the same optimizer."""
    whole, mesh = model(dtype=dtype), MeshPlan(fsdp=fsdp, ep=ep)
    parts = states(whole, mesh)
    reference = StepState.from_module(whole, without_gradient=[])
    for step in range(3):
        for part in (reference, *parts):
            part.clear_gradients()
        for microbatch in range(2):
            gradients = _gradients(whole, mesh.world, seed=2 * step + microbatch)
            for path in reference.trainable:
                reference.accumulate(path, sum(rank[path] for rank in gradients))  # type: ignore[arg-type]
            _reduce(parts, mesh, gradients)
        for path, total in joined(parts, "gradients").items():
            assert torch.equal(total, reference.gradients[path]), path
        _update(reference)
        simulate(mesh, lambda rank: _update(parts[rank]))
    for group in ("weights", "masters", "exp_avg", "exp_avg_sq"):
        for path, value in joined(parts, group).items():
            # The fused update rounds the last elements of a tensor otherwise than those before.
            torch.testing.assert_close(value, getattr(reference, group)[path].detach(), rtol=1e-6, atol=1e-7)
    assert all(part.updates == reference.updates for part in parts)


def test_gradients_in_another_dtype_are_summed_in_float32() -> None:
    part = state(model(dtype=torch.bfloat16), MeshPlan(fsdp=1), 0)
    numel = part.buckets["layers.0"].layout.gradient_numel
    part.accumulate_shard("layers.0", torch.ones(numel, dtype=torch.bfloat16))
    for _ in range(100):
        part.accumulate_shard("layers.0", torch.full((numel,), 2.0**-9, dtype=torch.bfloat16))
    total = part.gradients["layers.0.proj.weight"]
    assert total.dtype == torch.float32
    assert total.eq(1 + 100 * 2.0**-9).all()


def test_the_first_gradient_takes_no_further_memory() -> None:
    part = state(model(), MeshPlan(fsdp=2), 0)
    flat = torch.randn(part.buckets["layers.0"].layout.gradient_numel)
    part.accumulate_shard("layers.0", flat)
    assert part.gradients["layers.0.proj.weight"].untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_frozen_weights_are_sharded_and_get_nothing() -> None:
    part = state(model(), MeshPlan(fsdp=2), 0)
    assert part.weights["layers.0.frozen"].shape == (2,)
    assert "layers.0.frozen" not in part.exp_avg
    part.accumulate_shard("layers.0", torch.ones(part.buckets["layers.0"].layout.gradient_numel))
    assert "layers.0.frozen" not in part.gradients


def test_a_tied_weight_is_sharded_once() -> None:
    """C31: one shard, one gradient, one set of moments, under the first name."""
    part = state(model(tied=True), MeshPlan(fsdp=2), 0)
    assert part.weights["head.weight"] is part.weights["embed.weight"]
    assert "head.weight" not in part.shards
    assert "head.weight" not in part.exp_avg
    loose = state(model(tied=False), MeshPlan(fsdp=2), 0)
    assert {"head.weight", "embed.weight"} <= loose.shards.keys()


def test_programs_read_buffers_and_what_is_in_no_bucket() -> None:
    whole = model()
    part = state(whole, MeshPlan(fsdp=2), 1)
    assert set(part.scope("layers.0")) == {"bias"}
    assert part.scope("layers.0")["bias"].data_ptr() == whole.layers[0].bias.data_ptr()  # type: ignore[union-attr]
    assert set(part.scope("")) == {"layers.0.bias", "layers.1.bias", "counts", "unused"}
    assert part.weights["unused"] is whole.unused
    assert part.derived_buffers == {"counts"}


def test_the_module_stays_as_it_was() -> None:
    whole = model()
    before = {path: weight.detach().clone() for path, weight in whole.named_parameters()}
    part = state(whole, MeshPlan(fsdp=2), 0)
    for path in part.shards:
        part.weights[path].add_(1)
    assert all(torch.equal(weight, before[path]) for path, weight in whole.named_parameters())


def test_masters_follow_what_is_written_to_a_shard() -> None:
    part = state(model(dtype=torch.bfloat16), MeshPlan(fsdp=2), 0)
    part.weights["layers.0.proj.bias"].fill_(3)
    part.follow_weights()
    assert part.masters["layers.0.proj.bias"].eq(3).all()
    # Every weight has a version of its own: the precise master of a neighbour is not overwritten by its rounded copy.
    part.masters["layers.0.proj.weight"].add_(1e-6)
    precise = part.masters["layers.0.proj.weight"].clone()
    part.note_weights()
    part.weights["layers.0.proj.bias"].fill_(4)
    part.follow_weights()
    assert torch.equal(part.masters["layers.0.proj.weight"], precise)


def test_what_trains_must_be_sharded() -> None:
    whole, mesh = model(), MeshPlan(fsdp=2)
    given = buckets(whole, mesh)
    del given["layers.1"], given["embed.weight"]
    with pytest.raises(UnsupportedModelError, match=r"parameter embed.weight is trained but not sharded, and 3 more"):
        ShardedState.from_module(whole, buckets=given, mesh=mesh, rank=0)


def test_buckets_of_another_model_or_mesh_are_refused() -> None:
    whole, mesh = model(), MeshPlan(fsdp=2)

    def refused(match: str, **given: BucketInstance) -> None:
        with pytest.raises(ArtifactError, match=match):
            ShardedState.from_module(whole, buckets={**buckets(whole, mesh), **given}, mesh=mesh, rank=0)

    def dense(*entries: tuple[str, Sequence[int], str, bool], ranks: int = 2) -> BucketInstance:
        return BucketInstance(BucketLayout.of("dense", ranks, entries), "")

    refused("bucket x is laid out for 3 ranks\n  why:   the mesh has 2", x=dense(ranks=3))
    refused(
        "embed.weight lies in two buckets, embed.weight and x", x=dense(("embed.weight", (513, 60), "float32", True))
    )
    refused("x holds nothing, which is no weight of its own", x=dense(("nothing", (1,), "float32", True)))
    refused("why:   it is tied to another", x=dense(("head.weight", (513, 60), "float32", True)))
    refused(r"unused is float32 \[3, 2\] in its bucket", x=dense(("unused", (3, 2), "float32", False)))
    refused("unused is float64", x=dense(("unused", (2, 2), "float64", False)))
    refused("unused gets a gradient in bucket x", x=dense(("unused", (2, 2), "float32", True)))
    with pytest.raises(ArtifactError, match=r"the gradients of layers.0 have shape \[7\]"):
        state(whole, mesh, 0).accumulate_shard("layers.0", torch.zeros(7))


@pytest.mark.parametrize(
    ("experts", "fsdp", "ep", "rows"),
    [
        (5, 4, 2, [range(2), range(3, 4), range(2, 3), range(4, 5)]),
        (8, 6, 3, [range(2), range(3, 5), range(6, 7), range(2, 3), range(5, 6), range(7, 8)]),
        (
            6,
            8,
            4,
            [range(1), range(2, 3), range(4, 5), range(6, 6), range(1, 2), range(3, 4), range(5, 6), range(6, 6)],
        ),
    ],
)
def test_uneven_experts_are_split_twice_and_gathered_to_their_places(
    experts: int, fsdp: int, ep: int, rows: list[range]
) -> None:
    """Stored as DTensor stores them, without padding; a gathered part has empty places between its experts."""
    whole, mesh = model(experts=experts), MeshPlan(fsdp=fsdp, ep=ep)
    parts = states(whole, mesh)
    assert [part.shards["layers.0.experts"].rows for part in parts] == rows
    assert [part.weights["layers.0.experts"].shape[0] for part in parts] == [len(held) for held in rows]
    expected, bucket = whole.layers[0].experts, parts[0].buckets["layers.0:experts"]  # type: ignore[union-attr]
    ((_, weight),) = bucket.paths()
    places, share = expert_places(experts, ep, mesh.edp), -(-experts // ep)
    for first in range(ep):
        gathered = torch.cat([part.shard("layers.0:experts") for part in parts[first::ep]])
        found = dialect.unshard(gathered, mesh.edp, weight.offset, weight.shape, weight.torch_dtype)
        for expert in range(first * share, min((first + 1) * share, experts)):
            assert torch.equal(found[places[expert]], expected[expert])
    assert all(
        torch.equal(value, whole.get_parameter(path))
        for value, path in zip(
            simulate(mesh, lambda rank: whole_weights(parts[rank]))[fsdp - 1].values(), parts[0].weights, strict=False
        )
        if path == "layers.0.experts"
    )


def test_checkpoints_need_processes() -> None:
    with pytest.raises(ArtifactError, match="there is no process group"):
        state(model(), MeshPlan(fsdp=2), 0).tensors()


def _gradients(whole: Model, world: int, seed: int) -> list[dict[str, Tensor]]:
    """A gradient of every trained weight for each rank: eighths, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            path: torch.randint(-16, 17, weight.shape, generator=generator) / 8
            for path, weight in whole.named_parameters()
            if weight.requires_grad
        }
        for _ in range(world)
    ]


def _reduce(parts: list[ShardedState], mesh: MeshPlan, gradients: list[dict[str, Tensor]]) -> None:
    """What a program does after backward. The exchange has summed expert gradients over the ranks of its group."""
    for name, bucket in parts[0].buckets.items():
        layout = bucket.layout
        if not layout.with_gradient:
            continue
        offsets = [weight.gradient_offset for weight in layout.with_gradient]
        for start in range(mesh.ep if layout.role == "experts" else 1):
            members = list(range(mesh.world)) if layout.role == "dense" else list(range(start, mesh.world, mesh.ep))
            packed = []
            for rank in members:
                rows = [
                    _rank_gradient(gradients, rank, path, weight.shape, start, mesh, layout.role)
                    for path, weight in bucket.paths()
                    if weight.has_gradient
                ]
                packed.append(dialect.pack_gradients(rows, offsets, layout.gradient_numel, layout.ranks, torch.float32))
            for rank, local in zip(members, torch.stack(packed).sum(0).chunk(layout.ranks), strict=True):
                parts[rank].accumulate_shard(name, local.clone())


def _rank_gradient(
    gradients: list[dict[str, Tensor]],
    rank: int,
    path: str,
    shape: tuple[int, ...],
    start: int,
    mesh: MeshPlan,
    role: str,
) -> Tensor:
    if role == "dense":
        return gradients[rank][path]
    first = rank - rank % mesh.ep
    whole = torch.stack([gradients[other][path] for other in range(first, first + mesh.ep)]).sum(0)
    mine = whole[start * shape[0] : (start + 1) * shape[0]]
    return torch.cat([mine, mine.new_zeros(shape[0] - len(mine), *shape[1:])])


def _update(part: StepState) -> None:
    clip_gradients(part, None)
    for name, decay in (("decay", 0.1), ("no_decay", 0.0)):
        group = parameter_groups(part)[name]
        adamw(part, group, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay)
    part.step += 1
