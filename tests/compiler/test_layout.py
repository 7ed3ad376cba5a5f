"""A bucket's layout is torch's own chunking, aligned, the same after JSON, and refuses what it cannot lay out."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moec.compiler.layout import (
    BucketInstance,
    BucketLayout,
    expert_places,
    places_per_rank,
    rows_held,
    rows_of_rank,
    rows_per_rank,
)
from moec.compiler.plan import MeshPlan

Entry = tuple[str, tuple[int, ...], str, bool]

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
entries = st.lists(
    st.tuples(shapes, st.sampled_from(["float32", "bfloat16", "float64", "float16"]), st.booleans()), max_size=6
).map(lambda rows: [(f"w{index}", *row) for index, row in enumerate(rows)])


@given(entries, st.integers(1, 7))
def test_weights_lie_apart_aligned_and_inside(given: list[Entry], ranks: int) -> None:
    layout = BucketLayout.of("dense", ranks, given)
    end = gradient_end = 0
    for weight in layout.weights:
        assert weight.offset % 16 == 0
        assert weight.offset >= end
        end = weight.offset + weight.local_numel * weight.torch_dtype.itemsize
        if weight.has_gradient:
            assert weight.gradient_offset % 4 == 0
            assert weight.gradient_offset >= gradient_end
            gradient_end = weight.gradient_offset + weight.local_numel
    assert end <= layout.nbytes < end + 16
    assert layout.nbytes % 16 == 0
    assert gradient_end <= layout.gradient_numel < gradient_end + 4
    assert layout.gathered_nbytes == ranks * layout.nbytes


@given(entries, st.integers(1, 7))
def test_gradients_come_first_and_nothing_is_lost(given: list[Entry], ranks: int) -> None:
    layout = BucketLayout.of("experts", ranks, given)
    found = [(weight.name, weight.shape, weight.dtype, weight.has_gradient) for weight in layout.weights]
    assert found == [e for e in given if e[3]] + [e for e in given if not e[3]]
    assert layout.with_gradient == tuple(weight for weight in layout.weights if weight.has_gradient)
    assert all(layout.weight(weight.name) is weight for weight in layout.weights)


@given(entries, st.integers(1, 7))
def test_json_gives_back_an_equal_layout(given: list[Entry], ranks: int) -> None:
    layout = BucketLayout.of("dense", ranks, given)
    assert BucketLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


@given(st.integers(0, 40), st.integers(1, 9))
def test_rows_are_those_of_torch_chunk(size: int, ranks: int) -> None:
    values = torch.arange(size)
    chunks = [*values.chunk(ranks), *[values[:0]] * ranks][:ranks]
    found = [values[rows.start : rows.stop] for rows in (rows_held(size, ranks, rank) for rank in range(ranks))]
    assert [part.tolist() for part in found] == [chunk.tolist() for chunk in chunks]


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 5))
def test_places_of_experts_are_where_a_gather_puts_them(experts: int, ranks: int, parts: int) -> None:
    """In the order of the experts, and at the same place for a rank's rows wherever its part ends."""
    mesh = MeshPlan(fsdp=ranks * parts, ep=ranks)
    room = rows_per_rank(rows_per_rank(experts, ranks), parts)
    places = expert_places(experts, ranks, parts)
    seen: dict[int, list[int]] = {}
    for rank in range(mesh.world):
        for index, expert in enumerate(rows_of_rank("experts", experts, mesh, rank)):
            assert places[expert] == rank // ranks * room + index
            seen.setdefault(rank % ranks, []).append(expert)
    assert sorted(expert for part in seen.values() for expert in part) == list(range(experts))
    for part in seen.values():
        assert [places[expert] for expert in sorted(part)] == sorted(places[expert] for expert in part)
    size = places_per_rank(experts, ranks, parts)
    assert rows_per_rank(experts, ranks) <= size <= parts * room
    assert rows_per_rank(size, parts) == room, "a weight with these places is sharded as its experts are"
    if experts % ranks == 0:
        assert list(places) == [expert % (experts // ranks) for expert in range(experts)]


def test_a_bucket_by_hand() -> None:
    layout = BucketLayout.of(
        "dense",
        4,
        [
            ("frozen", (3,), "bfloat16", False),
            ("proj", (10, 3), "bfloat16", True),
            ("scale", (), "float32", True),
        ],
    )
    proj, scale, frozen = layout.weights
    assert (proj.name, proj.rows, proj.offset, proj.gradient_offset) == ("proj", 3, 0, 0)
    assert (scale.name, scale.rows, scale.offset, scale.gradient_offset) == ("scale", 1, 32, 12)
    assert (frozen.name, frozen.rows, frozen.offset, frozen.gradient_offset) == ("frozen", 1, 48, -1)
    assert (layout.nbytes, layout.gradient_numel) == (64, 16)
    paths = [path for path, _ in BucketInstance(layout, "layers.3.attention").paths()]
    assert paths == [f"layers.3.attention.{name}" for name in ("proj", "scale", "frozen")]
    assert [path for path, _ in BucketInstance(layout, "").paths()] == ["proj", "scale", "frozen"]


def test_no_ranks_or_a_name_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one rank, and each weight once"):
        BucketLayout.of("dense", 0, [])
    with pytest.raises(ValueError, match=r"weights \['w', 'w'\]"):
        BucketLayout.of("dense", 2, [("w", (1,), "float32", True), ("w", (2,), "float32", True)])


def test_padding_costs_less_than_a_row_per_rank() -> None:
    layout = BucketLayout.of("dense", 128, [("w", (163840, 7), "bfloat16", True)])
    assert math.ceil(163840 / 128) * 7 * 2 <= layout.nbytes < math.ceil(163840 / 128) * 7 * 2 + 16
