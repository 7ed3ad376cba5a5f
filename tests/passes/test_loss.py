"""recognize_loss: head, casts, shifts, reductions, soft cap; and forms that keep their logits."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moec.compiler.pass_manager import PassContext
from moec.passes.normalize import Normalize
from moec.passes.recognize_loss import RecognizeLoss

from .support import Call, apply, assert_golden, check, counts, graph_text, reasons, unit_of, what

B, T, D, V = 2, 5, 6, 11
LABELS = torch.tensor([[-100, 3, 4, 10, 0], [-100, -100, 1, 7, 2]])


def _shifted(labels: Tensor) -> Tensor:
    return F.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)


def _hidden(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(5)).to(dtype)


def _weight(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(V, D, generator=torch.Generator().manual_seed(6)).to(dtype)


FORMS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], str]] = {
    "mean": (lambda h, y, w: F.cross_entropy(F.linear(h, w).float().view(-1, V), _shifted(y)), "mean"),
    "sum": (
        lambda h, y, w: F.cross_entropy(F.linear(h, w).flatten(0, 1).float(), _shifted(y), reduction="sum") / 7,
        "sum",
    ),
    "per row": (lambda h, y, w: F.cross_entropy(F.linear(h, w).view(-1, V), _shifted(y), reduction="none"), "per row"),
    "rows": (lambda h, y, w: F.cross_entropy(F.linear(h.reshape(-1, D), w), _shifted(y)), "mean"),
    "cut logits": (
        lambda h, y, w: F.cross_entropy(F.linear(h, w)[:, :-1].reshape(-1, V), y[:, 1:].reshape(-1)),
        "mean",
    ),
    "soft cap": (
        lambda h, y, w: F.cross_entropy((torch.tanh(F.linear(h, w) / 3.0) * 3.0).view(-1, V), _shifted(y)),
        "mean, soft cap 3",
    ),
    "log softmax": (lambda h, y, w: F.nll_loss(F.linear(h, w).view(-1, V).log_softmax(-1), _shifted(y)), "mean"),
}


@pytest.mark.parametrize("name", sorted(FORMS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forms(name: str, dtype: torch.dtype) -> None:
    form, text = FORMS[name]
    bound = 1e-6 if dtype == torch.float32 else 3e-2
    unit, report = check(RecognizeLoss(), Call(form, w=_weight(dtype)), _hidden(dtype), LABELS, bound=bound)
    assert what(report) == [f"linear_cross_entropy over 11 classes, {text}, 4096 rows at a time"]
    assert counts(unit) == {"linear_cross_entropy": 1}
    largest = max(n.meta["val"].numel() for n in unit.graph.nodes if isinstance(n.meta.get("val"), Tensor))
    assert largest < B * (T - 1) * V, "the logits are still in the graph"


def test_golden_text() -> None:
    unit, _ = check(RecognizeLoss(), Call(FORMS["mean"][0], w=_weight()), _hidden(), LABELS)
    assert_golden("linear_cross_entropy", graph_text(unit))


def test_bias_and_other_ignored_label() -> None:
    def function(h: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w, b).view(-1, V), y.clamp(min=0).view(-1), ignore_index=0)

    unit, _ = check(RecognizeLoss(), Call(function, w=_weight(), b=torch.randn(V)), _hidden(), LABELS)
    (node,) = unit.graph.find_nodes(op="call_function", target=torch.ops.moec.linear_cross_entropy.default)
    assert node.args[3].name == "p_b"
    assert node.args[4] == 0


def test_head_tied_to_the_embedding() -> None:
    def function(ids: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(F.embedding(ids, w), w).view(-1, V), _shifted(ids))

    unit, _ = check(RecognizeLoss(), Call(function, w=_weight()), LABELS.clamp(min=1))
    assert counts(unit) == {"linear_cross_entropy": 1}


def test_no_valid_label_gives_what_torch_gives() -> None:
    unit = unit_of(Call(FORMS["mean"][0], w=_weight()), _hidden(), LABELS)
    apply([Normalize(), RecognizeLoss()], unit)
    assert torch.isnan(unit.module(_weight(), _hidden(), torch.full_like(LABELS, -100))[0])


def test_the_plan_says_how_many_rows_exist_at_a_time() -> None:
    unit = unit_of(Call(FORMS["mean"][0], w=_weight()), _hidden(), LABELS)
    apply([Normalize()], unit)
    RecognizeLoss().run(unit, PassContext(plan=SimpleNamespace(loss_chunk=3)))
    (node,) = unit.graph.find_nodes(op="call_function", target=torch.ops.moec.linear_cross_entropy.default)
    assert node.args[6] == 3


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda h, y, w: F.cross_entropy(F.linear(h, w).view(-1, V), _shifted(y), label_smoothing=0.1), "smoothing is"),
        (
            lambda h, y, w: F.cross_entropy(F.linear(h, w).view(-1, V), _shifted(y), weight=torch.ones(V)),
            "are weighted",
        ),
        (
            lambda h, y, w: (z := F.linear(h, w), F.cross_entropy(z.view(-1, V), _shifted(y)) + z.mean())[1],
            "is used outside the pattern too",
        ),
        (
            lambda h, y, w: F.cross_entropy(F.linear(h, w).view(-1, V), torch.eye(V)[_shifted(y).clamp(min=0)]),
            "the labels are not one class per row",
        ),
        (
            lambda h, y, w: F.cross_entropy(F.linear(h, w).transpose(1, 2), y),
            "found transpose (aten.transpose.int",
        ),
        (
            lambda h, y, w: F.cross_entropy(h.view(-1, D) + w[0], _shifted(y).clamp(max=5)),
            "expected one of aten._unsafe_view.default, aten.flatten.using_ints, aten.linear.default",
        ),
    ],
)
def test_near_misses(function: Callable[[Tensor, Tensor, Tensor], Tensor], reason: str) -> None:
    unit, report = check(RecognizeLoss(), Call(function, w=_weight()), _hidden(), LABELS, exact=True)
    assert reason in "\n".join(reasons(report))
    assert not counts(unit)
    assert RecognizeLoss().expected(unit) == "the graph has a cross entropy, whose logits stay whole"
