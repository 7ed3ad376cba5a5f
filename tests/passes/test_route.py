"""recognize_route: scores, bias, groups, renormalisation, scale, softmax before and after top-k."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from moec.passes.recognize_route import RecognizeRoute

from .support import Call, apply, assert_golden, check, counts, graph_text, reasons, unit_of, what

N, E = 9, 8
Routed = tuple[Tensor, Tensor]


def _by_expert(weights: Tensor, indices: Tensor) -> Routed:
    """In the order of the experts, since topk(sorted=False) promises none."""
    order = indices.argsort(dim=-1)
    return weights.gather(1, order), indices.gather(1, order)


def _logits(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(N, E, generator=torch.Generator().manual_seed(3)).to(dtype)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(["sigmoid", "softmax"]),
    st.booleans(),
    st.sampled_from([None, 0.0, 1e-20]),
    st.sampled_from([1.0, 2.5]),
    st.booleans(),
)
def test_every_router(score: str, biased: bool, eps: float | None, scale: float, inplace: bool) -> None:
    def function(logits: Tensor, bias: Tensor) -> Routed:
        scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)
        indices = (scores + bias if biased else scores).topk(2, dim=-1, sorted=False).indices
        weights = scores.gather(1, indices)
        if eps is not None:
            total = weights.sum(-1, keepdim=True)
            total = total + eps if eps else total
            weights = weights.div_(total) if inplace else weights / total
        return _by_expert(weights * scale, indices)

    bias = torch.linspace(-0.3, 0.3, E)
    unit, report = check(RecognizeRoute(), Call(function), _logits(), bias, bound=2e-6)
    assert counts(unit) == {"route": 1}
    (node,) = unit.graph.find_nodes(op="call_function", target=torch.ops.moec.route.default)
    assert node.args[2:] == (2, score, False, eps is not None, scale, 1, 1, eps or 0.0)
    assert (node.args[1] is not None) == biased
    assert not report.near_misses
    assert not unit.graph.find_nodes(op="call_function", target=torch.ops.aten.topk.default)


def _mixtral(logits: Tensor) -> Routed:
    weights, indices = logits.float().softmax(-1).topk(2)
    weights /= weights.sum(-1, keepdim=True)
    return weights, indices


def _gpt_oss(logits: Tensor) -> Routed:
    values, indices = logits.topk(2, dim=-1)
    return F.softmax(values, dim=1, dtype=torch.float32), indices


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("function", "text"),
    [(_mixtral, "route top 2 of 8, softmax, renormalised"), (_gpt_oss, "route top 2 of 8, softmax after top-k")],
)
def test_values_of_topk_as_weights(function: Callable[[Tensor], Routed], text: str, dtype: torch.dtype) -> None:
    bound = 1e-6 if dtype == torch.float32 else 2e-2
    unit, report = check(RecognizeRoute(), Call(function), _logits(dtype), bound=bound)
    assert what(report) == [text]
    assert counts(unit) == {"route": 1}


def test_golden_text() -> None:
    unit, _ = check(RecognizeRoute(), Call(_mixtral), _logits())
    assert_golden("route", graph_text(unit))


def _grouped(logits: Tensor, bias: Tensor | None, groups: int, hidden: float, best: int) -> Routed:
    scores = logits.sigmoid()
    choice = scores if bias is None else scores + bias
    grouped = choice.view(-1, groups, E // groups)
    rank = grouped.topk(best, dim=-1)[0].sum(-1) if best > 1 else grouped.amax(-1)
    kept = torch.zeros_like(rank).scatter_(1, rank.topk(2, dim=-1, sorted=False)[1], 1)
    mask = kept.unsqueeze(-1).expand(-1, groups, E // groups).reshape(-1, E)
    indices = choice.masked_fill(~mask.bool(), hidden).topk(3, dim=-1, sorted=False)[1]
    weights = scores.gather(1, indices)
    return _by_expert(weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, indices)


@pytest.mark.parametrize("biased", [True, False])
def test_groups(biased: bool) -> None:
    bias = torch.linspace(-0.2, 0.2, E)

    def function(logits: Tensor) -> Routed:
        return _grouped(logits, bias if biased else None, 4, float("-inf"), 2 if biased else 1)

    module = Call(function) if not biased else Call(lambda x, b: _grouped(x, b, 4, float("-inf"), 2))
    args = (_logits(), bias) if biased else (_logits(),)
    unit, report = check(RecognizeRoute(), module, *args, bound=2e-6)
    assert counts(unit) == {"route": 1}
    assert "2 of 4 groups" in what(report)[0]
    assert not unit.graph.find_nodes(op="call_function", target=torch.ops.aten.scatter.value)


def _selected_values(choice: Tensor, factor: Tensor | float = 1.0) -> Routed:
    values, indices = choice.topk(2)
    return values * 2 * factor, indices


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, b: _grouped(x, b, 4, 0.0, 2), "experts of other groups score 0.0, not minus infinity"),
        (lambda x, b: _grouped(x, b, 4, float("-inf"), 1), "not ranked by the sum of their two best scores"),
        (lambda x, b: _grouped(x + b, None, 4, float("-inf"), 2), "not ranked by their best score"),
        (lambda x, b: _selected_values(x.sigmoid() + b), "the weights are the values it selects by, with bias"),
        (lambda x, b: _selected_values(y := x.sigmoid(), y.sum()), "is used outside the pattern too"),
        (lambda x, b: _selected_values(x[None].softmax(-1)), "the logits are not [tokens, experts]"),
        (lambda x, b: (x.sigmoid().topk(2)[1] + 1, b), "the weights are not the scores of the chosen experts"),
    ],
)
def test_near_misses(function: Callable[[Tensor, Tensor], Routed], reason: str) -> None:
    unit, report = check(RecognizeRoute(), Call(function), _logits(), torch.linspace(-0.2, 0.2, E), exact=True)
    assert reason in "\n".join(reasons(report))
    assert not counts(unit)


def test_the_warning_needs_experts_without_a_router() -> None:
    def function(x: Tensor, indices: Tensor) -> Tensor:
        return torch.ops.moec.permute(x, indices, E)[0]

    unit = unit_of(Call(function), torch.randn(N, 4), torch.zeros(N, 2, dtype=torch.int64))
    apply([], unit)
    assert RecognizeRoute().expected(unit) == "experts are permuted, but no router was recognised"
    assert RecognizeRoute().expected(unit_of(Call(lambda x: x * 2), torch.randn(2))) == ""
