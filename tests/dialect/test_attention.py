"""attention against a dense formulation with an explicit mask, repeated key heads and an explicit sink column."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moec.compiler import dialect
from tests.dialect.checks import (
    LargestTensor,
    assert_close,
    dialect_module,
    poisoned_memory,
    relative_error,
    value_and_grads,
)
from tests.dialect.contract import assert_as_accurate, check_op, documents

SCALE = 0.37


def dense(
    inputs: Sequence[Tensor], document_ids: Tensor | None = None, window: int = 0, causal: bool = True
) -> tuple[Tensor, Tensor]:
    q, k, v, *sinks = inputs
    length, repeat = q.shape[1], q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
    scores = torch.einsum("bthd,bshd->bhts", q, k).to(torch.promote_types(q.dtype, torch.float32)) * SCALE
    t, s = torch.arange(length)[:, None], torch.arange(length)[None, :]
    visible = torch.ones(1, length, length, dtype=torch.bool)
    if causal:
        visible = visible & (s <= t)
    if window:
        visible = visible & (t - s < window)
    if document_ids is not None:
        visible = visible & (document_ids[:, :, None] == document_ids[:, None, :])
    scores = scores.masked_fill(~visible[:, None], -math.inf)
    if sinks:
        column = sinks[0].to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    p = scores.softmax(-1)[..., :length].to(v.dtype)
    return torch.einsum("bhts,bshd->bthd", p, v), scores.logsumexp(-1)


def operands(
    batch: int, length: int, heads: int, groups: int, dk: int, dv: int, sinks: bool = False, seed: int = 0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes: list[tuple[int, ...]] = [
        (batch, length, heads, dk),
        (batch, length, groups, dk),
        (batch, length, groups, dv),
    ]
    shapes += [(heads,)] if sinks else []
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def run(inputs: Sequence[Tensor], document_ids: Tensor | None = None, **options: int) -> tuple[Tensor, Tensor]:
    q, k, v, *sinks = inputs
    return dialect.attention(q, k, v, document_ids, *sinks, scale=SCALE, **options)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("window", "causal"), [(0, True), (3, True), (1, True), (100, True), (0, False)])
@pytest.mark.parametrize(("heads", "groups", "dk", "dv"), [(2, 2, 4, 4), (6, 2, 5, 3), (4, 1, 3, 7)])
def test_equals_dense_with_gradients(
    heads: int, groups: int, dk: int, dv: int, window: int, causal: bool, packed: bool, sinks: bool
) -> None:
    inputs = operands(2, 11, heads, groups, dk, dv, sinks)
    document_ids = documents([4, 1, 6], [4, 1, 6]) if packed else None
    ours = value_and_grads(lambda *x: run(x, document_ids, window=window, causal=causal), inputs)
    theirs = value_and_grads(
        lambda *x: dense(x, document_ids, window, causal),
        inputs,
    )
    assert_close(ours, theirs)


@pytest.mark.parametrize("window", [0, 5])
def test_blocks_of_queries_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    inputs, document_ids = operands(2, 23, 4, 2, 3, 5, sinks=True), documents([9, 14], [9, 14])
    whole = value_and_grads(lambda *x: run(x, document_ids, window=window), inputs)
    monkeypatch.setattr(dialect_module("attention"), "CACHED_SCORES", 1)
    for rows in (1, 4):
        monkeypatch.setattr(dialect_module("attention"), "MIN_ROWS", rows)
        assert_close(value_and_grads(lambda *x: run(x, document_ids, window=window), inputs), whole)


def test_packed_documents_equal_separate_ones() -> None:
    lengths = [3, 7, 1, 5]
    inputs = operands(1, sum(lengths), 4, 2, 4, 3, sinks=True)
    packed = value_and_grads(lambda *x: run(x, documents(lengths)), inputs)

    def separately(*x: Tensor) -> tuple[Tensor, Tensor]:
        parts = zip(*(part.split(lengths, 1) for part in x[:3]), strict=True)
        outputs = [run([*part, x[3]]) for part in parts]
        return torch.cat([o for o, _ in outputs], 1), torch.cat([lse for _, lse in outputs], 2)

    assert_close(packed, value_and_grads(separately, inputs))


@pytest.mark.parametrize("sinks", [False, True])
def test_contract(sinks: bool) -> None:
    q, k, v, *sink = (tensor.requires_grad_() for tensor in operands(2, 4, 4, 2, 3, 2, sinks))
    check_op("attention", (q, k, v, documents([1, 3], [2, 2]), sink[0] if sink else None, SCALE, 2, True))


def test_one_token() -> None:
    q, k, v = operands(2, 1, 4, 2, 3, 5)
    o, lse = run([q, k, v])
    assert_close([o], [v.repeat_interleave(2, 2)])
    assert_close([lse[..., 0]], [(q * k.repeat_interleave(2, 2)).sum(-1)[:, 0] * SCALE])


@pytest.mark.parametrize(("batch", "length"), [(0, 3), (2, 0)])
def test_no_tokens(batch: int, length: int) -> None:
    o, lse, *grads = value_and_grads(lambda *x: run(x), operands(batch, length, 4, 2, 3, 5, sinks=True))
    assert o.shape == (batch, length, 4, 5)
    assert lse.shape == (batch, 4, length)
    assert grads[3].equal(torch.zeros(4, dtype=torch.float64))


def test_results_are_contiguous_and_typed() -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        inputs = [x.to(dtype) for x in operands(2, 6, 4, 2, 3, 5)]
        o, lse, *grads = value_and_grads(lambda *x: run(x), inputs)
        assert (o.dtype, lse.dtype) == (dtype, torch.float64 if dtype == torch.float64 else torch.float32)
        assert all(x.is_contiguous() for x in (o, lse, *grads))
        assert all(grad.dtype == dtype for grad in grads)


def test_nothing_uninitialised_is_returned() -> None:
    inputs, document_ids = operands(2, 9, 4, 2, 3, 5, sinks=True), documents([4, 5], [4, 5])
    clean = value_and_grads(lambda *x: run(x, document_ids), inputs)
    with poisoned_memory():
        assert_close(value_and_grads(lambda *x: run(x, document_ids), inputs), clean)


def test_a_large_sink_takes_the_attention() -> None:
    q, k, v = operands(1, 4, 2, 2, 3, 3)
    low, high = torch.full((2,), -1e4, dtype=torch.float64), torch.full((2,), 1e4, dtype=torch.float64)
    assert_close([run([q, k, v, low])[0]], [run([q, k, v])[0]])
    o, lse, *grads = value_and_grads(lambda *x: run(x), [q, k, v, high])
    assert float(o.abs().max()) == 0.0
    assert float(lse.min()) == 1e4
    assert all(grad.isfinite().all() for grad in grads)


def test_large_scores_stay_finite() -> None:
    q, k, v = (x * 1e3 for x in operands(1, 6, 2, 2, 4, 4))
    values = value_and_grads(lambda *x: run([y.float() for y in x]), [q, k, v])
    assert all(value.isfinite().all() for value in values)


@pytest.mark.parametrize("sinks", [False, True])
def test_bfloat16_errs_no_more_than_eager(sinks: bool) -> None:
    inputs = [x.bfloat16().requires_grad_() for x in operands(2, 64, 4, 2, 16, 16, sinks)]
    assert_as_accurate(lambda *x: run(x)[0], lambda *x: dense(x)[0], inputs)


def test_memory_is_linear_in_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    module = dialect_module("attention")
    monkeypatch.setattr(module, "CACHED_SCORES", 1)
    monkeypatch.setattr(module, "MIN_ROWS", 8)
    heads, length = 2, 256
    q, k, v = operands(1, length, heads, heads, 4, 4)
    with LargestTensor() as largest:
        o, lse = module._forward(q, k, v, None, None, SCALE, 0, True)
        module._backward(o, None, q, k, v, o, lse, None, None, SCALE, 0, True)
    assert largest.numel <= 8 * heads * length


@given(
    batch=st.integers(1, 2),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    groups=st.integers(1, 3),
    repeat=st.integers(1, 3),
    dk=st.integers(1, 5),
    dv=st.integers(1, 5),
    window=st.integers(0, 6),
    rows=st.integers(1, 6),
)
@settings(max_examples=30, deadline=None)
def test_any_shape(
    batch: int, lengths: list[int], groups: int, repeat: int, dk: int, dv: int, window: int, rows: int
) -> None:
    inputs = operands(batch, sum(lengths), groups * repeat, groups, dk, dv, sinks=True)
    document_ids = documents(*[lengths] * batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dialect_module("attention"), "CACHED_SCORES", 1)
        patch.setattr(dialect_module("attention"), "MIN_ROWS", rows)
        ours = value_and_grads(lambda *x: run(x, document_ids, window=window), inputs)
    assert_close(ours, value_and_grads(lambda *x: dense(x, document_ids, window), inputs))


def test_mistakes_are_named() -> None:
    q, k, v = operands(1, 4, 4, 2, 3, 3)
    with pytest.raises(ValueError, match="3 key heads"):
        run([q, k.repeat(1, 1, 2, 1)[:, :, :3], v.repeat(1, 1, 2, 1)[:, :, :3]])
    with pytest.raises(ValueError, match="do not fit"):
        run([q, k[:, :3], v[:, :3]])
    with pytest.raises(ValueError, match="window=2"):
        run([q, k, v], window=2, causal=False)


@pytest.mark.parametrize(("window", "causal"), [(0, True), (3, True), (50, True), (0, False)])
def test_cost_counts_the_visible_pairs(window: int, causal: bool) -> None:
    batch, length, heads, dk, dv = 2, 9, 4, 3, 5
    q, k, v = operands(batch, length, heads, 2, dk, dv)
    pairs = sum((not causal or s <= t) and (not window or t - s < window) for t in range(length) for s in range(length))
    definition = dialect.DEFINITIONS["attention"]
    arguments = (q, k, v, None, None, SCALE, window, causal)
    assert definition.flops_of(arguments, {}) == 2 * batch * heads * pairs * (dk + dv)
    assert definition.backward_flops_of(arguments, {}) == 2 * batch * heads * pairs * (3 * dk + 2 * dv)


def test_exports_with_a_symbolic_length() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
            return dialect.attention(q, k, v, documents, scale=SCALE, window=3)

    inputs = (*operands(2, 8, 4, 2, 3, 5), documents([3, 5], [3, 5]))
    length = torch.export.Dim("length", min=2)
    program = torch.export.export(Layer(), inputs, dynamic_shapes=({1: length},) * 4, strict=False)
    longer = (*operands(2, 13, 4, 2, 3, 5, seed=1), documents([6, 7], [6, 7]))
    assert_close(program.module()(*longer), Layer()(*longer))


@pytest.mark.gpu
def test_cuda_equals_cpu() -> None:
    inputs, document_ids = operands(2, 70, 4, 2, 16, 8, sinks=True), documents([30, 40], [30, 40])
    cpu = value_and_grads(lambda *x: run(x, document_ids, window=20), inputs)
    gpu = value_and_grads(
        lambda *x: [y.cpu() for y in run([y.cuda() for y in x], document_ids.cuda(), window=20)], inputs
    )
    assert max(relative_error(a, b) for a, b in zip(gpu, cpu, strict=True)) < 1e-12
