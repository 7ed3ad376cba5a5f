"""token_log_probs against log_softmax and gather of whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moec.compiler import dialect
from tests.dialect.checks import assert_close, value_and_grads
from tests.dialect.contract import assert_as_accurate, check_op
from tests.dialect.loss_cases import CLASSES, ROWS, WIDTH, eager_logits, labels_for, operands


def eager(inputs: Any, labels: Tensor, **form: Any) -> Tensor:
    picked = eager_logits(inputs, **form).log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return picked.masked_fill(labels == -100, 0)


def ours(inputs: Any, labels: Tensor, **options: Any) -> Tensor:
    return dialect.token_log_probs(inputs[0], inputs[1], labels, *inputs[2:], **options)


@pytest.mark.parametrize("chunk", [(100, 100), (2, 100), (3, 4)], ids=str)
@pytest.mark.parametrize("form", [{}, {"logit_scale": 0.4}, {"softcap": 1.5}], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_equals_log_softmax_and_gather_with_gradients(
    bias: bool, form: dict[str, float], chunk: tuple[int, int]
) -> None:
    inputs, labels = operands(bias=bias), labels_for()
    found = value_and_grads(lambda *x: ours(x, labels, rows=chunk[0], columns=chunk[1], **form), inputs)
    assert_close(found, value_and_grads(lambda *x: eager(x, labels, **form), inputs))
    assert found[0][labels == -100].eq(0).all()


def test_leading_dimensions_stay() -> None:
    hidden, weight = operands(12)
    labels = labels_for(12).view(3, 4)
    found = value_and_grads(lambda h, w: ours([h.view(3, 4, WIDTH), w], labels), [hidden, weight])
    assert_close(found, value_and_grads(lambda h, w: eager([h.view(3, 4, WIDTH), w], labels), [hidden, weight]))


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"hidden \(7, 5\) and labels \(6,\) differ"):
        ours(operands(), labels_for(6))


def test_a_label_out_of_range_is_named() -> None:
    labels = labels_for()
    labels[2] = CLASSES
    with pytest.raises(IndexError, match=f"label {CLASSES} is outside"):
        ours(operands(), labels)


@pytest.mark.parametrize("columns", [6, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_contract(bias: bool, columns: int) -> None:
    hidden, weight, *rest = (x.requires_grad_() for x in operands(4, 6, bias))
    labels = torch.tensor([0, -100, 5, 2])
    check_op("token_log_probs", (hidden, weight, labels, rest[0] if rest else None, -100, 0.5, 2.0, 3, columns))


def test_is_as_accurate_as_eager_in_bfloat16() -> None:
    labels, inputs = labels_for(64, 40), [x.bfloat16().requires_grad_() for x in operands(64, 40)]
    assert_as_accurate(lambda *x: ours(x, labels, rows=16), lambda *x: eager(x, labels), inputs)


def test_a_preference_loss() -> None:
    """The direct preference loss: log-probabilities of two answers, summed per answer, against those of a reference."""
    rows, classes = 40, 100
    labels, reference = labels_for(rows, classes), torch.randn(4, generator=torch.Generator().manual_seed(3))

    def preference(log_probs: Tensor) -> Tensor:
        margin = log_probs.view(4, -1).sum(1) - reference
        return -torch.nn.functional.logsigmoid(0.1 * (margin[:2] - margin[2:])).mean()

    inputs = operands(rows, classes)
    found = value_and_grads(lambda *x: preference(ours(x, labels, rows=20)), inputs)
    assert_close(found, value_and_grads(lambda *x: preference(eager(x, labels)), inputs))


def test_costs() -> None:
    definition = dialect.DEFINITIONS["token_log_probs"]
    arguments = (*operands(), labels_for(), None, -100, 1.0, 0.0, 4, 11)
    assert definition.flops_of(arguments, {}) == 2 * ROWS * CLASSES * WIDTH
    assert definition.backward_flops_of(arguments, {}) == 6 * ROWS * CLASSES * WIDTH
