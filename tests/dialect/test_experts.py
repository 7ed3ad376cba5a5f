"""permute, grouped_linear and unpermute against explicit loops over tokens and experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moec.compiler import dialect
from tests.dialect.checks import assert_close, poisoned_memory, relative_error, value_and_grads
from tests.dialect.contract import assert_as_accurate, check_layouts, check_op

RAGGED = [0, 1, 7, 8, 9, 0, 16, 0]
GROUPS = [RAGGED, [5], [0, 3], [3, 0], [0, 0, 4, 0], [0, 0, 0], [2] * 60]


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def choices(tokens: int, k: int, experts: int, seed: int = 0) -> Tensor:
    """k distinct experts per token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator).topk(k).indices


def ends(counts: Sequence[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).int()


# permute and unpermute


def sorted_slots(indices: Tensor) -> list[int]:
    flat = indices.flatten().tolist()
    return sorted(range(len(flat)), key=lambda slot: (flat[slot], slot))


@pytest.mark.parametrize(
    ("tokens", "k", "experts"), [(7, 1, 1), (7, 2, 6), (5, 6, 6), (9, 4, 60), (1, 1, 3), (0, 2, 4)]
)
def test_permute_sorts_stably(tokens: int, k: int, experts: int) -> None:
    x, indices = normal(tokens, 3), choices(tokens, k, experts)
    rows, order, offsets = dialect.permute(x, indices, experts=experts)
    assert (order.dtype, offsets.dtype) == (torch.int64, torch.int32)
    assert order.tolist() == sorted_slots(indices)
    assert rows.equal(x[order // k])
    assert offsets.tolist() == [int((indices <= expert).sum()) for expert in range(experts)]


@pytest.mark.parametrize(("tokens", "k", "experts"), [(7, 1, 1), (7, 2, 6), (5, 6, 6), (9, 4, 60), (0, 2, 4)])
def test_unpermute_sums_each_tokens_rows(tokens: int, k: int, experts: int) -> None:
    order = torch.tensor(sorted_slots(choices(tokens, k, experts)), dtype=torch.int64)

    def by_hand(rows: Tensor, weights: Tensor) -> Tensor:
        total = 0 * (weights.sum() + rows.sum()) + torch.zeros(tokens, 3, dtype=rows.dtype)
        for row, slot in enumerate(order.tolist()):
            total = total.index_add(0, torch.tensor([slot // k]), rows[row : row + 1] * weights[slot // k, slot % k])
        return total

    inputs = [normal(tokens * k, 3), normal(tokens, k)]
    ours = value_and_grads(lambda rows, weights: dialect.unpermute(rows, order, weights), inputs)
    assert_close(ours, value_and_grads(by_hand, inputs))


def test_permute_gradient_sums_each_tokens_rows() -> None:
    indices = choices(7, 3, 6)
    x = normal(7, 4)
    ours = value_and_grads(lambda x: dialect.permute(x, indices, experts=6)[0], [x])
    assert_close(ours, value_and_grads(lambda x: x[torch.tensor(sorted_slots(indices)) // 3], [x]))


def test_unpermute_undoes_permute() -> None:
    indices, x = choices(9, 4, 10), normal(9, 5)
    rows, order, _ = dialect.permute(x, indices, experts=10)
    weights = normal(9, 4).softmax(-1)
    assert_close([dialect.unpermute(rows, order, weights)], [x])


def test_equal_choices_keep_the_order_of_the_tokens() -> None:
    _, order, offsets = dialect.permute(normal(4, 2), torch.full((4, 3), 5), experts=7)
    assert order.tolist() == list(range(12))
    assert offsets.tolist() == [0] * 5 + [12, 12]


@pytest.mark.parametrize("wrong", [-1, 6])
def test_an_expert_out_of_range_is_named(wrong: int) -> None:
    with pytest.raises(IndexError, match=rf"expert index {wrong} is outside \[0, 6\)"):
        dialect.permute(normal(2, 3), torch.tensor([[0], [wrong]]), experts=6)


def test_permute_opcheck_and_gradient() -> None:
    x, indices = normal(4, 3).requires_grad_(), choices(4, 2, 5)
    torch.library.opcheck(torch.ops.moec.permute.default, (x, indices, 5))
    rows, order, _ = (value.detach() for value in dialect.permute(x, indices, experts=5))
    torch.library.opcheck(torch.ops.moec.permute_backward.default, (rows, indices, order))
    assert torch.autograd.gradcheck(lambda x: dialect.permute(x, indices, experts=5)[0], (x,))
    check_layouts(lambda x: dialect.permute(x, indices, experts=5)[0], [x])


def test_unpermute_contract() -> None:
    order = torch.tensor(sorted_slots(choices(4, 2, 5)))
    check_op("unpermute", (normal(8, 3).requires_grad_(), order, normal(4, 2).requires_grad_()))


def test_unpermute_rounds_once() -> None:
    order = torch.tensor(sorted_slots(choices(40, 8, 16)))
    rows, weights = normal(320, 16).bfloat16(), normal(40, 8).softmax(-1).float()
    y = dialect.unpermute(rows, order, weights)
    slots = torch.empty_like(rows, dtype=torch.float32).index_copy(0, order, rows.float()).view(40, 8, 16)
    exact = (slots.double() * weights.double().unsqueeze(-1)).sum(1)
    assert y.dtype == torch.bfloat16
    # Half a unit in the last place of bfloat16, and the noise of a float32 sum.
    assert ((y.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()


# grouped_linear


def by_loop(x: Tensor, weight: Tensor, counts: Sequence[int], bias: Tensor | None, transposed: bool) -> Tensor:
    pieces = []
    for expert, rows in enumerate(x.split([*counts, x.shape[0] - sum(counts)])[:-1]):
        matrix = weight[expert] if transposed else weight[expert].t()
        pieces.append(rows @ matrix if bias is None else rows @ matrix + bias[expert])
    tail = x.new_zeros(x.shape[0] - sum(counts), pieces[0].shape[1])
    # Ties every operand to the result, so that absent rows still give a gradient of zero.
    anchor = 0 * (x.sum() + weight.sum() + (0 if bias is None else bias.sum()))
    return torch.cat([*pieces, tail]) + anchor


def operands(counts: Sequence[int], bias: bool, transposed: bool, padding: int = 0) -> list[Tensor]:
    experts = len(counts)
    weight = normal(experts, 4, 3) if transposed else normal(experts, 3, 4)
    return [normal(sum(counts) + padding, 4), weight, *([normal(experts, 3)] if bias else [])]


def grouped(inputs: Sequence[Tensor], counts: Sequence[int], transposed: bool) -> Tensor:
    x, weight, *bias = inputs
    return dialect.grouped_linear(x, weight, ends(counts).to(x.device), *bias, transposed=transposed)


def looped(inputs: Sequence[Tensor], counts: Sequence[int], transposed: bool) -> Tensor:
    x, weight, *bias = inputs
    return by_loop(x, weight, counts, bias[0] if bias else None, transposed)


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("counts", GROUPS, ids=lambda counts: "-".join(map(str, counts[:8])))
def test_grouped_linear_equals_a_loop(counts: list[int], transposed: bool, bias: bool, padding: int) -> None:
    inputs = operands(counts, bias, transposed, padding)
    expected = value_and_grads(lambda *x: looped(x, counts, transposed), inputs)
    with poisoned_memory():
        assert_close(value_and_grads(lambda *x: grouped(x, counts, transposed), inputs), expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_linear_contract(transposed: bool, bias: bool) -> None:
    x, weight, *rest = (tensor.requires_grad_() for tensor in operands([0, 2, 0, 1], bias, transposed))
    check_op("grouped_linear", (x, weight, ends([0, 2, 0, 1]), rest[0] if rest else None, transposed))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_linear_is_as_accurate_as_eager_in_bfloat16(transposed: bool, bias: bool) -> None:
    counts = [0, 33, 1, 20]
    inputs = [x.bfloat16().requires_grad_() for x in operands(counts, bias, transposed)]
    assert_as_accurate(lambda *x: grouped(x, counts, transposed), lambda *x: looped(x, counts, transposed), inputs)


# The three together


def layer(inputs: Sequence[Tensor], indices: Tensor) -> Tensor:
    x, weight, scales = inputs
    rows, order, offsets = dialect.permute(x, indices, experts=weight.shape[0])
    return dialect.unpermute(dialect.grouped_linear(rows, weight, offsets), order, scales)


def layer_by_hand(inputs: Sequence[Tensor], indices: Tensor) -> Tensor:
    x, weight, scales = inputs
    outputs = []
    for token, experts in enumerate(indices.tolist()):
        parts = [scales[token, j] * (weight[expert] @ x[token]) for j, expert in enumerate(experts)]
        outputs.append(torch.stack(parts).sum(0))
    return torch.stack(outputs) + 0 * weight.sum()


@given(
    tokens=st.integers(1, 6), experts=st.integers(1, 8), data=st.data(), seed=st.integers(0, 99), crowd=st.booleans()
)
@settings(max_examples=30, deadline=None)
def test_a_layer_equals_a_loop_over_tokens(
    tokens: int, experts: int, data: st.DataObject, seed: int, crowd: bool
) -> None:
    k = data.draw(st.integers(1, experts))
    indices = choices(tokens, k, experts, seed)
    indices = indices[:1].expand(tokens, k) if crowd else indices
    inputs = [normal(tokens, 3, seed=seed), normal(experts, 4, 3, seed=seed), normal(tokens, k, seed=seed)]
    ours = value_and_grads(lambda *x: layer(x, indices), inputs)
    assert_close(ours, value_and_grads(lambda *x: layer_by_hand(x, indices), inputs))


def test_no_tokens() -> None:
    indices = choices(0, 2, 5)
    y, *grads = value_and_grads(lambda *x: layer(x, indices), [normal(0, 3), normal(5, 4, 3), normal(0, 2)])
    assert y.shape == (0, 4)
    assert [grad.shape for grad in grads] == [(0, 3), (5, 4, 3), (0, 2)]
    assert grads[1].eq(0).all()


def test_a_layer_in_poisoned_memory() -> None:
    indices, inputs = choices(6, 2, 9), [normal(6, 3), normal(9, 4, 3), normal(6, 2)]
    expected = value_and_grads(lambda *x: layer(x, indices), inputs)
    with poisoned_memory():
        assert_close(value_and_grads(lambda *x: layer(x, indices), inputs), expected)


def test_exports_with_a_symbolic_number_of_tokens() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor, scales: Tensor, indices: Tensor) -> Tensor:
            return layer([x, weight, scales], indices)

    def inputs(tokens: int) -> tuple[Tensor, ...]:
        return normal(tokens, 3), normal(6, 4, 3), normal(tokens, 2), choices(tokens, 2, 6)

    tokens = torch.export.Dim("tokens", min=2)
    shapes: tuple[dict[int, Any], ...] = ({0: tokens}, {}, {0: tokens}, {0: tokens})
    program = torch.export.export(Layer(), inputs(5), dynamic_shapes=shapes, strict=False)
    assert_close([program.module()(*inputs(11))], [Layer()(*inputs(11))])


def test_costs() -> None:
    x, indices = normal(6, 4), choices(6, 2, 5)
    rows, order, offsets = dialect.permute(x, indices, experts=5)
    costs = dialect.DEFINITIONS
    assert costs["permute"].flops_of((x, indices, 5), {}) == 0
    assert costs["permute"].backward_flops_of((x, indices, 5), {}) == 6 * 2 * 4
    for transposed in (False, True):
        weight = normal(5, 4, 3) if transposed else normal(5, 3, 4)
        arguments: tuple[Any, ...] = (rows, weight, offsets, None, transposed)
        assert costs["grouped_linear"].flops_of(arguments, {}) == 2 * 12 * 3 * 4
        assert costs["grouped_linear"].backward_flops_of(arguments, {}) == 4 * 12 * 3 * 4
    arguments = (rows, order, normal(6, 2))
    assert costs["unpermute"].flops_of(arguments, {}) == 2 * 12 * 4
    assert costs["unpermute"].backward_flops_of(arguments, {}) == 3 * 12 * 4
    assert not costs["permute"].recompute


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 12])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("padding", [0, 5])
def test_grouped_linear_on_cuda(padding: int, transposed: bool, bias: bool, width: int, dtype: torch.dtype) -> None:
    for counts in GROUPS:
        if not sum(counts) + padding:
            continue
        experts = len(counts)
        weight = normal(experts, 32, width) if transposed else normal(experts, width, 32)
        inputs = [normal(sum(counts) + padding, 32), weight, *([normal(experts, width)] if bias else [])]
        rounded = [x.to(dtype) for x in inputs]
        exact = value_and_grads(lambda *x, c=counts: looped(x, c, transposed), [x.double() for x in rounded])
        ours = value_and_grads(lambda *x, c=counts: grouped(x, c, transposed), [x.cuda() for x in rounded])
        for value, reference in zip(ours, exact, strict=True):
            assert relative_error(value.cpu(), reference) < (1e-12 if dtype == torch.float64 else 6e-3)


@pytest.mark.gpu
def test_a_layer_on_cuda_equals_cpu() -> None:
    indices, inputs = choices(50, 4, 9), [normal(50, 3), normal(9, 4, 3), normal(50, 4)]
    cpu = value_and_grads(lambda *x: layer(x, indices), inputs)
    gpu = value_and_grads(lambda *x: layer([y.cuda() for y in x], indices.cuda()).cpu(), inputs)
    assert max(relative_error(a, b) for a, b in zip(gpu, cpu, strict=True)) < 1e-12
