"""route against a loop over tokens in Python; quantile balancing against exact quantiles and by simulation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moec.compiler import dialect
from tests.dialect.checks import assert_close, poisoned_memory, relative_error, value_and_grads
from tests.dialect.contract import check_layouts

# (score, softmax_after_topk)
SCORES = [("sigmoid", False), ("softmax", False), ("softmax", True)]
CONFIGURATIONS = [
    {"score": score, "softmax_after_topk": after, "renormalize": renormalize, "scale": 2.5, **groups}
    for score, after in SCORES
    for renormalize in (False, True)
    for groups in ({}, {"groups": 3, "top_groups": 2})
]


def logits_and_bias(tokens: int, experts: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=generator, dtype=torch.float64) * 2
    return logits, torch.randn(experts, generator=generator, dtype=torch.float64) * 0.3


def by_hand(
    logits: list[float],
    bias: list[float] | None,
    top_k: int,
    score: str,
    softmax_after_topk: bool,
    renormalize: bool,
    scale: float,
    groups: int = 1,
    top_groups: int = 1,
) -> dict[int, float]:
    """Chosen expert -> weight for one token."""
    experts = range(len(logits))

    def softmax(values: list[float]) -> list[float]:
        total = sum(math.exp(value) for value in values)
        return [math.exp(value) / total for value in values]

    if softmax_after_topk:
        scores = logits
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits] if score == "sigmoid" else softmax(logits)
    choice = scores if bias is None else [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(logits) // groups
    strength = [
        sum(sorted(choice[g * size : (g + 1) * size], reverse=True)[: 1 if bias is None else 2]) for g in range(groups)
    ]
    kept = sorted(range(groups), key=lambda g: -strength[g])[:top_groups]
    chosen = sorted((e for e in experts if e // size in kept), key=lambda e: -choice[e])[:top_k]
    weights = [scores[e] for e in chosen]
    if softmax_after_topk:
        weights = softmax(weights)
    if renormalize:
        weights = [weight / sum(weights) for weight in weights]
    return dict(zip(chosen, (weight * scale for weight in weights), strict=True))


@pytest.mark.parametrize("options", CONFIGURATIONS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("top_k", [1, 3])
def test_equals_a_loop_over_tokens(options: dict[str, Any], with_bias: bool, top_k: int) -> None:
    logits, bias = logits_and_bias(20, 9)
    weights, indices = dialect.route(logits, bias if with_bias else None, top_k=top_k, **options)
    assert (weights.dtype, indices.dtype) == (torch.float64, torch.int64)
    for row in range(len(logits)):
        expected = by_hand(logits[row].tolist(), bias.tolist() if with_bias else None, top_k, **options)
        assert indices[row].tolist() == list(expected)
        assert weights[row].tolist() == pytest.approx(list(expected.values()), rel=1e-12)


@pytest.mark.parametrize("options", CONFIGURATIONS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_gradients(options: dict[str, Any], with_bias: bool) -> None:
    logits, bias = logits_and_bias(4, 6)
    chosen = bias if with_bias else None
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: dialect.route(x, chosen, top_k=2, **options)[0], (logits,))


@pytest.mark.parametrize(("score", "after"), SCORES)
def test_opcheck(score: str, after: bool) -> None:
    logits, bias = logits_and_bias(5, 6)
    weights, indices = dialect.route(logits, bias, top_k=2, score=score, softmax_after_topk=after)
    backward = torch.ops.moec.route_backward.default
    torch.library.opcheck(backward, (weights, logits, indices, score, after, True, 1.0, 1e-20))
    logits = logits.clone().requires_grad_()
    torch.library.opcheck(torch.ops.moec.route.default, (logits, bias, 2, score, after, True, 1.0, 3, 2, 1e-20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("level", [-60.0, 60.0, -1e4])
@pytest.mark.parametrize(("score", "after"), SCORES)
def test_extreme_logits_stay_finite(score: str, after: bool, level: float, dtype: torch.dtype) -> None:
    logits = torch.full((3, 8), level, dtype=dtype, requires_grad=True)
    weights, indices = dialect.route(logits, torch.zeros(8), top_k=2, score=score, softmax_after_topk=after)
    weights.sum().backward()
    assert weights.isfinite().all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    sigmoid = 1 / (1 + math.exp(min(-level, 700)))
    expected = sigmoid / (2 * sigmoid + 1e-20) if score == "sigmoid" else 0.5
    torch.testing.assert_close(weights, torch.full_like(weights, expected))
    assert all(len(set(row)) == 2 for row in indices.tolist())


def test_bias_changes_the_choice_and_not_the_weights() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64)
    bias = torch.tensor([0.0, -1.0, 0.5], dtype=torch.float64)
    weights, indices = dialect.route(logits, bias, top_k=2, score="sigmoid", renormalize=False)
    assert sorted(indices[0].tolist()) == [0, 2]
    assert_close([weights[0]], [logits.sigmoid()[0, indices[0]]])


def test_a_constant_added_to_the_bias_changes_nothing() -> None:
    logits, bias = logits_and_bias(50, 12)
    for options in ({}, {"groups": 4, "top_groups": 2}):
        a = dialect.route(logits, bias, top_k=3, score="sigmoid", **options)
        b = dialect.route(logits, bias - 7, top_k=3, score="sigmoid", **options)
        assert a[1].equal(b[1])
        assert_close([a[0]], [b[0]])


def test_excluded_groups_are_not_chosen_even_with_a_very_negative_bias() -> None:
    logits, bias = logits_and_bias(50, 12)
    _, indices = dialect.route(logits, bias - 5, top_k=6, score="sigmoid", groups=4, top_groups=2)
    assert all(len({expert // 3 for expert in row}) == 2 for row in indices.tolist())


def test_all_experts_may_be_chosen_and_ties_are_distinct() -> None:
    logits, bias = logits_and_bias(7, 6)
    _, indices = dialect.route(logits, bias, top_k=6, score="softmax")
    assert indices.sort(-1).values.eq(torch.arange(6)).all()
    _, indices = dialect.route(torch.zeros(7, 6), None, top_k=4, score="softmax")
    assert all(len(set(row)) == 4 for row in indices.tolist())


def test_no_tokens_and_one_expert() -> None:
    logits = torch.randn(0, 6, requires_grad=True)
    weights, indices = dialect.route(logits, None, top_k=2, score="sigmoid")
    weights.sum().backward()
    assert weights.shape == indices.shape == (0, 2)
    assert logits.grad is not None
    assert logits.grad.shape == (0, 6)
    weights, indices = dialect.route(torch.randn(4, 1), None, top_k=1, score="sigmoid")
    assert_close([weights, indices], [torch.ones(4, 1), torch.zeros(4, 1)], 1e-6)


def test_low_precision_is_computed_in_float32() -> None:
    logits = logits_and_bias(30, 8)[0].bfloat16()
    weights, indices = dialect.route(logits, None, top_k=3, score="sigmoid")
    exact, same = dialect.route(logits.float(), None, top_k=3, score="sigmoid")
    assert weights.dtype == torch.bfloat16
    assert indices.equal(same)
    assert weights.equal(exact.bfloat16())


@pytest.mark.parametrize(("score", "after"), SCORES)
def test_layouts_and_poisoned_memory(score: str, after: bool) -> None:
    logits, bias = logits_and_bias(11, 6)

    def run(x: Tensor) -> Tensor:
        return dialect.route(x, bias, top_k=2, score=score, softmax_after_topk=after)[0]

    check_layouts(run, [logits.clone().requires_grad_()])
    expected = value_and_grads(run, [logits])
    with poisoned_memory():
        assert_close(value_and_grads(run, [logits]), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": "tanh", "top_k": 2}, "score='tanh'"),
        ({"score": "sigmoid", "softmax_after_topk": True, "top_k": 2}, "needs score='softmax'"),
        ({"score": "sigmoid", "top_k": 7}, "top_k=7 of the 6"),
        ({"score": "sigmoid", "top_k": 0}, "top_k=0"),
        ({"score": "sigmoid", "top_k": 2, "groups": 4}, "groups=4"),
        ({"score": "sigmoid", "top_k": 2, "groups": 2, "top_groups": 3}, "top_groups=3"),
        ({"score": "sigmoid", "top_k": 4, "groups": 2, "top_groups": 1}, "top_k=4 of the 3"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dialect.route(torch.zeros(3, 6), None, **options)


@given(
    tokens=st.integers(1, 6),
    size=st.integers(1, 4),
    groups=st.integers(1, 4),
    data=st.data(),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_any_shape(tokens: int, size: int, groups: int, data: st.DataObject, seed: int) -> None:
    top_groups = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, size * top_groups))
    score, after = data.draw(st.sampled_from(SCORES))
    options: dict[str, Any] = {
        "score": score,
        "softmax_after_topk": after,
        "renormalize": data.draw(st.booleans()),
        "scale": 1.5,
        "groups": groups,
        "top_groups": top_groups,
    }
    logits, bias = logits_and_bias(tokens, size * groups, seed)
    weights, indices = dialect.route(logits, bias, top_k=top_k, **options)
    for row in range(tokens):
        expected = by_hand(logits[row].tolist(), bias.tolist(), top_k, **options)
        assert dict(zip(indices[row].tolist(), weights[row].tolist(), strict=True)) == pytest.approx(expected)


# Quantile balancing


def exact_quantiles(logits: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """Per expert, the ceil(N k / E)-th smallest alpha_i - s_ij."""
    tokens, experts = logits.shape
    scores = logits.sigmoid()
    alpha = (scores + bias).sort(descending=True).values[:, top_k]
    return (alpha[:, None] - scores).sort(0).values[math.ceil(tokens * top_k / experts) - 1]


def load(logits: Tensor, bias: Tensor, top_k: int) -> float:
    """Most loaded expert over the mean."""
    _, indices = dialect.route(logits, bias, top_k=top_k, score="sigmoid")
    counts = torch.bincount(indices.flatten(), minlength=logits.shape[1]).double()
    return float(counts.max() / counts.mean())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bins", [50, 1000])
def test_histogram_gives_the_exact_quantile_within_a_bin(bins: int, seed: int) -> None:
    logits, bias = logits_and_bias(501, 12, seed)
    histogram = dialect.route_histogram(logits, bias, top_k=3, bins=bins)
    assert histogram.dtype == torch.int64
    assert histogram.sum(1).eq(501).all()
    found = dialect.balanced_bias(bias, histogram, 3)
    assert abs(float(found.mean())) < 1e-12
    difference = found - exact_quantiles(logits, bias, 3)
    width = float(bias.max() - bias.min() + 2) / bins
    # Centring shifts all experts alike, so the spread counts.
    assert float(difference.max() - difference.min()) / 2 <= width * (1 + 1e-9)


def test_every_difference_is_inside_the_range() -> None:
    logits = torch.tensor([[40.0, -40.0, 0.0], [-40.0, 40.0, 40.0]], dtype=torch.float64)
    bias = torch.tensor([-3.0, 0.0, 5.0], dtype=torch.float64)
    for top_k in (1, 2, 3):
        assert dialect.route_histogram(logits, bias, top_k=top_k, bins=7).sum(1).eq(2).all()


def test_counts_do_not_depend_on_the_microbatches() -> None:
    logits, bias = logits_and_bias(300, 10)
    whole = dialect.route_histogram(logits, bias, top_k=2)
    parts = sum(dialect.route_histogram(part, bias, top_k=2) for part in logits.split([1, 120, 0, 179]))
    assert whole.equal(torch.as_tensor(parts))


@pytest.mark.parametrize(("experts", "top_k"), [(16, 2), (64, 8)])
def test_balance_converges_from_a_skewed_start(experts: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(0)
    skew = torch.linspace(-2, 2, experts)
    logits = torch.randn(8192, experts, generator=generator) + skew
    bias = torch.zeros(experts)
    assert load(logits, bias, top_k) > 3
    for _ in range(6):
        bias = dialect.balanced_bias(bias, dialect.route_histogram(logits, bias, top_k=top_k), top_k)
    assert load(logits, bias, top_k) <= 1.05
    fresh = torch.randn(8192, experts, generator=generator) + skew
    assert load(fresh, bias, top_k) <= 1.15


def test_bias_is_kept_without_tokens_and_in_its_dtype() -> None:
    bias = torch.tensor([0.5, -0.25, 1.0])
    assert dialect.balanced_bias(bias, torch.zeros(3, 20, dtype=torch.int64), 1).equal(bias)
    histogram = dialect.route_histogram(torch.randn(9, 3), bias, top_k=1)
    assert dialect.balanced_bias(bias.bfloat16(), histogram, 1).dtype == torch.bfloat16


def test_equal_scores_keep_the_bias_equal() -> None:
    found = dialect.balanced_bias(
        torch.zeros(4), dialect.route_histogram(torch.zeros(10, 4), torch.zeros(4), top_k=2), 2
    )
    assert found.abs().max() < 1e-6


def test_histogram_opcheck() -> None:
    torch.library.opcheck(torch.ops.moec.route_histogram.default, (*logits_and_bias(5, 6), 2, 16))


def test_costs_and_recompute() -> None:
    logits, bias = logits_and_bias(7, 6)
    route, histogram = dialect.DEFINITIONS["route"], dialect.DEFINITIONS["route_histogram"]
    arguments = (logits, bias, 2, "sigmoid", False, True, 1.0, 1, 1, 1e-20)
    assert route.flops_of(arguments, {}) == 7 * (5 * 6 + 3 * 2)
    assert route.backward_flops_of(arguments, {}) == 7 * 5 * 6
    assert histogram.flops_of((logits, bias, 2, 100), {}) == 8 * 7 * 6
    assert not route.recompute
    assert not histogram.recompute


def test_exports_with_a_symbolic_number_of_tokens() -> None:
    class Router(torch.nn.Module):
        def forward(self, logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            weights, indices = dialect.route(logits, bias, top_k=2, score="sigmoid")
            return weights, indices, dialect.route_histogram(logits, bias, top_k=2)

    tokens = torch.export.Dim("tokens", min=2)
    program = torch.export.export(Router(), logits_and_bias(8, 6), dynamic_shapes=({0: tokens}, {}), strict=False)
    longer = logits_and_bias(13, 6, seed=1)
    assert_close(program.module()(*longer), Router()(*longer))


@pytest.mark.gpu
def test_cuda_equals_cpu() -> None:
    logits, bias = logits_and_bias(200, 12)

    def run(x: Tensor, device: str, **options: Any) -> list[Tensor]:
        found = dialect.route(x.to(device), bias.to(device), top_k=3, groups=4, top_groups=2, **options)
        return [value.cpu() for value in found]

    for score, after in SCORES:
        options = {"score": score, "softmax_after_topk": after}
        assert run(logits, "cuda", **options)[1].equal(run(logits, "cpu", **options)[1])
        cpu, gpu = (
            value_and_grads(lambda x, d=device, o=options: run(x, d, **o)[0], [logits]) for device in ("cpu", "cuda")
        )
        assert max(relative_error(a, b) for a, b in zip(gpu, cpu, strict=True)) < 1e-12
    histogram = dialect.route_histogram(logits, bias, top_k=3)
    on_gpu = dialect.route_histogram(logits.cuda(), bias.cuda(), top_k=3)
    assert on_gpu.cpu().equal(histogram)
    balanced = dialect.balanced_bias(bias, histogram, 3)
    assert relative_error(dialect.balanced_bias(bias.cuda(), on_gpu, 3).cpu(), balanced) < 1e-12
