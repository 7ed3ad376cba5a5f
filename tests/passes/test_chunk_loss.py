"""chunk_loss: head, casts, shifts, reductions, scales; sums of losses, z-losses, log-probabilities; and near misses."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moec.compiler.pass_manager import PassContext, Report
from moec.compiler.plan import LossPlan
from moec.passes.chunk_loss import ChunkLoss
from moec.passes.normalize import Normalize

from .support import Call, apply, assert_golden, check, counts, graph_text, reasons, unit_of, what

B, T, D, V = 2, 5, 6, 11
LABELS = torch.tensor([[-100, 3, 4, 10, 0], [-100, -100, 1, 7, 2]])
SUM, PER_ROW = {"linear_cross_entropy_sum": 1}, {"linear_cross_entropy": 1}
OP_SUM = torch.ops.moec.linear_cross_entropy_sum.default
Form = Callable[..., Any]


def _shifted(labels: Tensor) -> Tensor:
    return F.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)


def _hidden(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(5)).to(dtype)


def _weight(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(V, D, generator=torch.Generator().manual_seed(6)).to(dtype)


def _rows(h: Tensor, w: Tensor) -> Tensor:
    return F.linear(h, w).view(-1, V)


def _run(form: Form, bound: float = 1e-6, dtype: torch.dtype = torch.float32) -> tuple[Any, Report]:
    return check(ChunkLoss(), Call(form, w=_weight(dtype)), _hidden(dtype), LABELS, bound=bound)


FORMS: dict[str, tuple[Form, str]] = {
    "mean": (lambda h, y, w: F.cross_entropy(F.linear(h, w).float().view(-1, V), _shifted(y)), "mean, 10"),
    "sum": (
        lambda h, y, w: F.cross_entropy(F.linear(h, w).flatten(0, 1).float(), _shifted(y), reduction="sum") / 7,
        "sum, 10",
    ),
    "per row": (lambda h, y, w: F.cross_entropy(_rows(h, w), _shifted(y), reduction="none"), "per row, 10"),
    "rows": (lambda h, y, w: F.cross_entropy(F.linear(h.reshape(-1, D), w), _shifted(y)), "mean, 10"),
    "matmul": (lambda h, y, w: F.cross_entropy((h @ w.t()).view(-1, V), _shifted(y)), "mean, 10"),
    "cut logits": (
        lambda h, y, w: F.cross_entropy(F.linear(h, w)[:, :-1].reshape(-1, V), y[:, 1:].reshape(-1)),
        "mean, 8",
    ),
    "cut in the last but one": (
        lambda h, y, w: F.cross_entropy(
            F.linear(h, w).float()[..., :-1, :].contiguous().view(-1, V), y[..., 1:].contiguous().view(-1)
        ),
        "mean, 8",
    ),
    "classes second": (lambda h, y, w: F.cross_entropy(F.linear(h, w).transpose(1, 2), y), "mean, 10"),
    "classes second, per row": (
        lambda h, y, w: F.cross_entropy(F.linear(h, w).transpose(1, 2), y, reduction="none").square(),
        "per row, 10",
    ),
    "soft cap": (
        lambda h, y, w: F.cross_entropy((torch.tanh(F.linear(h, w) / 3.0) * 3.0).view(-1, V), _shifted(y)),
        "mean, soft cap 3, 10",
    ),
    "scaled": (
        lambda h, y, w: F.cross_entropy((F.linear(h, w) * 0.25).float().view(-1, V), _shifted(y)),
        "mean, scaled by 0.25, 10",
    ),
    "divided": (
        lambda h, y, w: F.cross_entropy((F.linear(h, w) / 8.0).view(-1, V), _shifted(y)),
        "mean, scaled by 0.125, 10",
    ),
    "scaled and capped": (
        lambda h, y, w: F.cross_entropy((torch.tanh(F.linear(h, w) * 2.0 / 3.0) * 3.0).view(-1, V), _shifted(y)),
        "mean, scaled by 2, soft cap 3, 10",
    ),
    "log softmax": (lambda h, y, w: F.nll_loss(_rows(h, w).log_softmax(-1), _shifted(y)), "mean, 10"),
    "smoothed": (
        lambda h, y, w: F.cross_entropy(_rows(h, w), _shifted(y), label_smoothing=0.1),
        "mean, label smoothing 0.1, 10",
    ),
    "class weights": (
        lambda h, y, w: F.cross_entropy(_rows(h, w), _shifted(y), weight=torch.linspace(0.5, 2, V).to(h.dtype)),
        "mean, class weights, 10",
    ),
    "class weights, smoothed, summed": (
        lambda h, y, w: F.cross_entropy(
            _rows(h, w), _shifted(y), weight=torch.linspace(0.5, 2, V).to(h.dtype), label_smoothing=0.2, reduction="sum"
        ),
        "sum, class weights, label smoothing 0.2, 10",
    ),
}


@pytest.mark.parametrize("name", sorted(FORMS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forms(name: str, dtype: torch.dtype) -> None:
    form, text = FORMS[name]
    unit, report = _run(form, 1e-6 if dtype == torch.float32 else 3e-2, dtype)
    assert what(report) == [f"linear_cross_entropy over 11 classes, {text} x 11 logits at a time"]
    assert counts(unit) == (PER_ROW if "per row" in name else SUM)
    assert _largest(unit) < B * (T - 1) * V, "the logits are still in the graph"


def _largest(unit: Any) -> int:
    return max(n.meta["val"].numel() for n in unit.graph.nodes if isinstance(n.meta.get("val"), Tensor))


def _z(h: Tensor, w: Tensor) -> Tensor:
    return F.linear(h, w).float()


def _plus_z_loss(h: Tensor, y: Tensor, w: Tensor) -> Tensor:
    logits = _z(h, w)
    return F.cross_entropy(logits.view(-1, V), _shifted(y)) + 1e-2 * logits.logsumexp(-1).square().mean()


def _plus_masked_z_loss(h: Tensor, y: Tensor, w: Tensor) -> Tensor:
    logits, labels = _z(h, w).view(-1, V), _shifted(y)
    mask = (labels != -100).float()
    z = (torch.logsumexp(logits, dim=-1) ** 2 * mask).sum() / mask.sum()
    return 3e-3 * z + F.cross_entropy(logits, labels)


def _log_denominator_beside(h: Tensor, y: Tensor, w: Tensor) -> Tensor:
    logits = _z(h, w)
    return F.cross_entropy(logits.view(-1, V), _shifted(y)) + 0.1 * logits.logsumexp(-1, keepdim=True).exp().mean()


def _masked_mean(h: Tensor, y: Tensor, w: Tensor) -> Tensor:
    mask = (torch.arange(B * T) % 3 > 0).float()
    return (F.cross_entropy(_rows(h, w), _shifted(y), reduction="none") * mask).sum() / mask.sum()


def _weighted_per_sequence(h: Tensor, y: Tensor, w: Tensor) -> Tensor:
    losses = F.cross_entropy(_rows(h, w), _shifted(y), reduction="none").view(B, T)
    return 2 * (losses * torch.linspace(1, 0.25, B).unsqueeze(1).expand(B, T)).mean()


def _scaled_by_the_states(h: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Weights of tokens that want a gradient themselves."""
    losses = F.cross_entropy(_rows(h, w), _shifted(y), reduction="none")
    return (losses * h.view(-1, D)[:, 0]).sum()


def _focal(h: Tensor, y: Tensor, w: Tensor) -> Tensor:
    losses = F.cross_entropy(_rows(h, w), _shifted(y), reduction="none")
    return (losses * (1 - (-losses).exp()).square()).sum()


def _focal_detached(h: Tensor, y: Tensor, w: Tensor) -> Tensor:
    losses = F.cross_entropy(_rows(h, w), _shifted(y), reduction="none")
    return (losses * losses.detach()).sum()


def _weighted_z_loss_with_gradient(h: Tensor, y: Tensor, w: Tensor) -> Tensor:
    logits = _z(h, w).view(-1, V)
    z = (logits.logsumexp(-1).square() * h.view(-1, D)[:, 0]).sum()
    return F.cross_entropy(logits, _shifted(y)) + z


@pytest.mark.parametrize(
    ("form", "kept"),
    [
        (_masked_mean, SUM),
        (_weighted_per_sequence, SUM),
        (_scaled_by_the_states, SUM),
        (_plus_z_loss, SUM),
        (_plus_masked_z_loss, SUM),
        (_log_denominator_beside, PER_ROW),
        (_focal, PER_ROW),
        (_focal_detached, PER_ROW),
        (_weighted_z_loss_with_gradient, PER_ROW),
    ],
)
def test_what_is_only_summed_makes_its_gradient_in_the_forward(form: Form, kept: dict[str, int]) -> None:
    unit, report = _run(form)
    assert counts(unit) == kept
    assert _largest(unit) <= V * D
    assert any("gradients in the forward" in text for text in what(report)) == (kept == SUM)


def test_a_z_loss_names_what_it_is() -> None:
    _, report = _run(_plus_z_loss)
    assert what(report) == [
        "linear_cross_entropy over 11 classes, mean, logsumexp, 10 x 11 logits at a time",
        "losses per row, summed, with a z-loss: gradients in the forward",
    ]


PICKED: dict[str, tuple[Form, str]] = {
    "rows": (
        lambda h, y, w: _rows(h, w).log_softmax(-1).gather(1, y.reshape(-1, 1).clamp(min=0)).squeeze(1),
        "token_log_probs over 11 classes, 10 x 11",
    ),
    "temperature": (
        lambda h, y, w: F.log_softmax((F.linear(h, w) / 2).float(), -1).gather(-1, y.clamp(min=0).unsqueeze(-1)),
        "token_log_probs over 11 classes, scaled by 0.5, 10 x 11",
    ),
}


@pytest.mark.parametrize("name", sorted(PICKED))
def test_picked_log_probabilities(name: str) -> None:
    form, text = PICKED[name]
    unit, report = _run(form)
    assert what(report) == [f"{text} logits at a time"]
    assert counts(unit) == {"token_log_probs": 1}


def test_two_classes_per_row_are_no_log_probability_of_a_token() -> None:
    def form(h: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return _rows(h, w).log_softmax(-1).gather(1, y.reshape(-1, 1).clamp(min=0).expand(-1, 2))

    unit, report = _run(form)
    assert not counts(unit)
    assert "it picks more than one class per row" in "\n".join(reasons(report))


def test_golden_text() -> None:
    unit, _ = _run(FORMS["mean"][0])
    assert_golden("linear_cross_entropy", graph_text(unit))


def test_golden_text_of_a_z_loss() -> None:
    unit, _ = _run(_plus_masked_z_loss)
    assert_golden("linear_cross_entropy_z_loss", graph_text(unit))


def test_bias_and_other_ignored_label() -> None:
    def function(h: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w, b).view(-1, V), y.clamp(min=0).view(-1), ignore_index=0)

    unit, _ = check(ChunkLoss(), Call(function, w=_weight(), b=torch.randn(V)), _hidden(), LABELS)
    (node,) = unit.graph.find_nodes(op="call_function", target=OP_SUM)
    assert node.args[5].name == "p_b"
    assert node.args[7] == 0


def test_head_tied_to_the_embedding() -> None:
    def function(ids: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(F.embedding(ids, w), w).view(-1, V), _shifted(ids))

    unit, _ = check(ChunkLoss(), Call(function, w=_weight()), LABELS.clamp(min=1))
    assert counts(unit) == SUM


def test_no_valid_label_gives_what_torch_gives() -> None:
    unit = unit_of(Call(FORMS["mean"][0], w=_weight()), _hidden(), LABELS)
    apply([Normalize(), ChunkLoss()], unit)
    assert torch.isnan(unit.module(_weight(), _hidden(), torch.full_like(LABELS, -100))[0])


@pytest.mark.parametrize(
    ("plan", "sizes"),
    [
        (LossPlan(rows=3), (3, V)),
        (LossPlan(columns=4), (10, 4)),
        (LossPlan(memory="160B"), (6, 6)),
        (LossPlan(rows=2, columns=5), (2, 5)),
    ],
)
def test_the_plan_says_how_many_logits_exist_at_a_time(plan: LossPlan, sizes: tuple[int, int]) -> None:
    unit = unit_of(Call(FORMS["mean"][0], w=_weight()), _hidden(), LABELS)
    apply([Normalize()], unit)
    ChunkLoss().run(unit, PassContext(plan=SimpleNamespace(loss=plan)))
    (node,) = unit.graph.find_nodes(op="call_function", target=OP_SUM)
    assert node.args[11:13] == sizes


@pytest.mark.parametrize(("train_hidden", "train_weight"), [(True, True), (True, False), (False, True)])
def test_only_gradients_that_something_wants_are_made(train_hidden: bool, train_weight: bool) -> None:
    def function(ids: Tensor, y: Tensor, w: Tensor, table: Tensor) -> Tensor:
        return FORMS["mean"][0](F.embedding(ids, table), y, w)

    module = Call(function, w=_weight(), table=_weight())
    module.w.requires_grad_(train_weight)
    module.table.requires_grad_(train_hidden)
    unit = unit_of(module, LABELS.clamp(min=0), LABELS)
    apply([Normalize(), ChunkLoss()], unit)
    (node,) = unit.graph.find_nodes(op="call_function", target=OP_SUM)
    assert node.args[13:15] == (train_hidden, train_weight)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            lambda h, y, w: (z := F.linear(h, w), F.cross_entropy(z.view(-1, V), _shifted(y)) + z.mean())[1],
            "is used outside the pattern too",
        ),
        (
            lambda h, y, w: (
                z := F.linear(h, w),
                F.cross_entropy(z[:, :-1].reshape(-1, V), y[:, 1:].reshape(-1)) + z.logsumexp(-1).mean(),
            )[1],
            "is used outside the pattern too",
        ),
        (
            lambda h, y, w: F.cross_entropy(F.linear(h, w).view(-1, V), torch.eye(V)[_shifted(y).clamp(min=0)]),
            "the labels are not one class per row",
        ),
        (
            lambda h, y, w: F.cross_entropy(F.linear(h, w).half().float().view(-1, V), _shifted(y)),
            "the logits are cast to torch.float16",
        ),
        (
            lambda h, y, w: F.cross_entropy(F.linear(h, w).view(-1, V, 1).squeeze(-1) + 1, _shifted(y)),
            "found add",
        ),
        (
            lambda h, y, w: F.cross_entropy(h.view(-1, D) + w[0], _shifted(y).clamp(max=5)),
            "expected one of aten._unsafe_view.default, aten.div.Tensor, aten.flatten.using_ints, aten.linear.default",
        ),
    ],
)
def test_near_misses(function: Form, reason: str) -> None:
    unit, report = check(ChunkLoss(), Call(function, w=_weight()), _hidden(), LABELS, exact=True)
    assert reason in "\n".join(reasons(report))
    assert not counts(unit)
    assert ChunkLoss().expected(unit) == "the graph has a cross entropy, whose logits stay whole"
