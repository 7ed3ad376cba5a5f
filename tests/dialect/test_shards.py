"""`unshard` and `pack_gradients` are each other's inverse through simulated collectives, on the layout of a bucket."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moec.compiler import dialect
from moec.compiler.cost import node_bytes
from moec.compiler.dialect import DEFINITIONS
from moec.compiler.layout import BucketLayout, rows_held

Weights = dict[str, tuple[Tensor, bool]]

WEIGHTS: Weights = {
    "matrix": (torch.randn(7, 3).bfloat16(), True),
    "short": (torch.randn(2), True),
    "scalar": (torch.randn(()).double(), True),
    "frozen": (torch.randn(5, 2, 2), False),
    "empty": (torch.randn(0, 4), True),
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_a_gathered_bucket_gives_every_weight_back(ranks: int) -> None:
    layout = layout_of(WEIGHTS, ranks)
    gathered = torch.cat([shard(layout, WEIGHTS, rank) for rank in range(ranks)])
    for weight in layout.weights:
        whole = dialect.unshard(gathered, ranks, weight.offset, weight.shape, weight.torch_dtype)
        assert whole.is_contiguous()
        assert whole.dtype == weight.torch_dtype
        assert torch.equal(whole, WEIGHTS[weight.name][0])
        assert whole.untyped_storage().data_ptr() != gathered.untyped_storage().data_ptr()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reduce_scatter_of_packed_gradients_leaves_each_rank_its_rows(ranks: int, dtype: torch.dtype) -> None:
    layout = layout_of(WEIGHTS, ranks)
    offsets = [weight.gradient_offset for weight in layout.with_gradient]
    per_rank = [[torch.randint(-8, 9, weight.shape).float() for weight in layout.with_gradient] for _ in range(ranks)]
    packed = [dialect.pack_gradients(grads, offsets, layout.gradient_numel, ranks, dtype) for grads in per_rank]
    assert {flat.dtype for flat in packed} == {dtype}
    # Small integers: their sums are exact in any order.
    for rank, local in enumerate(torch.stack(packed).sum(0).chunk(ranks)):
        covered = torch.zeros(layout.gradient_numel, dtype=torch.bool)
        for index, weight in enumerate(layout.with_gradient):
            rows = rows_held(weight.size, ranks, rank)
            start, count = weight.gradient_offset, len(rows) * weight.row_numel
            wanted = torch.stack([grads[index].to(dtype) for grads in per_rank]).sum(0).reshape(-1)
            first = rows.start * weight.row_numel
            assert torch.equal(local[start : start + count], wanted[first : first + count])
            covered[start : start + count] = True
        assert not local[~covered].any()


shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)


@settings(max_examples=60)
@given(st.lists(st.tuples(shapes, st.sampled_from([torch.float32, torch.bfloat16])), min_size=1), st.integers(1, 6))
def test_packing_undoes_gathering(given: list[tuple[tuple[int, ...], torch.dtype]], ranks: int) -> None:
    """The parts of a packed gradient, laid side by side as a bucket of float32 weights, unshard to the gradient."""
    weights: Weights = {f"w{i}": (torch.randn(shape).to(dtype), True) for i, (shape, dtype) in enumerate(given)}
    layout = layout_of({name: (value.float(), True) for name, (value, _) in weights.items()}, ranks)
    packed = dialect.pack_gradients(
        [weights[weight.name][0] for weight in layout.weights],
        [weight.gradient_offset for weight in layout.weights],
        layout.gradient_numel,
        ranks,
        torch.float32,
    )
    # In float32 both alignments are 16 bytes, so the two buffers are laid out alike.
    assert [weight.offset for weight in layout.weights] == [4 * weight.gradient_offset for weight in layout.weights]
    for weight in layout.weights:
        whole = dialect.unshard(packed.view(torch.uint8), ranks, weight.offset, weight.shape, torch.float32)
        assert torch.equal(whole, weights[weight.name][0].float())


def test_strided_gradients_are_packed_by_value() -> None:
    gradient = torch.randn(3, 5).t()
    packed = dialect.pack_gradients([gradient, torch.ones(()).expand(4)], [0, 12], 16, 2, torch.float32)
    assert torch.equal(packed[:9], gradient.reshape(-1)[:9])
    assert packed[12:14].eq(1).all()
    assert packed[28:30].eq(1).all()


def test_the_ops_satisfy_their_contract() -> None:
    layout = layout_of(WEIGHTS, 3)
    gathered = torch.cat([shard(layout, WEIGHTS, rank) for rank in range(3)])
    for weight in layout.weights:
        arguments = (gathered, 3, weight.offset, list(weight.shape), weight.torch_dtype)
        torch.library.opcheck(torch.ops.moec.unshard.default, arguments)
    torch.library.opcheck(
        torch.ops.moec.pack_gradients.default,
        (
            [WEIGHTS[weight.name][0] for weight in layout.with_gradient],
            [weight.gradient_offset for weight in layout.with_gradient],
            layout.gradient_numel,
            3,
            torch.bfloat16,
        ),
    )
    # Gathers are issued anew and unpacked anew; nothing about it is a decision.
    assert DEFINITIONS["unshard"].recompute


def test_unsharding_costs_the_weight_and_not_the_whole_bucket() -> None:
    graph = torch.fx.Graph()
    gathered = graph.placeholder("gathered")
    gathered.meta["val"] = torch.empty(1 << 20, dtype=torch.uint8, device="meta")
    node = graph.call_function(torch.ops.moec.unshard.default, (gathered, 4, 0, [8, 4], torch.float32))
    node.meta["val"] = torch.empty(8, 4, device="meta")
    assert node_bytes(node) == 2 * 8 * 4 * 4


def test_what_does_not_fit_is_refused() -> None:
    gathered = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"gathered is torch.float32 \(64,\)"):
        dialect.unshard(gathered.float(), 2, 0, [4], torch.float32)
    with pytest.raises(ValueError, match="a multiple of 16 bytes for each of 3 ranks"):
        dialect.unshard(gathered, 3, 0, [4], torch.float32)
    with pytest.raises(ValueError, match=r"a weight \(18,\) at byte 0 ends at byte 36, each rank has 32"):
        dialect.unshard(gathered, 2, 0, [18], torch.float32)
    with pytest.raises(ValueError, match="offsets are multiples of 16"):
        dialect.unshard(gathered, 2, 8, [2], torch.float32)
    with pytest.raises(ValueError, match="1 gradients, 2 offsets"):
        dialect.pack_gradients([torch.zeros(2)], [0, 4], 8, 1, torch.float32)
    with pytest.raises(ValueError, match=r"a gradient \(5,\) at 4 ends at 7, the one before it at 3, a rank has 6"):
        dialect.pack_gradients([torch.zeros(6), torch.zeros(5)], [0, 4], 6, 2, torch.float32)


def layout_of(weights: Weights, ranks: int) -> BucketLayout:
    entries = [
        (name, tuple(value.shape), str(value.dtype).removeprefix("torch."), trained)
        for name, (value, trained) in weights.items()
    ]
    return BucketLayout.of("dense", ranks, entries)


def shard(layout: BucketLayout, weights: Weights, rank: int) -> Tensor:
    """A rank's local buffer, its padding filled with what must not come out."""
    local = torch.full((layout.nbytes,), 0xA5, dtype=torch.uint8)
    for weight in layout.weights:
        rows = rows_held(weight.size, layout.ranks, rank)
        values = weights[weight.name][0].reshape(weight.size, weight.row_numel)[rows.start : rows.stop].reshape(-1)
        content = values.view(torch.uint8)
        local[weight.offset : weight.offset + content.numel()] = content
    return local
