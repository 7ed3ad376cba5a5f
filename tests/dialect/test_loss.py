"""linear_cross_entropy against torch's linear and cross_entropy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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
from tests.dialect.contract import assert_as_accurate, check_op

ROWS, WIDTH, VOCABULARY = 7, 5, 11


def operands(rows: int = ROWS, vocabulary: int = VOCABULARY, bias: bool = False, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes: list[tuple[int, ...]] = [(rows, WIDTH), (vocabulary, WIDTH)]
    shapes += [(vocabulary,)] if bias else []
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def labels_for(rows: int = ROWS, vocabulary: int = VOCABULARY, ignore_index: int = -100, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, vocabulary, (rows,), generator=generator)
    return labels.masked_fill(torch.rand(rows, generator=generator) < 0.3, ignore_index)


def ours(inputs: Sequence[Tensor], labels: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    hidden, weight, *bias = inputs
    return dialect.linear_cross_entropy(hidden, weight, labels, *bias, **options)


def eager(
    inputs: Sequence[Tensor], labels: Tensor, ignore_index: int = -100, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    logits = F.linear(*inputs)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="none"), logits.logsumexp(1)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_linear_and_cross_entropy_with_gradients(bias: bool, softcap: float, chunk: int) -> None:
    inputs, labels = operands(bias=bias), labels_for()
    found = value_and_grads(lambda *x: ours(x, labels, softcap=softcap, chunk=chunk), inputs)
    assert_close(found, value_and_grads(lambda *x: eager(x, labels, softcap=softcap), inputs))
    assert found[0][labels == -100].eq(0).all()


def test_ignore_index_may_be_a_valid_label() -> None:
    inputs, labels = operands(), labels_for(ignore_index=3)
    found = value_and_grads(lambda *x: ours(x, labels, ignore_index=3), inputs)
    assert_close(found, value_and_grads(lambda *x: eager(x, labels, ignore_index=3), inputs))


def test_ignored_rows_give_exact_zeros() -> None:
    inputs, labels = operands(bias=True), torch.full((ROWS,), -100)
    losses, *grads = value_and_grads(lambda *x: ours(x, labels)[0], inputs)
    assert all(value.eq(0).all() for value in (losses, *grads))


def test_first_last_and_only_label() -> None:
    inputs = operands()
    for labels in (torch.zeros(ROWS).long(), torch.full((ROWS,), VOCABULARY - 1)):
        assert_close(ours(inputs, labels), eager(inputs, labels))
    hidden, weight = operands(vocabulary=1)
    losses, lse = ours([hidden, weight], torch.zeros(ROWS).long())
    assert losses.abs().max() < 1e-14
    assert_close([lse], [hidden @ weight[0]])


def test_no_rows() -> None:
    losses, lse, *grads = value_and_grads(lambda *x: ours(x, labels_for(0)), operands(rows=0, bias=True))
    assert losses.shape == lse.shape == (0,)
    assert grads[0].shape == (0, WIDTH)
    assert all(grad.eq(0).all() for grad in grads[1:])


@pytest.mark.parametrize("wrong", [VOCABULARY, -1, -101, 2**40])
def test_a_label_out_of_range_is_named(wrong: int) -> None:
    labels = labels_for()
    labels[4] = wrong
    with pytest.raises(IndexError, match=rf"label {wrong} is outside \[0, V={VOCABULARY}\).*ignore_index=-100"):
        ours(operands(), labels)


def test_a_label_out_of_range_gives_nan_and_no_gradient_where_labels_are_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs, labels = operands(), labels_for()
    labels[4] = VOCABULARY
    ignored = labels.clone()
    ignored[4] = -100
    monkeypatch.setattr(dialect_module("loss"), "_check_labels", lambda *arguments: None)
    losses, *grads = value_and_grads(lambda *x: ours(x, labels)[0], inputs)
    assert losses.isnan().nonzero().flatten().tolist() == [4]
    assert_close(grads, value_and_grads(lambda *x: ours(x, ignored)[0], inputs)[1:])


def test_a_chunk_of_no_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk=0"):
        ours(operands(), labels_for(), chunk=0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_contract(softcap: float, bias: bool) -> None:
    hidden, weight, *rest = (x.requires_grad_() for x in operands(4, 6, bias))
    labels = torch.tensor([0, -100, 5, 2])
    check_op("linear_cross_entropy", (hidden, weight, labels, rest[0] if rest else None, -100, softcap, 3))


def test_large_logits_stay_finite() -> None:
    inputs, labels = [x.float() * 1e3 for x in operands()], labels_for()
    assert all(value.isfinite().all() for value in value_and_grads(lambda *x: ours(x, labels), inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    inputs = [x.to(dtype) for x in operands(bias=True)]
    losses, lse, *grads = value_and_grads(lambda *x: ours(x, labels_for()), inputs)
    assert losses.dtype == lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert all(grad.dtype == dtype and grad.is_contiguous() for grad in grads)


@pytest.mark.parametrize("bias", [False, True])
def test_is_as_accurate_as_eager_in_bfloat16(bias: bool) -> None:
    labels = labels_for(64, 40)
    inputs = [x.bfloat16().requires_grad_() for x in operands(64, 40, bias)]
    assert_as_accurate(lambda *x: ours(x, labels, chunk=16)[0], lambda *x: eager(x, labels)[0], inputs)


def test_weight_gradient_is_summed_in_float32() -> None:
    hidden, weight = (x.bfloat16() for x in operands(2000, 3))
    labels = labels_for(2000, 3)
    whole, pieces = (
        value_and_grads(lambda *x, c=chunk: ours(x, labels, chunk=c)[0].sum(), [hidden, weight])[2]
        for chunk in (4000, 2)
    )
    exact = value_and_grads(lambda *x: eager(x, labels)[0].sum(), [hidden.double(), weight.double()])[2]
    # A sum kept in bfloat16 over a thousand chunks would lose far more than the final rounding.
    assert relative_error(pieces, exact) < 2**-8
    assert relative_error(whole, exact) < 2**-8


def test_nothing_uninitialised_is_returned() -> None:
    inputs, labels = operands(bias=True), labels_for()
    expected = value_and_grads(lambda *x: ours(x, labels, chunk=3), inputs)
    with poisoned_memory():
        assert_close(value_and_grads(lambda *x: ours(x, labels, chunk=3), inputs), expected)


def test_logits_are_never_whole() -> None:
    module, rows, vocabulary, chunk = dialect_module("loss"), 200, 50, 16
    hidden, weight = operands(rows, vocabulary)
    labels = labels_for(rows, vocabulary)
    with LargestTensor() as largest:
        losses, lse = module._forward(hidden, weight, labels, None, -100, 3.0, chunk)
        module._backward(losses, None, hidden, weight, labels, None, lse, -100, 3.0, chunk)
    assert largest.numel <= max(chunk // 2 * vocabulary, rows * WIDTH, vocabulary * WIDTH)


@given(
    rows=st.integers(0, 12),
    vocabulary=st.integers(1, 20),
    chunk=st.integers(1, 15),
    bias=st.booleans(),
    softcap=st.sampled_from([0.0, 1.0, 30.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_any_shape(rows: int, vocabulary: int, chunk: int, bias: bool, softcap: float, seed: int) -> None:
    inputs, labels = operands(rows, vocabulary, bias, seed), labels_for(rows, vocabulary, seed=seed)
    found = value_and_grads(lambda *x: ours(x, labels, softcap=softcap, chunk=chunk), inputs)
    expected = value_and_grads(lambda *x: eager(x, labels, softcap=softcap), inputs)
    assert max(float((a - b).abs().sum()) for a, b in zip(found, expected, strict=True)) < 1e-10


def test_costs() -> None:
    hidden, weight = operands()
    definition = dialect.DEFINITIONS["linear_cross_entropy"]
    arguments = (hidden, weight, labels_for(), None, -100, 0.0, 4)
    assert definition.flops_of(arguments, {}) == 2 * ROWS * VOCABULARY * WIDTH
    assert definition.backward_flops_of(arguments, {}) == 6 * ROWS * VOCABULARY * WIDTH


def test_exports_with_a_symbolic_number_of_rows() -> None:
    class Head(torch.nn.Module):
        def forward(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            return dialect.linear_cross_entropy(hidden, weight, labels)

    rows = torch.export.Dim("rows", min=2)
    shapes: tuple[dict[int, Any], ...] = ({0: rows}, {}, {0: rows})
    program = torch.export.export(Head(), (*operands(), labels_for()), dynamic_shapes=shapes, strict=False)
    longer = (*operands(13), labels_for(13))
    assert_close(program.module()(*longer), Head()(*longer))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("bias", [False, True])
def test_cuda(bias: bool, dtype: torch.dtype, bound: float) -> None:
    inputs, labels = [x.to(dtype) for x in operands(64, 40, bias)], labels_for(64, 40)
    exact = value_and_grads(lambda *x: eager(x, labels, softcap=5.0), [x.double() for x in inputs])
    found = value_and_grads(lambda *x: ours(x, labels.cuda(), softcap=5.0, chunk=24), [x.cuda() for x in inputs])
    assert max(relative_error(a.cpu(), b) for a, b in zip(found, exact, strict=True)) < bound


@pytest.mark.gpu
def test_cuda_label_out_of_range_gives_nan() -> None:
    labels = labels_for()
    labels[4] = VOCABULARY
    losses, *grads = value_and_grads(lambda *x: ours(x, labels.cuda())[0], [x.cuda() for x in operands()])
    assert losses.isnan().nonzero().flatten().tolist() == [4]
    assert all(grad.isfinite().all() for grad in grads)
