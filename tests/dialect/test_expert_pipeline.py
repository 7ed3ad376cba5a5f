"""expert_slots, expert_up and expert_down: the same layer as permute, grouped_linear and unpermute, cut elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from moec.compiler import dialect
from moec.compiler.dialect import DEFINITIONS
from moec.compiler.expression import parse
from tests.dialect.checks import assert_close, poisoned_memory, value_and_grads
from tests.dialect.contract import assert_as_accurate, backward_args, check_gradients, check_layouts, check_op
from tests.dialect.test_experts import choices, ends, normal

SWIGLU = "gate, up: silu(gate) * up"
RELU2 = "x: (t := relu(x)) * t"
CLAMPED = "gate, up: (t := clamp_max(gate, 1.0)) * sigmoid(1.7 * t) * (clamp_min(clamp_max(up, 1.0), -1.0) + 1.0)"
SHIFTED = "x: exp(-x * x) + 2.0"
"""Not zero at zero: what padding must not show."""

E, K, N, D, I = 4, 2, 7, 5, 3  # noqa: E741


def operands(
    activation: str, bias: bool = False, transposed: bool = False, rows: int = N, experts: int = E
) -> list[Tensor]:
    """x, first matrices, second matrices, and biases or not."""
    parts = len(parse(activation).inputs)
    shapes = [(experts, parts * I, D), (experts, D, I)]
    matrices = [normal(e, *((b, a) if transposed else (a, b)), seed=1) / 2 for e, a, b in shapes]
    biases = [normal(experts, parts * I, seed=2), normal(experts, D, seed=3)] if bias else []
    return [normal(rows, D), *matrices, *biases]


WEIGHED = ("after", "before", "tokens")
"""Where router weights act: on the sum, before the second matrix, on the tokens."""


def layer(
    inputs: Sequence[Tensor], weights: Tensor, indices: Tensor, activation: str, weigh: str = "after", **layout: bool
) -> Tensor:
    """The whole layer in the ops of the pipeline."""
    x, first, second, *biases = inputs
    one, two = biases or (None, None)
    experts = first.shape[0]
    order, position, offsets = dialect.expert_slots(indices, experts=experts)
    given: dict[str, Any] = {"activation": activation, "order": order, "position": position, **layout}
    up = {"before": {"act_weights": weights}, "tokens": {"token_weights": weights}}.get(weigh, {})
    pre, act = dialect.expert_up(x, first, offsets, one, choices=indices.shape[1], **up, **given)
    outer = torch.ones_like(weights) if weigh == "tokens" else weights
    return dialect.expert_down(pre, act, second, offsets, two, weights=outer, before=weigh == "before", **given)


def by_hand(
    inputs: Sequence[Tensor], weights: Tensor, indices: Tensor, activation: str, weigh: str = "after", **layout: bool
) -> Tensor:
    """The same, one token and choice after the other."""
    x, first, second, *biases = inputs
    one, two = biases or (None, None)
    count = len(parse(activation).inputs)
    if layout.get("transposed"):
        first, second = first.transpose(1, 2), second.transpose(1, 2)
    rows = [0 * (sum(value.sum() for value in inputs) + weights.sum()) + x.new_zeros(D) for _ in range(x.shape[0])]
    for token, chosen in enumerate(indices.tolist()):
        for choice, expert in enumerate(chosen):
            weight = {weigh: weights[token, choice]}
            pre = first[expert] @ (x[token] * weight.get("tokens", 1)) + (0 if one is None else one[expert])
            parts = [pre[i::count] for i in range(count)] if layout.get("interleaved") else pre.chunk(count)
            act = parse(activation)(*parts)[0] * weight.get("before", 1)
            y = second[expert] @ act + (0 if two is None else two[expert])
            rows[token] = rows[token] + weight.get("after", 1) * y
    return torch.stack(rows)


FORMS = [
    (SWIGLU, False, False, False),
    (SWIGLU, True, True, False),
    (CLAMPED, True, False, True),
    (RELU2, False, True, False),
    (SHIFTED, True, False, False),
]


@pytest.mark.parametrize("weigh", WEIGHED)
@pytest.mark.parametrize(("activation", "bias", "transposed", "interleaved"), FORMS)
def test_a_layer_equals_a_loop(activation: str, bias: bool, transposed: bool, interleaved: bool, weigh: str) -> None:
    indices, weights = choices(N, K, E), torch.rand(N, K, dtype=torch.float64)
    inputs = [*operands(activation, bias, transposed), weights]
    layout: dict[str, Any] = {"transposed": transposed, "interleaved": interleaved, "weigh": weigh}
    ours = value_and_grads(lambda *given: layer(given[:-1], given[-1], indices, activation, **layout), inputs)
    assert_close(
        ours, value_and_grads(lambda *given: by_hand(given[:-1], given[-1], indices, activation, **layout), inputs)
    )


@pytest.mark.parametrize("hit", [[2], [0, 3]])
def test_most_experts_without_rows(hit: list[int]) -> None:
    indices = torch.tensor(hit).repeat(N, 1)
    inputs = [*operands(SWIGLU, True), torch.rand(N, len(hit), dtype=torch.float64)]
    ours = value_and_grads(lambda *given: layer(given[:-1], given[-1], indices, SWIGLU), inputs)
    assert_close(ours, value_and_grads(lambda *given: by_hand(given[:-1], given[-1], indices, SWIGLU), inputs))


def test_no_tokens() -> None:
    inputs = [*operands(SWIGLU, True, rows=0), torch.zeros(0, K, dtype=torch.float64)]
    indices = torch.zeros(0, K, dtype=torch.int64)
    value, *grads = value_and_grads(lambda *given: layer(given[:-1], given[-1], indices, SWIGLU), inputs)
    assert value.shape == (0, D)
    assert [grad.shape for grad in grads] == [given.shape for given in inputs]
    assert all(not grad.any() for grad in grads)


def test_rows_that_came_from_elsewhere_and_padding() -> None:
    """Without an order, as between ranks: rows past the last group give zeros and get none."""
    counts = [3, 0, 2, 1]
    inputs = operands(SHIFTED, True, rows=sum(counts) + 4)
    offsets = ends(counts)

    def ours(x: Tensor, first: Tensor, second: Tensor, one: Tensor, two: Tensor) -> Tensor:
        pre, act = dialect.expert_up(x, first, offsets, one, activation=SHIFTED)
        assert not act[sum(counts) :].any()
        return dialect.expert_down(pre, act, second, offsets, two, activation=SHIFTED)

    def looped(x: Tensor, first: Tensor, second: Tensor, one: Tensor, two: Tensor) -> Tensor:
        ends_ = [0, *offsets.tolist()]
        rows = [
            parse(SHIFTED)(x[start:end] @ first[e].T + one[e])[0] @ second[e].T + two[e]
            for e, (start, end) in enumerate(pairwise(ends_))
        ]
        return torch.cat([*rows, 0 * x[sum(counts) :]])

    assert_close(value_and_grads(ours, inputs), value_and_grads(looped, inputs))


def test_poisoned_memory() -> None:
    indices, weights = choices(N, K, E), torch.rand(N, K, dtype=torch.float64)
    inputs = [*operands(SWIGLU, True), weights]

    def run() -> Any:
        return value_and_grads(lambda *given: layer(given[:-1], given[-1], indices, SWIGLU), inputs)

    clean = run()
    with poisoned_memory():
        assert_close(run(), clean, bound=0.0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weighed", [False, True])
def test_contract_of_weights_within_expert_up(weighed: bool, bias: bool) -> None:
    x, first, _, *biases = (value.requires_grad_() for value in operands(SWIGLU, bias))
    order, position, offsets = _sorted(True)
    of_tokens = torch.rand(N, K, dtype=torch.float64).requires_grad_() if weighed else None
    one = biases[0] if bias else None
    of_act = torch.rand(N, K, dtype=torch.float64)
    check_op("expert_up", (x, first, offsets, order, position, one, of_tokens, of_act, SWIGLU, K, False, False))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_contract_of_expert_up(ordered: bool, bias: bool) -> None:
    x, first, _, *biases = (value.requires_grad_() for value in operands(SWIGLU, bias))
    order, position, offsets = _sorted(ordered)
    rows = x if ordered else normal(N * K, D).requires_grad_()
    check_op(
        "expert_up",
        (
            rows,
            first,
            offsets,
            order,
            position,
            biases[0] if bias else None,
            None,
            None,
            SWIGLU,
            K if ordered else 0,
            False,
            False,
        ),
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("ordered", "before"), [(False, False), (True, False), (True, True)])
def test_contract_of_expert_down(ordered: bool, before: bool, bias: bool) -> None:
    """act is what expert_up makes of pre, so a finite difference has to move both."""
    _, _, second, *biases = (value.requires_grad_() for value in operands(CLAMPED, bias))
    order, position, offsets = _sorted(ordered)
    weights = torch.rand(N, K, dtype=torch.float64).requires_grad_() if ordered else None
    pre = normal(N * K, 2 * I, seed=5).requires_grad_()
    rest = (offsets, order, position, biases[1] if bias else None)
    options = (CLAMPED, True, False, before)

    def activated(pre: Tensor, weights: Tensor | None) -> Tensor:
        act = parse(CLAMPED)(*pre.detach().unflatten(1, (-1, 2)).unbind(2))[0]
        return act * weights.detach().flatten()[order].unsqueeze(1) if before and weights is not None else act

    act = activated(pre, weights)
    args = (pre, act, second, *rest, weights, *options)
    definition = DEFINITIONS["expert_down"]
    assert definition.backward is not None
    torch.library.opcheck(
        definition.op, args, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static")
    )
    torch.library.opcheck(definition.backward, backward_args("expert_down", args))
    check_layouts(definition.op, args)

    def both(pre: Tensor, *given: Any) -> Tensor:
        return definition.op(pre, activated(pre, given[len(rest) + 1]), *given)

    check_gradients(both, (pre, second, *rest, weights, *options))
    assert definition.flops_of(args, {}) > 0


def test_as_accurate_as_the_ops_it_replaces_in_bfloat16() -> None:
    indices = choices(64, K, E)

    def plain(x: Tensor, first: Tensor, second: Tensor, weights: Tensor) -> Tensor:
        rows, order, offsets = dialect.permute(x, indices, experts=E)
        gate, up = dialect.grouped_linear(rows, first, offsets).chunk(2, dim=1)
        act = dialect.gated_mlp_act(gate, up, "silu")
        return dialect.unpermute(dialect.grouped_linear(act, second, offsets), order, weights)

    shapes = [(64, 32), (E, 2 * 48, 32), (E, 32, 48), (64, K)]
    args = [(normal(*shape) / shape[-1] ** 0.5).bfloat16().requires_grad_() for shape in shapes]
    assert_as_accurate(lambda *given: layer(given[:-1], given[-1], indices, SWIGLU), plain, args)
    assert torch.equal(layer(args[:-1], args[-1], indices, SWIGLU), plain(*args))


def test_only_the_backward_reads_pre() -> None:
    pre, act = normal(N * K, 2 * I).requires_grad_(), normal(N * K, I)
    rest = (operands(SWIGLU)[2], _sorted(False)[2], None, None, None, None, SWIGLU, False, False)
    down = torch.ops.moec.expert_down
    assert torch.equal(down(None, act, *rest), down(pre, act, *rest))
    assert not down(pre.detach(), act, *rest).requires_grad
    assert down(pre, act, *rest).requires_grad


def test_a_frozen_expert_makes_no_gradient_and_keeps_no_rows() -> None:
    indices, weights = choices(N, K, E), torch.rand(N, K, dtype=torch.float64).requires_grad_()
    x, first, second = operands(SWIGLU)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda value: kept.append(value) or value, lambda value: value):
        y = layer([x.requires_grad_(), first, second], weights, indices, SWIGLU)
    assert not any(value is x or value.shape == (N * K, D) or value.shape == (N * K, I) for value in kept)
    grad_y = normal(N, D)
    frozen = torch.autograd.grad(y, [x, weights], grad_y)
    trained = layer([x, first.requires_grad_(), second.requires_grad_()], weights, indices, SWIGLU)
    for one, two in zip(frozen, torch.autograd.grad(trained, [x, weights], grad_y), strict=True):
        assert torch.equal(one, two)


def test_results_that_are_not_asked_for_are_empty() -> None:
    x, first, _ = operands(SWIGLU)
    order, position, offsets = _sorted(True)
    args = (x, first, offsets, order, position, None, None, None, SWIGLU, K, False, False)
    pre, act = torch.ops.moec.expert_up(*args)
    for keep in ((True, False), (False, True)):
        found = torch.ops.moec.expert_up(*args, *keep)
        assert all(
            torch.equal(one, two) if kept else not one.numel()
            for one, two, kept in zip(found, (pre, act), keep, strict=True)
        )
        torch.library.opcheck(torch.ops.moec.expert_up.default, (*args, *keep), test_utils=("test_faketensor",))


def test_what_does_not_fit_is_refused() -> None:
    first = operands(RELU2)[1]
    with pytest.raises(ValueError, match="takes 2 parts"):
        dialect.expert_up(normal(8, D), first, ends([2, 2, 2, 2]), activation=SWIGLU)
    with pytest.raises(ValueError, match="no expression"):
        dialect.expert_up(normal(8, D), first, ends([2, 2, 2, 2]), activation="x: tan(x)")
    with pytest.raises(ValueError, match="need the order of the rows"):
        dialect.expert_up(normal(8, D), first, ends([2, 2, 2, 2]), activation=RELU2, act_weights=torch.rand(4, 2))
    with pytest.raises(IndexError, match="expert_slots: expert index 4"):
        dialect.expert_slots(torch.tensor([[4]]), experts=4)


@pytest.mark.parametrize("shape", [(5, 2), (0, 2)])
def test_contract_of_expert_slots(shape: tuple[int, int]) -> None:
    indices = torch.randint(4, shape, generator=torch.Generator().manual_seed(0))
    torch.library.opcheck(torch.ops.moec.expert_slots.default, (indices, 4))


def test_costs() -> None:
    order, position, offsets = _sorted(True)
    x, first, second = operands(SWIGLU)
    args = (x, first, offsets, order, position, None, None, None, SWIGLU, K, False, False)
    assert DEFINITIONS["expert_up"].flops_of(args, {}) == 2 * N * K * D * 2 * I
    assert DEFINITIONS["expert_up"].backward_flops_of(args, {}) == 4 * N * K * D * 2 * I
    down = (None, normal(N * K, I), second, offsets, order, position, None, torch.rand(N, K), SWIGLU, False, False)
    assert DEFINITIONS["expert_down"].flops_of(down, {}) == 2 * N * K * D * I
    assert DEFINITIONS["expert_down"].backward_flops_of(down, {"need_weight": 0}) in (
        2 * N * K * D * I,
        4 * N * K * D * I,
    )


def _sorted(ordered: bool) -> tuple[Tensor | None, Tensor | None, Tensor]:
    order, position, offsets = dialect.expert_slots(choices(N, K, E), experts=E)
    return (order, position, offsets) if ordered else (None, None, offsets)
