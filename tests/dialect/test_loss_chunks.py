"""Chunk sizes from a budget, and ranges of even size."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from moec.compiler.dialect.head import even_blocks
from moec.compiler.dialect.loss_chunks import ChunkSizes, chunk_sizes, head_sizes

GiB = 2**30


@pytest.mark.parametrize(
    ("classes", "size", "options", "expected"),
    [
        (163840, 2, {}, ChunkSizes(4096, 163840)),
        (163840, 4, {}, ChunkSizes(2048, 163840)),
        (163840, 2, {"memory": GiB // 4}, ChunkSizes(768, 163840)),
        (163840, 2, {"memory": GiB // 8}, ChunkSizes(512, 131072)),
        (163840, 2, {"memory": 2**20}, ChunkSizes(512, 1024)),
        (163840, 2, {"memory": 2**18}, ChunkSizes(512, 256)),
        (163840, 2, {"memory": 2}, ChunkSizes(1, 1)),
        (163840, 2, {"rows": 100}, ChunkSizes(100, 163840)),
        (163840, 2, {"rows": 65536}, ChunkSizes(65536, 10240)),
        (163840, 2, {"columns": 1024}, ChunkSizes(655360, 1024)),
        (1000, 2, {"columns": 4096, "rows": 7}, ChunkSizes(7, 1000)),
        (1, 8, {"memory": 1}, ChunkSizes(1, 1)),
    ],
)
def test_chunks(classes: int, size: int, options: dict[str, int], expected: ChunkSizes) -> None:
    assert chunk_sizes(classes, size, **options) == expected


@given(st.integers(1, 10**6), st.sampled_from([2, 4, 8]), st.integers(1, 2**40))
def test_chunks_fit_the_memory(classes: int, size: int, memory: int) -> None:
    found = chunk_sizes(classes, size, memory=memory)
    assert found.rows >= 1
    assert 1 <= found.columns <= classes
    assert found.rows * found.columns * size <= max(memory, size)


@pytest.mark.parametrize(
    ("width", "dtype", "rows"),
    [(64, torch.float32, 2048), (4096, torch.float32, 4096), (7168, torch.float32, 7168), (7168, torch.bfloat16, 3584)],
)
def test_without_a_budget_a_chunk_is_as_large_as_the_gradient_of_the_weight(
    width: int, dtype: torch.dtype, rows: int
) -> None:
    """On a CPU, where logits are float32; the gradient is in the dtype of the weight."""
    hidden = torch.empty(1, width, dtype=dtype)
    assert head_sizes(hidden, 163840, None, None) == ChunkSizes(rows, 163840)
    assert head_sizes(hidden, 163840, None, None, 5 << 28) == ChunkSizes(2048, 163840)


@given(st.integers(0, 5000), st.integers(1, 3000))
def test_blocks_cover_everything_once(count: int, most: int) -> None:
    blocks = list(even_blocks(count, most))
    assert [index for block in blocks for index in range(block.start, block.stop)] == list(range(count))
    assert all(block.stop - block.start <= most for block in blocks)
    assert len(blocks) == -(-count // most)


def test_blocks_are_even_and_round() -> None:
    assert [b.stop - b.start for b in even_blocks(5000, 4096)] == [2560, 2440]
    assert [b.stop - b.start for b in even_blocks(10, 4)] == [4, 4, 2]
