"""linear_cross_entropy and linear_cross_entropy_sum against torch's linear and cross_entropy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moec.compiler import dialect
from tests.dialect.checks import (
    assert_close,
    dialect_module,
    poisoned_memory,
    relative_error,
    value_and_grads,
)
from tests.dialect.contract import assert_as_accurate, check_op
from tests.dialect.loss_cases import CLASSES, ROWS, WIDTH, eager, eager_logits, labels_for, operands, weights_for

REDUCTIONS = ("none", "sum", "mean")
OPS = torch.ops.moec


def ours(inputs: Sequence[Tensor], labels: Tensor, **options: Any) -> Tensor:
    return dialect.linear_cross_entropy(inputs[0], inputs[1], labels, *inputs[2:], **options)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "soft cap": {"softcap": 1.5},
    "scaled": {"logit_scale": 0.3},
    "scaled and capped": {"logit_scale": 2.0, "softcap": 1.5},
    "z-loss": {"z_loss": 0.01},
    "smoothed": {"label_smoothing": 0.1},
    "class weights": {"class_weights": weights_for(CLASSES)},
    "token weights": {"token_weights": weights_for(ROWS)},
    "everything": {
        "logit_scale": 0.7, "softcap": 2.0, "z_loss": 0.02, "label_smoothing": 0.2, "class_weights":
        weights_for(CLASSES), "token_weights": weights_for(ROWS),
    },
}  # fmt: skip


@pytest.mark.parametrize("chunk", [(100, 100), (2, 100), (3, 4), (1, 1)], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bias", [False, True])
def test_equals_linear_and_cross_entropy_with_gradients(
    bias: bool, variant: str, reduction: str, chunk: tuple[int, int]
) -> None:
    inputs, labels, options = operands(bias=bias), labels_for(), VARIANTS[variant] | {"reduction": reduction}
    rows, columns = chunk
    found = value_and_grads(lambda *x: ours(x, labels, rows=rows, columns=columns, **options), inputs)
    assert_close(found, value_and_grads(lambda *x: eager(x, labels, **options), inputs))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_an_upstream_factor_scales_all_gradients(reduction: str) -> None:
    inputs, labels = operands(bias=True), labels_for()
    found = value_and_grads(lambda *x: 3e4 * ours(x, labels, reduction=reduction), inputs)
    assert_close(found, value_and_grads(lambda *x: 3e4 * eager(x, labels, reduction=reduction), inputs))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_loss_that_is_used_twice(reduction: str) -> None:
    inputs, labels = operands(), labels_for()

    def twice(loss: Tensor) -> tuple[Tensor, Tensor]:
        return loss + 0.1 * loss.square(), loss.exp()

    found = value_and_grads(lambda *x: twice(ours(x, labels, reduction=reduction)), inputs)
    assert_close(found, value_and_grads(lambda *x: twice(eager(x, labels, reduction=reduction)), inputs))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_token_weights_have_gradients(reduction: str) -> None:
    labels, inputs = labels_for(), [*operands(), weights_for(ROWS)]

    def run(function: Any) -> list[Tensor]:
        return value_and_grads(lambda h, w, t: function([h, w], labels, token_weights=t, reduction=reduction), inputs)

    assert_close(run(ours), run(eager))


def test_token_weights_with_gradients_and_a_z_loss_are_refused_where_they_do_not_go_together() -> None:
    weights = weights_for(ROWS).requires_grad_()
    with pytest.raises(ValueError, match="weights of a z-loss have no gradient here"):
        ours(operands(), labels_for(), token_weights=weights, z_loss=0.1)


@pytest.mark.parametrize("columns", [CLASSES, 4])
def test_lse_and_losses_are_both_differentiable(columns: int) -> None:
    inputs, labels = operands(bias=True), labels_for()

    def found(*x: Tensor) -> Any:
        return OPS.linear_cross_entropy(x[0], x[1], labels, x[2], None, -100, 1.0, 0.0, 0.0, 3, columns)[:2]

    def expected(*x: Tensor) -> tuple[Tensor, Tensor]:
        return eager(x, labels, reduction="none"), eager_logits(x).logsumexp(1)

    assert_close(value_and_grads(found, inputs), value_and_grads(expected, inputs))


def test_ignore_index_may_be_a_valid_label() -> None:
    inputs, labels = operands(), labels_for(ignore_index=3)
    found = value_and_grads(lambda *x: ours(x, labels, ignore_index=3), inputs)
    assert_close(found, value_and_grads(lambda *x: eager(x, labels, ignore_index=3), inputs))


@pytest.mark.parametrize("variant", ["plain", "everything"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_all_labels_ignored_give_exact_zeros(reduction: str, variant: str) -> None:
    options = VARIANTS[variant]
    inputs, labels = operands(bias=True), torch.full((ROWS,), -100)
    loss, *grads = value_and_grads(lambda *x: ours(x, labels, reduction=reduction, **options), inputs)
    assert all(value.eq(0).all() for value in (loss, *grads))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_rows(reduction: str) -> None:
    loss, *grads = value_and_grads(lambda *x: ours(x, labels_for(0), reduction=reduction), operands(rows=0, bias=True))
    assert loss.shape == ((0,) if reduction == "none" else ())
    assert not loss.any()
    assert grads[0].shape == (0, WIDTH)
    assert all(grad.eq(0).all() for grad in grads[1:])


def test_first_last_and_only_label() -> None:
    inputs = operands()
    for labels in (torch.zeros(ROWS).long(), torch.full((ROWS,), CLASSES - 1)):
        assert_close([ours(inputs, labels, columns=4)], [eager(inputs, labels)])
    losses = ours(operands(classes=1), torch.zeros(ROWS).long(), reduction="none")
    assert losses.abs().max() < 1e-14


def test_classes_that_are_masked_out_have_no_share() -> None:
    """A bias of -inf, over whole chunks of classes and first, as for the padding of a vocabulary."""
    hidden, weight, bias = operands(bias=True)
    bias[:6], labels = float("-inf"), torch.arange(ROWS) % 5 + 6
    found = value_and_grads(lambda h, w: ours([h, w, bias], labels, columns=3), [hidden, weight])
    assert_close(found, value_and_grads(lambda h, w: eager([h, w[6:], bias[6:]], labels - 6), [hidden, weight]))
    assert found[2][:6].eq(0).all()


def test_a_row_of_weight_zero_takes_no_part_even_if_its_label_has_no_probability() -> None:
    hidden, weight, bias = operands(bias=True)
    bias[3], labels = float("-inf"), torch.tensor([0, 3, 5, 6, 7, 1, 2])
    tokens = torch.tensor([1.0, 0, 1, 1, 1, 1, 1]).double()
    found = value_and_grads(
        lambda h, w: ours([h, w, bias], labels, token_weights=tokens, reduction="sum"), [hidden, weight]
    )
    kept = tokens.bool()
    expected = value_and_grads(lambda h, w: eager([h[kept], w, bias], labels[kept], reduction="sum"), [hidden, weight])
    assert_close(found, expected)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("wrong", [CLASSES, -1, -101, 2**40])
def test_a_label_out_of_range_is_named(wrong: int, reduction: str) -> None:
    labels = labels_for()
    labels[4] = wrong
    with pytest.raises(IndexError, match=rf"label {wrong} is outside \[0, V={CLASSES}\).*ignore_index=-100"):
        ours(operands(), labels, reduction=reduction)


@pytest.mark.parametrize("options", [{}, {"columns": 4}, {"label_smoothing": 0.1}])
def test_a_label_out_of_range_gives_nan_and_no_gradient_where_labels_are_not_read(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, labels = operands(), labels_for()
    labels[4] = CLASSES
    ignored = labels.clone()
    ignored[4] = -100
    monkeypatch.setattr(dialect_module("head"), "check", lambda head: None)
    losses, *grads = value_and_grads(lambda *x: ours(x, labels, reduction="none", **options), inputs)
    assert losses.isnan().nonzero().flatten().tolist() == [4]
    assert_close(grads, value_and_grads(lambda *x: ours(x, ignored, reduction="none", **options), inputs)[1:])
    loss, *grads = value_and_grads(lambda *x: ours(x, labels, reduction="sum", **options), inputs)
    assert loss.isnan()
    assert_close(grads, value_and_grads(lambda *x: ours(x, ignored, reduction="sum", **options), inputs)[1:])


@pytest.mark.parametrize("options", [{"rows": 0}, {"columns": 0}])
def test_an_empty_chunk_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected at least 1 of each"):
        ours(operands(), labels_for(), **options)


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(ValueError, match="reduction 'total', expected none, sum or mean"):
        ours(operands(), labels_for(), reduction="total")


FORMS = [(1.0, 0.0, 0.0), (0.5, 2.0, 0.1)]


@pytest.mark.parametrize("columns", [6, 4])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_contract(bias: bool, form: tuple[float, float, float], columns: int) -> None:
    hidden, weight, *rest = (x.requires_grad_() for x in operands(4, 6, bias))
    labels, class_weights = torch.tensor([0, -100, 5, 2]), weights_for(6) if form[2] else None
    options = (rest[0] if rest else None, class_weights, -100, *form, 3, columns)
    check_op("linear_cross_entropy", (hidden, weight, labels, *options))
    tokens, z = weights_for(4).requires_grad_(), weights_for(4) if form[2] else None
    arguments = (hidden, weight, labels, tokens, z, *options, True, True, torch.float64)
    torch.library.opcheck(OPS.linear_cross_entropy_sum.default, arguments)
    plain = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
    results = OPS.linear_cross_entropy_sum(*plain)
    torch.library.opcheck(
        OPS.linear_cross_entropy_sum_backward.default, (torch.tensor(1.5).double(), *results[1:], torch.float64)
    )
    leaves = (hidden, weight, tokens, *rest)

    def total(h: Tensor, w: Tensor, t: Tensor, *b: Tensor) -> Tensor:
        return OPS.linear_cross_entropy_sum(h, w, labels, t, z, *b, *options[len(b) :], *arguments[-3:])[0]

    assert torch.autograd.gradcheck(total, leaves, atol=1e-7, rtol=1e-5)


def test_only_the_sum_is_differentiable() -> None:
    hidden, weight = (x.requires_grad_() for x in operands())
    options = (None, None, -100, 1.0, 0.0, 0.0, 3, 11, True, True, torch.float64)
    total, *others = OPS.linear_cross_entropy_sum(hidden, weight, labels_for(), weights_for(ROWS), None, *options)
    assert total.requires_grad
    assert not any(value.requires_grad for value in others)


@pytest.mark.parametrize("columns", [CLASSES, 4])
def test_gradients_that_are_not_asked_for_are_empty(columns: int) -> None:
    hidden, weight = operands()
    given = (hidden, weight, labels_for(), weights_for(ROWS), None, None, None, -100, 1.0, 0.0, 0.0, 3, columns)
    both = OPS.linear_cross_entropy_sum(*given, True, True, torch.float64)
    for flags in ((True, False), (False, True), (False, False)):
        found = OPS.linear_cross_entropy_sum(*given, *flags, torch.float64)
        assert_close(found[:2], both[:2])
        for asked, value, full in zip(flags, found[2:4], both[2:4], strict=True):
            assert_close([value], [full]) if asked else None
            assert asked or value.shape == (0,)


def test_without_a_gradient_only_one_product_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[bool, bool]] = []
    original = OPS.linear_cross_entropy_sum
    inputs, labels = [x.requires_grad_() for x in operands()], labels_for()

    def spy(*arguments: Any) -> Any:
        calls.append(arguments[-3:-1])
        return original(*arguments)

    monkeypatch.setattr(OPS, "linear_cross_entropy_sum", spy)
    ours(inputs, labels)
    with torch.no_grad():
        ours(inputs, labels)
    ours([inputs[0], inputs[1].detach()], labels)
    assert calls == [(True, True), (False, False), (True, False)]


def test_large_logits_stay_finite() -> None:
    inputs, labels = [x.float() * 1e3 for x in operands()], labels_for()
    for reduction in REDUCTIONS:
        found = value_and_grads(lambda *x, r=reduction: ours(x, labels, reduction=r), inputs)
        assert all(value.isfinite().all() for value in found)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype, reduction: str) -> None:
    inputs = [x.to(dtype) for x in operands(bias=True)]
    loss, *grads = value_and_grads(lambda *x: ours(x, labels_for(), reduction=reduction), inputs)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert all(grad.dtype == dtype and grad.is_contiguous() for grad in grads)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_is_as_accurate_as_eager_in_bfloat16(bias: bool, reduction: str) -> None:
    labels = labels_for(64, 40)
    inputs = [x.bfloat16().requires_grad_() for x in operands(64, 40, bias)]
    options: dict[str, Any] = {"reduction": reduction}
    assert_as_accurate(lambda *x: ours(x, labels, rows=16, **options), lambda *x: eager(x, labels, **options), inputs)


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_weight_gradient_is_summed_in_float32(reduction: str) -> None:
    hidden, weight = (x.bfloat16() for x in operands(2000, 3))
    labels = labels_for(2000, 3)
    whole, pieces = (
        value_and_grads(lambda *x, r=rows: ours(x, labels, rows=r, reduction=reduction).sum(), [hidden, weight])[2]
        for rows in (4000, 2)
    )
    exact = value_and_grads(lambda *x: eager(x, labels, reduction="sum"), [hidden.double(), weight.double()])[2]
    # A sum kept in bfloat16 over a thousand chunks would lose far more than the final rounding.
    assert relative_error(pieces, exact) < 2**-8
    assert relative_error(whole, exact) < 2**-8


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("columns", [CLASSES, 4])
def test_nothing_uninitialised_is_returned(columns: int, reduction: str) -> None:
    inputs, labels = operands(bias=True), labels_for()
    options: dict[str, Any] = {"rows": 3, "columns": columns, "reduction": reduction}
    expected = value_and_grads(lambda *x: ours(x, labels, **options), inputs)
    with poisoned_memory():
        assert_close(value_and_grads(lambda *x: ours(x, labels, **options), inputs), expected)


@given(
    rows=st.integers(0, 12),
    classes=st.integers(1, 20),
    chunk=st.tuples(st.integers(1, 15), st.integers(1, 25)),
    bias=st.booleans(),
    softcap=st.sampled_from([0.0, 1.0, 30.0]),
    smoothing=st.sampled_from([0.0, 0.1]),
    reduction=st.sampled_from(["none", "sum"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_any_shape(
    rows: int,
    classes: int,
    chunk: tuple[int, int],
    bias: bool,
    softcap: float,
    smoothing: float,
    reduction: str,
    seed: int,
) -> None:
    inputs, labels = operands(rows, classes, bias, seed), labels_for(rows, classes, seed=seed)
    options: dict[str, Any] = {"softcap": softcap, "label_smoothing": smoothing, "reduction": reduction}
    found = value_and_grads(lambda *x: ours(x, labels, rows=chunk[0], columns=chunk[1], **options), inputs)
    expected = value_and_grads(lambda *x: eager(x, labels, **options), inputs)
    assert max(float((a - b).abs().sum()) for a, b in zip(found, expected, strict=True)) < 1e-10


def test_costs() -> None:
    hidden, weight = operands()
    product = 2 * ROWS * CLASSES * WIDTH
    definition = dialect.DEFINITIONS["linear_cross_entropy"]
    arguments = (hidden, weight, labels_for(), None, None, -100, 1.0, 0.0, 0.0, 4, 11)
    assert definition.flops_of(arguments, {}) == product
    assert definition.backward_flops_of(arguments, {}) == 3 * product
    definition = dialect.DEFINITIONS["linear_cross_entropy_sum"]
    for columns, flags, products in (
        (CLASSES, (True, True), 3), (CLASSES + 5, (True, False), 2), (CLASSES, (False, False), 1),
        (4, (True, True), 4), (4, (True, False), 3), (4, (False, False), 1),
    ):  # fmt: skip
        options = (*arguments[3:-1], columns, *flags, torch.float64)
        given = (hidden, weight, labels_for(), weights_for(ROWS), None, *options)
        assert definition.flops_of(given, {}) == products * product


def test_exports_with_a_symbolic_number_of_rows() -> None:
    class Head(torch.nn.Module):
        def forward(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            losses = dialect.linear_cross_entropy(hidden, weight, labels, reduction="none")
            return losses, dialect.linear_cross_entropy(hidden, weight, labels)

    rows = torch.export.Dim("rows", min=2)
    shapes: tuple[dict[int, Any], ...] = ({0: rows}, {}, {0: rows})
    program = torch.export.export(Head(), (*operands(), labels_for()), dynamic_shapes=shapes, strict=False)
    longer = (*operands(13), labels_for(13))
    assert_close(program.module()(*longer), Head()(*longer))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.bfloat16, 8e-3), (torch.float16, 2e-3)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("columns", [40, 16])
def test_cuda(columns: int, reduction: str, dtype: torch.dtype, bound: float) -> None:
    inputs, labels = [x.to(dtype) for x in operands(64, 40, True)], labels_for(64, 40)
    options: dict[str, Any] = {"softcap": 5.0, "label_smoothing": 0.1, "z_loss": 0.01, "reduction": reduction}
    exact = value_and_grads(lambda *x: eager(x, labels, **options), [x.double() for x in inputs])
    found = value_and_grads(
        lambda *x: ours(x, labels.cuda(), rows=24, columns=columns, **options), [x.cuda() for x in inputs]
    )
    assert max(relative_error(a.cpu(), b) for a, b in zip(found, exact, strict=True)) < bound


@pytest.mark.gpu
def test_cuda_label_out_of_range_gives_nan() -> None:
    labels = labels_for()
    labels[4] = CLASSES
    losses, *grads = value_and_grads(
        lambda *x: ours(x, labels.cuda(), reduction="none"), [x.cuda() for x in operands()]
    )
    assert losses.isnan().nonzero().flatten().tolist() == [4]
    assert all(grad.isfinite().all() for grad in grads)
