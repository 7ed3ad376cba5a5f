"""index_topk, sparse_attention and indexer_loss against dense score matrices with explicit masks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

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

SCALE = 0.3
BATCH, LENGTH, HEADS, WIDTH, VALUE = 2, 9, 3, 5, 4


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def indexer(length: int = LENGTH, heads: int = 2, width: int = 3, seed: int = 0) -> list[Tensor]:
    return [
        normal(BATCH, length, heads, width, seed=seed),
        normal(BATCH, length, width, seed=seed + 1),
        normal(BATCH, length, heads, seed=seed + 2),
    ]


def main(length: int = LENGTH, seed: int = 0) -> list[Tensor]:
    return [normal(BATCH, length, HEADS, WIDTH, seed=seed), normal(BATCH, length, WIDTH, seed=seed + 1)]


def visible(length: int, document_ids: Tensor | None) -> Tensor:
    """[B or 1,T,S]: causal, same document."""
    mask = torch.ones(length, length, dtype=torch.bool).tril()[None]
    return mask if document_ids is None else mask & (document_ids[:, :, None] == document_ids[:, None, :])


def index_scores(inputs: Sequence[Tensor], relu: bool) -> Tensor:
    q, k, w = inputs
    dots = torch.einsum("bthd,bsd->bths", q, k)
    return torch.einsum("bth,bths->bts", w, dots.relu() if relu else dots)


def selected(indices: Tensor, length: int) -> Tensor:
    """[B,T,S] mask of the keys that the indices name."""
    mask = torch.zeros(*indices.shape[:2], length + 1, dtype=torch.bool)
    return mask.scatter(2, indices.long() % (length + 1), True)[..., :length]


def dense(inputs: Sequence[Tensor], mask: Tensor) -> tuple[Tensor, Tensor]:
    q, kv = inputs
    scores = torch.einsum("bthd,bsd->bhts", q, kv) * SCALE
    scores = scores.masked_fill(~mask[:, None], -math.inf)
    return torch.einsum("bhts,bsd->bthd", scores.softmax(-1), kv[..., :VALUE]), scores.logsumexp(-1)


def attend(inputs: Sequence[Tensor], indices: Tensor) -> tuple[Tensor, Tensor]:
    return dialect.sparse_attention(*inputs, indices, scale=SCALE, value_dim=VALUE)


def choose(top_k: int, document_ids: Tensor | None = None, length: int = LENGTH, seed: int = 0) -> Tensor:
    return dialect.index_topk(*indexer(length, seed=seed), document_ids, top_k=top_k)


PACKED = documents([4, 1, 4], [2, 6, 1])


# index_topk


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("document_ids", [None, PACKED])
@pytest.mark.parametrize("top_k", [1, 3, LENGTH, 50])
@pytest.mark.parametrize("block", [None, 1])
def test_topk_finds_the_best_keys(
    monkeypatch: pytest.MonkeyPatch, top_k: int, document_ids: Tensor | None, relu: bool, block: int | None
) -> None:
    if block:
        monkeypatch.setattr(dialect_module("sparse_attention"), "BLOCK", block)
    q, k, w = indexer()
    indices = dialect.index_topk(q, k, w, document_ids, top_k=top_k, relu=relu)
    assert (indices.dtype, indices.shape) == (torch.int32, (BATCH, LENGTH, min(top_k, LENGTH)))
    scores = index_scores([q, k, w], relu).masked_fill(~visible(LENGTH, document_ids), -math.inf)
    for b in range(BATCH):
        for t in range(LENGTH):
            row = scores[b, t]
            found = [s for s in indices[b, t].tolist() if s >= 0]
            candidates = int((row > -math.inf).sum())
            assert len(found) == len(set(found)) == min(top_k, candidates)
            # Rectified scores tie at zero, so compare what was found by score.
            assert_close([row[found].sort().values], [row.sort(descending=True).values[: len(found)].flip(0)])
            assert indices[b, t, len(found) :].eq(-1).all()


def test_topk_with_ties_names_distinct_candidates() -> None:
    q, k, w = indexer()
    for indices in (
        dialect.index_topk(q, k, torch.zeros_like(w), PACKED, top_k=3),
        dialect.index_topk(q, torch.ones_like(k), w, PACKED, top_k=3),
    ):
        mask = selected(indices, LENGTH)
        assert not (mask & ~visible(LENGTH, PACKED)).any()
        assert mask.sum(-1).equal(visible(LENGTH, PACKED).sum(-1).clamp_max(3))


def test_topk_of_half_precision_and_of_nothing() -> None:
    q, k, w = (x.bfloat16() for x in indexer())
    exact = dialect.index_topk(q.double(), k.double(), w.double(), top_k=4, relu=False)
    assert selected(dialect.index_topk(q, k, w, top_k=4, relu=False), LENGTH).equal(selected(exact, LENGTH))
    assert dialect.index_topk(q[:, :0], k[:, :0], w[:, :0], top_k=4).shape == (BATCH, 0, 0)
    assert dialect.index_topk(q[:0], k[:0], w[:0], top_k=4).shape == (0, LENGTH, 4)


def test_topk_opcheck() -> None:
    torch.library.opcheck(torch.ops.moec.index_topk.default, (*indexer(), PACKED, 3, True))


# sparse_attention


@pytest.mark.parametrize("block", [None, 1])
@pytest.mark.parametrize("document_ids", [None, PACKED])
@pytest.mark.parametrize("top_k", [1, 3, LENGTH])
def test_attention_equals_masked_dense_with_gradients(
    monkeypatch: pytest.MonkeyPatch, top_k: int, document_ids: Tensor | None, block: int | None
) -> None:
    if block:
        monkeypatch.setattr(dialect_module("sparse_attention"), "BLOCK", block)
    indices = choose(top_k, document_ids)
    mask = selected(indices, LENGTH)
    assert_close(
        value_and_grads(lambda *x: attend(x, indices), main()), value_and_grads(lambda *x: dense(x, mask), main())
    )


def test_attention_to_all_keys_equals_the_attention_op() -> None:
    indices = choose(LENGTH, PACKED)

    def full(q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        k = kv.unsqueeze(2)
        return dialect.attention(q, k, k[..., :VALUE], PACKED, scale=SCALE)

    assert_close(value_and_grads(lambda *x: attend(x, indices), main()), value_and_grads(full, main()))


def test_empty_slots_may_be_anywhere_and_order_does_not_matter() -> None:
    indices = choose(5, PACKED)
    shuffled = indices[..., torch.tensor([3, 0, 4, 2, 1])]
    padded = torch.cat([torch.full_like(indices[..., :2], -1), shuffled], -1)
    expected = value_and_grads(lambda *x: attend(x, indices), main())
    assert_close(value_and_grads(lambda *x: attend(x, padded), main()), expected)


def test_a_query_without_entries_gives_zero() -> None:
    indices = choose(3)
    indices[1, 4] = -1
    o, lse, grad_q, grad_kv = value_and_grads(lambda *x: attend(x, indices), main())
    assert o[1, 4].eq(0).all()
    assert lse[1, :, 4].eq(-math.inf).all()
    assert grad_q[1, 4].eq(0).all()
    assert grad_kv.isfinite().all()
    assert lse[0].isfinite().all()


def test_attention_contract() -> None:
    q, kv = (x[:, :4].contiguous().requires_grad_() for x in main())
    check_op("sparse_attention", (q, kv, choose(2, length=4), SCALE, VALUE))


def test_attention_of_no_tokens() -> None:
    q, kv = main()
    indices = choose(3)
    for rows, cols in ((slice(0), slice(None)), (slice(None), slice(0))):
        inputs = [q[rows, cols], kv[rows, cols]]
        o, lse, *_ = value_and_grads(lambda *x, i=indices[rows, cols]: attend(x, i), inputs)
        assert o.numel() == lse.numel() == 0
    o, lse, *grads = value_and_grads(lambda *x: attend(x, indices[..., :0]), main())
    assert o.eq(0).all()
    assert lse.eq(-math.inf).all()
    assert all(grad.eq(0).all() for grad in grads)


def test_attention_is_as_accurate_as_eager_in_bfloat16() -> None:
    length = 48
    indices = choose(16, length=length)
    mask = selected(indices, length)
    inputs = [x.bfloat16().requires_grad_() for x in main(length)]
    assert_as_accurate(lambda *x: attend(x, indices)[0], lambda *x: dense(x, mask)[0], inputs)


def test_attention_gradient_is_the_same_in_every_run() -> None:
    indices = choose(16, length=64)
    inputs = [x.float() for x in main(64)]
    first = value_and_grads(lambda *x: attend(x, indices)[0], inputs)
    second = value_and_grads(lambda *x: attend(x, indices)[0], inputs)
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))


# indexer_loss


def target(inputs: Sequence[Tensor], mask: Tensor) -> Tensor:
    """The main attention's probabilities over the selected keys, summed over heads, normalised; [B,T,S]."""
    q, kv = inputs
    scores = torch.einsum("bthd,bsd->bhts", q, kv) * SCALE
    p = scores.masked_fill(~mask[:, None], -math.inf).softmax(-1).sum(1)
    return p / p.sum(-1, keepdim=True)


def dense_loss(inputs: Sequence[Tensor], p: Tensor, mask: Tensor, relu: bool = True) -> Tensor:
    log_q = index_scores(inputs, relu).masked_fill(~mask, -math.inf).log_softmax(-1).masked_fill(~mask, 0)
    return torch.nn.functional.kl_div(log_q, p, reduction="none").masked_fill(~mask, 0).sum(-1)


def loss(inputs: Sequence[Tensor], indices: Tensor, relu: bool = True, length: int = LENGTH) -> Tensor:
    q, kv = (x.to(inputs[0].dtype) for x in main(length))
    lse = attend([q, kv], indices)[1]
    return dialect.indexer_loss(*inputs, indices, q, kv, lse, scale=SCALE, relu=relu)


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("block", [None, 1])
@pytest.mark.parametrize("document_ids", [None, PACKED])
@pytest.mark.parametrize("top_k", [1, 3, LENGTH])
def test_loss_equals_kl_divergence_with_gradients(
    monkeypatch: pytest.MonkeyPatch, top_k: int, document_ids: Tensor | None, relu: bool, block: int | None
) -> None:
    if block:
        monkeypatch.setattr(dialect_module("sparse_attention"), "BLOCK", block)
    indices = choose(top_k, document_ids)
    mask = selected(indices, LENGTH)
    p = target(main(), mask)
    ours = value_and_grads(lambda *x: loss(x, indices, relu), indexer())
    theirs = value_and_grads(lambda *x: dense_loss(x, p, mask, relu), indexer())
    if top_k > 1:
        assert_close(ours, theirs, 1e-11)
    # A single key has probability one on both sides.
    assert ours[0][:, 0].abs().max() < 1e-12
    assert ours[0].min() > -1e-12


def test_loss_target_is_normalised_over_the_selected_set() -> None:
    indices = choose(3)
    q, kv = main()
    lse = attend([q, kv], indices)[1]
    wider = lse + normal(BATCH, 1, LENGTH).abs()
    arguments = (*indexer(), indices, q, kv)
    a = dialect.indexer_loss(*arguments, lse, scale=SCALE)
    assert_close([dialect.indexer_loss(*arguments, wider, scale=SCALE)], [a])


def test_loss_is_zero_for_an_indexer_that_copies_the_attention() -> None:
    q, kv = normal(BATCH, LENGTH, 1, WIDTH), normal(BATCH, LENGTH, WIDTH)
    indices = choose(4)
    _, lse = attend([q, kv], indices)
    copied = [q * SCALE, kv, torch.ones(BATCH, LENGTH, 1, dtype=torch.float64)]
    kl, *grads = value_and_grads(
        lambda *x: dialect.indexer_loss(*x, indices, q, kv, lse, scale=SCALE, relu=False), copied
    )
    assert kl.abs().max() < 1e-12
    assert max(float(grad.abs().max()) for grad in grads) < 1e-12


def test_loss_gives_no_gradient_to_the_main_attention() -> None:
    indices = choose(3)
    q, kv = (x.requires_grad_() for x in main())
    _, lse = attend([q, kv], indices)
    inputs = [x.requires_grad_() for x in indexer()]
    dialect.indexer_loss(*inputs, indices, q, kv, lse, scale=SCALE).sum().backward()
    assert q.grad is None
    assert kv.grad is None
    assert all(x.grad is not None and x.grad.abs().max() > 0 for x in inputs)


def test_loss_of_rows_without_entries_is_zero() -> None:
    indices = choose(3)
    indices[0, 5] = -1
    kl, *grads = value_and_grads(lambda *x: loss(x, indices), indexer())
    assert kl[0, 5] == 0
    assert grads[0][0, 5].eq(0).all()
    assert all(value.isfinite().all() for value in (kl, *grads))


def test_loss_survives_a_target_that_underflows() -> None:
    indices = choose(3)
    q, kv = main()
    lse = torch.full((BATCH, HEADS, LENGTH), 1e4, dtype=torch.float64)
    values = value_and_grads(lambda *x: dialect.indexer_loss(*x, indices, q, kv, lse, scale=SCALE), indexer())
    assert all(value.eq(0).all() for value in values)


def test_loss_contract() -> None:
    inputs = [x[:, :4].contiguous().requires_grad_() for x in indexer()]
    q, kv = (x[:, :4].contiguous() for x in main())
    indices = choose(2, length=4)
    check_op("indexer_loss", (*inputs, indices, q, kv, attend([q, kv], indices)[1], SCALE, True))


def test_loss_is_as_accurate_as_eager_in_bfloat16() -> None:
    length = 48
    indices = choose(16, length=length)
    mask = selected(indices, length)
    p = target([x.bfloat16().double() for x in main(length)], mask)
    inputs = [x.bfloat16().requires_grad_() for x in indexer(length, width=16)]

    def eager(*x: Tensor) -> Tensor:
        return dense_loss(x, p.to(x[0].dtype), mask).to(torch.promote_types(x[0].dtype, torch.float32))

    assert_as_accurate(lambda *x: loss(x, indices, length=length), eager, inputs)


# All three


def test_nothing_uninitialised_is_returned() -> None:
    indices = choose(4, PACKED)
    attention = value_and_grads(lambda *x: attend(x, indices), main())
    kl = value_and_grads(lambda *x: loss(x, indices), indexer())
    with poisoned_memory():
        assert choose(4, PACKED).equal(indices)
        assert_close(value_and_grads(lambda *x: attend(x, indices), main()), attention)
        assert_close(value_and_grads(lambda *x: loss(x, indices), indexer()), kl)


def test_memory_is_bounded_by_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    module, length, block = dialect_module("sparse_attention"), 128, 4096
    monkeypatch.setattr(module, "BLOCK", block)
    q, kv = main(length)
    with LargestTensor() as largest:
        indices = module._topk(*indexer(length), None, 8, True)
        o, lse = module._attend(q, kv, indices, SCALE, VALUE)
        module._attend_backward(o, None, q, kv, indices, o, lse, SCALE, VALUE)
        kl = module._loss(*indexer(length), indices, q, kv, lse, SCALE, True)
        module._loss_backward(kl, *indexer(length), indices, q, kv, lse, SCALE, True)
    assert largest.numel <= block
    assert BATCH * length * 8 * WIDTH > 2 * block


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    top_k=st.integers(1, 8),
    block=st.integers(1, 2000),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_any_shape(lengths: list[int], top_k: int, block: int, seed: int) -> None:
    length, document_ids = sum(lengths), documents(*[lengths] * BATCH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dialect_module("sparse_attention"), "BLOCK", block)
        indices = choose(top_k, document_ids, length, seed)
        mask = selected(indices, length)
        assert mask.sum(-1).equal(visible(length, document_ids).sum(-1).clamp_max(top_k))
        ours = value_and_grads(lambda *x: attend(x, indices), main(length))
        assert_close(ours, value_and_grads(lambda *x: dense(x, mask), main(length)))
        p = target(main(length), mask)
        kl = loss(indexer(length, seed=seed), indices, length=length)
        assert (kl - dense_loss(indexer(length, seed=seed), p, mask)).abs().max() < 1e-12


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="top_k=0, expected at least 1"):
        choose(0)
    for value_dim, expected in ((0, "at least 1"), (WIDTH + 1, f"at most {WIDTH}")):
        with pytest.raises(ValueError, match=f"value_dim={value_dim}, expected {expected}"):
            dialect.sparse_attention(*main(), choose(2), scale=SCALE, value_dim=value_dim)


def test_costs() -> None:
    (q, k, w), (main_q, main_kv), indices = indexer(), main(), choose(3)
    pairs = BATCH * LENGTH * 3
    costs = dialect.DEFINITIONS
    candidates = BATCH * LENGTH * (LENGTH + 1) // 2
    assert costs["index_topk"].flops_of((q, k, w, None, 3, True), {}) == candidates * 2 * (2 * 3 + 2)
    arguments: tuple[Any, ...] = (main_q, main_kv, indices, SCALE, VALUE)
    assert costs["sparse_attention"].flops_of(arguments, {}) == 2 * pairs * HEADS * (WIDTH + VALUE)
    assert costs["sparse_attention"].backward_flops_of(arguments, {}) == 2 * pairs * HEADS * (3 * WIDTH + 2 * VALUE)
    lse = attend([main_q, main_kv], indices)[1]
    arguments = (q, k, w, indices, main_q, main_kv, lse, SCALE, True)
    assert costs["indexer_loss"].flops_of(arguments, {}) == 2 * pairs * (HEADS * WIDTH + 2 * (3 + 1))
    assert costs["indexer_loss"].backward_flops_of(arguments, {}) == 2 * pairs * (HEADS * WIDTH + 2 * (3 * 3 + 2))
    assert not costs["index_topk"].recompute


def test_exports_with_a_symbolic_length() -> None:
    class Layer(torch.nn.Module):
        def forward(
            self, q: Tensor, k: Tensor, w: Tensor, main_q: Tensor, main_kv: Tensor, document_ids: Tensor
        ) -> tuple[Tensor, Tensor]:
            indices = dialect.index_topk(q, k, w, document_ids, top_k=6)
            o, lse = dialect.sparse_attention(main_q, main_kv, indices, scale=SCALE, value_dim=VALUE)
            return o, dialect.indexer_loss(q, k, w, indices, main_q, main_kv, lse, scale=SCALE)

    def inputs(length: int) -> tuple[Tensor, ...]:
        return (*indexer(length), *main(length), documents([1, length - 1], [2, length - 2]))

    length = torch.export.Dim("length", min=2)
    program = torch.export.export(Layer(), inputs(9), dynamic_shapes=({1: length},) * 6, strict=False)
    for size in (4, 6, 13):
        assert_close(program.module()(*inputs(size)), Layer()(*inputs(size)))


@pytest.mark.gpu
def test_cuda_equals_cpu() -> None:
    indices = choose(16, length=64)
    # Without the rectifier no scores tie.
    cpu, gpu = (
        dialect.index_topk(*(x.to(device) for x in indexer(64)), top_k=16, relu=False).cpu()
        for device in ("cpu", "cuda")
    )
    assert selected(gpu, 64).equal(selected(cpu, 64))

    def both(device: str, *x: Tensor) -> list[Tensor]:
        return [y.cpu() for y in attend([z.to(device) for z in x], indices.to(device))]

    attended = [value_and_grads(lambda *x, d=device: both(d, *x), main(64)) for device in ("cpu", "cuda")]
    assert max(relative_error(a, b) for a, b in zip(*attended, strict=True)) < 1e-12
    q, kv = main(64)
    lse = attend([q, kv], indices)[1]

    def kl(device: str, *x: Tensor) -> Tensor:
        arguments = [y.to(device) for y in (*x, indices, q, kv, lse)]
        return dialect.indexer_loss(*arguments, scale=SCALE).cpu()

    losses = [value_and_grads(lambda *x, d=device: kl(d, *x), indexer(64)) for device in ("cpu", "cuda")]
    assert max(relative_error(a, b) for a, b in zip(*losses, strict=True)) < 1e-12


@pytest.mark.gpu
def test_cuda_gradients_are_the_same_in_every_run() -> None:
    """Every key is chosen by many queries, and all their gradients are added up."""
    length = 512
    indices = choose(32, length=length).cuda()
    q, kv = (x.float().cuda() for x in main(length))
    lse = attend([q, kv], indices)[1]

    def both(*x: Tensor) -> list[Tensor]:
        return [*attend(x[:2], indices), dialect.indexer_loss(*x[2:], indices, q, kv, lse, scale=SCALE)]

    inputs = [q, kv, *(x.float().cuda() for x in indexer(length))]
    runs = [value_and_grads(both, inputs) for _ in range(5)]
    assert all(a.equal(b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
