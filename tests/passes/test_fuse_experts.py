"""fuse_experts: every layout and activation, what is refused and why, devices, and the rows of other ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from moec.compiler import dialect
from moec.compiler.expression import parse
from moec.compiler.graph import Unit
from moec.compiler.nodes import bound_args
from moec.compiler.pass_manager import Report
from moec.compiler.plan import Plan
from moec.passes.fuse_experts import FuseExperts
from moec.passes.normalize import Normalize
from moec.passes.recognize_mlp import RecognizeMlp

from .support import apply, assert_golden, check, compare, counts, graph_text, reasons, run_unit, unit_of, what

N, D, I, E, K = 7, 6, 4, 5, 2  # noqa: E741
ANYWHERE = Plan(enable=("fuse_experts",))
FUSED = {"expert_slots": 1, "expert_up": 1, "expert_down": 1}
PLAIN = {"permute": 1, "grouped_linear": 2, "unpermute": 1}

Middle = Callable[[Tensor], Tensor]


class Experts(nn.Module):
    """permute, two products with `middle` between them, unpermute."""

    def __init__(self, middle: Middle, parts: int, *, bias: bool = False, transposed: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) / 2)

        first, second = (D, parts * I), (I, D)
        self.first = weight(E, *(first if transposed else first[::-1]))
        self.second = weight(E, *(second if transposed else second[::-1]))
        self.biases = nn.ParameterList([weight(E, parts * I), weight(E, D)] if bias else [])
        self.middle, self.transposed = middle, transposed

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        rows, order, offsets = dialect.permute(x, indices, experts=E)
        return dialect.unpermute(self.experts(rows, offsets), order, weights) * 2

    def experts(self, rows: Tensor, offsets: Tensor) -> Tensor:
        first, second = (*self.biases, None, None)[:2]
        product = dialect.grouped_linear(rows, self.first, offsets, first, transposed=self.transposed)
        return dialect.grouped_linear(self.middle(product), self.second, offsets, second, transposed=self.transposed)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    indices = torch.stack([torch.randperm(E - 1, generator=generator)[:K] for _ in range(N)])  # one expert stays empty
    return torch.randn(N, D, generator=generator).to(dtype), indices, torch.rand(N, K, generator=generator)


def fused(module: nn.Module, *args: Any) -> tuple[Unit, Report]:
    """The results have the same bits, gradients may round differently."""
    unit = unit_of(module, *args)
    wanted = run_unit(unit, module, args)
    *_, report = apply([Normalize(), RecognizeMlp(), FuseExperts()], unit, plan=ANYWHERE)
    found = run_unit(unit, module, args)
    compare(found, wanted)
    assert all(torch.equal(one, two) for one, two in zip(found[0], wanted[0], strict=True))
    return unit, report


def swiglu(product: Tensor) -> Tensor:
    gate, up = product.chunk(2, dim=-1)
    return F.silu(gate) * up


def up_first(product: Tensor) -> Tensor:
    up, gate = product.split([I, I], dim=-1)
    return F.gelu(gate) * up


def interleaved(product: Tensor) -> Tensor:
    """gpt-oss."""
    gate, up = product[..., ::2].clamp(max=1.0), product[..., 1::2].clamp(min=-1.0, max=1.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def three_parts(product: Tensor) -> Tensor:
    a, b, c = product.chunk(3, dim=-1)
    return torch.tanh(a) * b - F.softplus(c)


def invented(product: Tensor) -> Tensor:
    """Nobody's activation."""
    left, right = product[..., :I], product[..., I:]
    bent = torch.where(left > right, F.elu(left), left / (1 + left.abs()))
    return bent * torch.rsqrt(1 + right.square()) - torch.minimum(left, right.pow(3)) / 4


FORMS: dict[str, tuple[Middle, int, str]] = {
    "swiglu": (swiglu, 2, "gate, up: silu(gate) * up"),
    "up first": (up_first, 2, "up, gate: gelu(gate) * up"),
    "interleaved": (
        interleaved,
        2,
        "gate, up: (t0 := clamp_max(gate, 1.0)) * sigmoid(1.702 * t0) * (clamp_min(clamp_max(up, 1.0), -1.0) + 1.0)",
    ),
    "relu squared": (lambda product: F.relu(product).square(), 1, "x: (t0 := relu(x)) * t0"),
    "gelu": (F.gelu, 1, "x: gelu(x)"),
    "gelu tanh": (lambda product: F.gelu(product, approximate="tanh"), 1, "x: gelu_tanh(x)"),
    "leaky": (lambda product: F.leaky_relu(product, 0.1), 1, "x: where(x > 0.0, x, x * 0.1)"),
    "bounded": (F.relu6, 1, "x: where(x <= 0.0, 0.0, where(x >= 6.0, 6.0, x))"),
    "three parts": (three_parts, 3, "x0, x1, x2: tanh(x0) * x1 - softplus(x2)"),
    "invented": (
        invented,
        2,
        "x0, x1: where(x0 > x1, where(x0 > 0.0, x0, expm1(clamp_max(x0, 0.0))), x0 / (abs(x0) + 1.0))"
        " * rsqrt((t0 := x1 * x1) + 1.0) - minimum(x0, t0 * x1) / 4.0",
    ),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_every_activation(name: str, bias: bool) -> None:
    middle, parts, text = FORMS[name]
    unit, report = fused(Experts(middle, parts, bias=bias, transposed=bias), *inputs())
    assert counts(unit) == FUSED
    assert what(report) == [f"gather up ({text}) down weighted sum"]
    assert not report.near_misses
    (up,) = unit.graph.find_nodes(op="call_function", target=torch.ops.moec.expert_up.default)
    *_, activation, choices, is_interleaved, transposed, _, _ = bound_args(up)
    assert (parse(activation).text, choices, is_interleaved, transposed) == (text, K, name == "interleaved", bias)


def test_low_precision_rounds_no_more_than_before() -> None:
    module = Experts(swiglu, 2, bias=True).bfloat16()
    check(FuseExperts(), module, *inputs(torch.bfloat16), before=[RecognizeMlp()], bound=2e-2, plan=ANYWHERE)


def test_rows_in_another_dtype_than_tokens() -> None:
    """Norms before the experts may be kept in float32 while the experts' weights are not."""

    class Cast(Experts):
        def experts(self, rows: Tensor, offsets: Tensor) -> Tensor:
            return super().experts(rows.to(self.first.dtype), offsets)

    unit, report = check(
        FuseExperts(), Cast(swiglu, 2).bfloat16(), *inputs(), before=[RecognizeMlp()], bound=2e-2, plan=ANYWHERE
    )
    assert counts(unit) == FUSED
    assert not report.near_misses


def test_golden_text() -> None:
    unit, _ = fused(Experts(interleaved, 2, bias=True), *inputs())
    assert_golden("fused_experts", graph_text(unit))


def test_a_latent_model_and_its_norms_around_stay() -> None:
    class Latent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up, self.experts = nn.Linear(9, D), nn.Linear(D, 9), Experts(swiglu, 2)

        def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
            return self.up(F.rms_norm(self.experts(self.down(x), indices, weights), [D])) + x

    _, indices, weights = inputs()
    unit, _ = fused(Latent(), torch.randn(N, 9), indices, weights)
    assert counts(unit) == FUSED


class Branches(Experts):
    """`branch` is what is done otherwise than in `Experts`."""

    def __init__(self, branch: Callable[..., Tensor], parts: int = 2) -> None:
        super().__init__(swiglu, parts)
        self.branch = branch

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        rows, order, offsets = dialect.permute(x, indices, experts=E)
        return self.branch(self, rows, order, offsets, weights)


def test_rows_that_something_else_takes_are_gathered_for_it() -> None:
    def branch(m: Experts, rows: Tensor, order: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        return dialect.unpermute(m.experts(rows, offsets) + rows, order, weights)

    unit, report = fused(Branches(branch), *inputs())
    assert counts(unit) == {"permute": 1, "expert_up": 1, "expert_down": 1, "unpermute": 1}
    assert what(report) == ["up (gate, up: silu(gate) * up) down"]


def test_a_norm_after_each_expert_keeps_the_rows() -> None:
    def branch(m: Experts, rows: Tensor, order: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        return dialect.unpermute(F.rms_norm(m.experts(rows, offsets), [D]), order, weights)

    unit, report = fused(Branches(branch), *inputs())
    assert counts(unit) == {"expert_slots": 1, "expert_up": 1, "expert_down": 1, "unpermute": 1}
    assert what(report) == ["gather up (gate, up: silu(gate) * up) down"]


def _product(m: Experts, rows: Tensor, offsets: Tensor) -> Tensor:
    return dialect.grouped_linear(rows, m.first, offsets)


def _of_rows(weights: Tensor, order: Tensor) -> Tensor:
    return weights.flatten()[order].unsqueeze(1)


def _weights_before(m: Experts, rows: Tensor, order: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    act = swiglu(_product(m, rows, offsets)) * _of_rows(weights, order)
    return dialect.unpermute(dialect.grouped_linear(act, m.second, offsets), order, torch.ones_like(weights))


def _weights_of_tokens(m: Experts, rows: Tensor, order: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    """As Llama 4 does it."""
    selected = weights.reshape(-1).index_select(0, order)
    return dialect.unpermute(m.experts(selected[:, None] * rows, offsets), order, torch.ones_like(weights))


def _weights_of_both(m: Experts, rows: Tensor, order: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    return _weights_before(m, rows * _of_rows(weights * 2, order), order, offsets, weights)


def _weights_of_tokens_and_sum(m: Experts, rows: Tensor, order: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    return dialect.unpermute(m.experts(rows * _of_rows(weights, order), offsets), order, weights)


WEIGHED = {
    "before": (_weights_before, "gather up (gate, up: silu(gate) * up) weighted down sum"),
    "tokens": (_weights_of_tokens, "weighted gather up (gate, up: silu(gate) * up) down weighted sum"),
    "both": (_weights_of_both, "weighted gather up (gate, up: silu(gate) * up) weighted down sum"),
    "tokens and sum": (_weights_of_tokens_and_sum, "weighted gather up (gate, up: silu(gate) * up) down weighted sum"),
}


@pytest.mark.parametrize("name", WEIGHED)
def test_router_weights_within(name: str) -> None:
    branch, text = WEIGHED[name]
    unit, report = fused(Branches(branch), *inputs())
    assert counts(unit) == FUSED
    assert what(report) == [text]
    assert not report.near_misses


def _before_cast(m: Experts, rows: Tensor, order: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    act = (swiglu(_product(m, rows, offsets)) * _of_rows(weights, order)).to(rows.dtype)
    return dialect.unpermute(dialect.grouped_linear(act, m.second, offsets), order, torch.ones_like(weights))


def _tokens_cast(m: Experts, rows: Tensor, order: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    rows = (rows * _of_rows(weights, order)).to(rows.dtype)
    return dialect.unpermute(m.experts(rows, offsets), order, torch.ones_like(weights))


@pytest.mark.parametrize("branch", [_before_cast, _tokens_cast])
def test_router_weights_within_in_low_precision(branch: Callable[..., Tensor]) -> None:
    """The weights are float32, so what they multiply is cast back before the next product."""
    module = Branches(branch).bfloat16()
    unit, report = check(
        FuseExperts(), module, *inputs(torch.bfloat16), before=[RecognizeMlp()], bound=2e-2, plan=ANYWHERE
    )
    assert counts(unit) == FUSED
    assert not report.near_misses


def test_weighted_tokens_that_something_else_takes_are_rows() -> None:
    def branch(m: Experts, rows: Tensor, order: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        rows = rows * _of_rows(weights, order)
        return dialect.unpermute(m.experts(rows, offsets) + rows, order, weights)

    unit, report = fused(Branches(branch), *inputs())
    assert what(report) == ["up (gate, up: silu(gate) * up) down"]
    assert counts(unit) == {"permute": 1, "expert_up": 1, "expert_down": 1, "unpermute": 1}


def _used_twice(m: Experts, rows: Tensor, order: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    product = _product(m, rows, offsets)
    rows = dialect.grouped_linear(swiglu(product), m.second, offsets)
    return dialect.unpermute(rows, order, weights) + product.sum()


def _normed(m: Experts, rows: Tensor, order: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    act = F.rms_norm(swiglu(_product(m, rows, offsets)), [I])
    return dialect.unpermute(dialect.grouped_linear(act, m.second, offsets), order, weights)


def _unknown(m: Experts, rows: Tensor, order: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    act = swiglu(_product(m, rows, offsets)).atan()
    return dialect.unpermute(dialect.grouped_linear(act, m.second, offsets), order, weights)


def _odd_power(m: Experts, rows: Tensor, order: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    act = swiglu(_product(m, rows, offsets)).abs().pow(1.7)
    return dialect.unpermute(dialect.grouped_linear(act, m.second, offsets), order, weights)


def _unequal(m: Experts, rows: Tensor, order: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    product = _product(m, rows, offsets)
    act = product[:, :I] * product[:, 1 : I + 1]
    return dialect.unpermute(dialect.grouped_linear(act, m.second, offsets), order, weights)


def _two_products(m: Experts, rows: Tensor, order: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    gate = dialect.grouped_linear(rows, m.first[:, :I], offsets)
    up = dialect.grouped_linear(rows, m.first[:, I:], offsets)
    return dialect.unpermute(dialect.grouped_linear(F.silu(gate) * up, m.second, offsets), order, weights)


def _weights_twice(m: Experts, rows: Tensor, order: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    act = swiglu(_product(m, rows, offsets)) * _of_rows(weights, order)
    return dialect.unpermute(dialect.grouped_linear(act, m.second, offsets), order, weights)


def _weights_of_other_slots(m: Experts, rows: Tensor, order: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    act = swiglu(_product(m, rows, offsets)) * _of_rows(weights, order.flip(0))
    return dialect.unpermute(dialect.grouped_linear(act, m.second, offsets), order, torch.ones_like(weights))


def _weights_of_rows_apart(m: Experts, rows: Tensor, order: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    act = swiglu(_product(m, rows, offsets)) * _of_rows(weights, order)
    return dialect.unpermute(dialect.grouped_linear(act, m.second, offsets) + rows, order, torch.ones_like(weights))


NEAR = {
    "weights twice": (_weights_twice, "are not the only ones: unpermute.* has others"),
    "weights of other slots": (_weights_of_other_slots, "are in another order than the rows"),
    "weights of rows apart": (_weights_of_rows_apart, "need the rows of a permute, and their sum"),
    "used twice": (_used_twice, "grouped_linear .* is used outside of the layer too"),
    "normed": (_normed, "rms_norm.* is not known to be pointwise"),
    "unknown": (_unknown, "atan.* is not known to be pointwise"),
    "odd power": (_odd_power, "pow.* has arguments that no expression knows"),
    "unequal": (_unequal, "is not one of several equal parts of a row"),
    "two products": (_two_products, "is of another product than"),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_misses(name: str) -> None:
    branch, reason = NEAR[name]
    unit, report = fused(Branches(branch), *inputs())
    assert "expert_up" not in counts(unit)
    assert not report.matches
    (found,) = reasons(report)
    assert re.search(reason, found), found


def test_on_a_cpu_it_runs_only_where_the_plan_wants_it() -> None:
    for plan in (None, Plan()):
        unit = unit_of(Experts(swiglu, 2), *inputs())
        *_, report = apply([Normalize(), FuseExperts()], unit, plan=plan)
        assert counts(unit) == PLAIN
        assert not report.matches
        assert not report.near_misses
        assert FuseExperts().expected(unit) == ""


def test_on_cuda_it_runs() -> None:
    """The values that a graph is described by have no data, so that no device is needed."""
    unit = unit_of(Experts(swiglu, 2), *inputs())
    apply([Normalize()], unit)
    for node in unit.graph.nodes:
        if node.op != "output":
            node.meta["val"] = tree_map_only(Tensor, _on_cuda, node.meta["val"])
    assert FuseExperts().expected(unit).startswith("2 products of experts are in the graph")
    (report,) = apply([FuseExperts()], unit)
    assert counts(unit) == FUSED
    assert what(report)
    assert FuseExperts().expected(unit) == ""


def _on_cuda(value: Any) -> Tensor:
    with value.fake_mode:
        return torch.empty_like(value, device="cuda")
