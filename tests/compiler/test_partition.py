"""Partition: forward and backward run apart and give autograd's numbers, and every value goes the way the rules say."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, fx, nn

from moec.compiler import dialect, region_op
from moec.compiler.dialect.registry import nbytes
from moec.compiler.partition import Partitioned, may_recompute

from ..spine import distance
from .units import Ran, autograd, run_parts, split, unit_of

aten = torch.ops.aten


class Mlp(nn.Module):
    """Everything of it may run again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)).square())


def check(module: nn.Module, *args: Tensor, recompute: bool = False) -> Partitioned:
    """Partition, run, and compare with autograd; returns the partition."""
    parts = split(unit_of(module, *args), recompute)
    first = module(*[arg.detach() for arg in args])
    results = list(first) if isinstance(first, tuple) else [first]
    torch.manual_seed(2)
    tangents = {index: torch.randn_like(results[index]) for index in parts.joint.tangents}
    found = run_parts(parts, module, args, tangents)
    assert_same(found, autograd(module, args, tangents), parts)
    return parts


def assert_same(found: Ran, wanted: Ran, parts: Partitioned) -> None:
    inputs = [value.name for value in parts.joint.unit.signature.inputs if value.kind == "input"]
    names = {name: f"input {index}" for index, name in enumerate(inputs)}
    for got, expected in zip(found.results, wanted.results, strict=True):
        assert distance(got, expected) <= 1e-6
    assert {names.get(name, name) for name in found.grads} == set(wanted.grads)
    for name, grad in found.grads.items():
        assert distance(grad, wanted.grads[names.get(name, name)]) <= 1e-5, name


def targets(graph: fx.Graph) -> set[object]:
    return {node.target for node in graph.nodes if node.op == "call_function"}


def decisions(parts: Partitioned) -> dict[str, tuple[str, str]]:
    """Op -> (decision, reason) of every value that crosses."""
    return {place.op: (place.decision, place.reason) for place in parts.placements}


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()


def test_kept_values_are_saved_once_and_nothing_runs_twice() -> None:
    parts = check(Mlp(), X)
    assert not targets(parts.backward) & {aten.tanh.default, aten.addmm.default}
    assert [str(place.op) for place in parts.placements] == ["aten.pow.Tensor_Scalar", "aten.tanh.default"]
    assert all((p.decision, p.reason) == ("keep", "backward uses it") for p in parts.placements)
    assert parts.saved_bytes == sum(p.bytes for p in parts.placements) == 2 * 3 * 8 * 4


def test_a_recompute_rule_saves_nothing_but_inputs() -> None:
    parts = check(Mlp(), X, recompute=True)
    assert parts.saved == []
    assert {aten.tanh.default, aten.addmm.default} <= targets(parts.backward)
    assert {p.decision for p in parts.placements} == {"recompute"}
    assert parts.saved_bytes == 0


def test_views_are_taken_again_not_saved() -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.exp(x)
            left, right = hidden.chunk(2, -1)
            return (left * right) @ hidden.reshape(4, 3)[:2]

    parts = check(Views(), X)
    assert [str(place.op) for place in parts.placements] == ["aten.mul.Tensor", "aten.exp.default"]


def test_a_routing_decision_is_never_taken_again() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            weights, experts = dialect.route(
                self.gate(x), None, top_k=2, score="sigmoid", softmax_after_topk=False, renormalize=True, scale=1.0
            )
            return torch.sin(weights) * (experts + 1)

    parts = check(Routed(), X, recompute=True)
    assert torch.ops.moec.route.default not in targets(parts.backward)
    assert decisions(parts)["moec.route.default"] == ("keep", "route is a decision that must be taken once")
    assert decisions(parts)["aten.addmm.default"][0] == "recompute"


def test_random_ops_are_drawn_once() -> None:
    class Dropped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(F.dropout(x.exp(), 0.5, True))

    unit = unit_of(Dropped(), X)
    parts = split(unit, recompute=True)
    drawn = {t for t in targets(parts.forward) if torch.Tag.nondeterministic_seeded in getattr(t, "tags", ())}
    assert drawn
    assert not drawn & targets(parts.backward)
    assert {p.reason for p in parts.placements if p.decision == "keep"} == {"it draws random numbers"}
    tangents = {0: torch.ones(3, 4)}
    found = run_parts(parts, Dropped(), (X,), tangents)
    output = found.results[0]
    inner = torch.atanh(output)  # 0 where dropped, 2 exp(x) elsewhere
    wanted = torch.where(output == 0, 0.0, (1 - output**2) * inner)
    assert 0 < (output == 0).sum() < 12
    assert distance(found.grads["x"], wanted) <= 1e-3


class Scaling(nn.Module):
    """Reads a buffer, then writes it; the gradient needs the value from before."""

    scale: Tensor

    def __init__(self, through: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.through = through
        self.register_buffer("scale", torch.full((4,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(x) * self.through(self.scale)
        self.scale.add_(1.0)
        return y


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["clone", "product", "clone of a view", "product of a view", "reshape that copies"])
def test_a_buffer_that_is_written_reaches_backward_as_it_was_read(recompute: bool, kind: str) -> None:
    """Backward runs after the buffer has its new value."""
    through: dict[str, Callable[[Tensor], Tensor]] = {
        "clone": torch.clone,
        "product": lambda scale: scale * 1,
        "clone of a view": lambda scale: scale.view(1, 4).clone(),
        "product of a view": lambda scale: scale.view(1, 4).expand(3, 4) * 1,
        "reshape that copies": lambda scale: scale.expand(2, 4).t().reshape(8)[::2],
    }
    module = Scaling(through[kind])
    parts = split(unit_of(module, X), recompute)
    roles = [node.meta["role"] for node in parts.backward.find_nodes(op="placeholder")]
    names = [parts.joint.unit.signature.inputs[index].name for role, index in roles if role == "input"]
    assert names == ["x"]
    found = run_parts(parts, module, (X,), {0: torch.ones(3, 4)})
    assert torch.equal(found.buffers["scale"], torch.full((4,), 4.0))
    assert distance(found.grads["x"], 3.0 * torch.cos(X)) <= 1e-6


def test_inputs_and_weights_are_not_saved() -> None:
    parts = check(nn.Linear(4, 4), X)
    assert parts.saved == []
    assert {node.meta["role"][0] for node in parts.backward.find_nodes(op="placeholder")} == {"input", "tangent"}


def test_unused_arguments_are_left_out_of_the_backward() -> None:
    parts = check(Mlp(), X)
    signature = parts.joint.unit.signature
    roles = [node.meta["role"] for node in parts.backward.find_nodes(op="placeholder")]
    used = {signature.inputs[index].name for kind, index in roles if kind == "input"}
    assert used == {"up.weight", "down.weight", "x"}


def test_forward_work_that_only_backward_needs_stays_in_the_forward_graph_if_it_must() -> None:
    """A value of several results, of which backward alone uses one."""

    class Statistics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x)

    parts = check(Statistics(), X)
    assert aten.native_layer_norm.default in targets(parts.forward)
    assert aten.native_layer_norm.default not in targets(parts.backward)
    again = check(Statistics(), X, recompute=True)
    assert again.saved == []


def test_calls_of_layers_and_collectives_run_once() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    region = graph.call_function(region_op.region._opoverload, ("t", "p", [x], []))
    allowed, reason = may_recompute(region)
    assert (allowed, reason) == (False, "a call of a layer or a collective runs once")
    gather = graph.call_function(torch.ops._c10d_functional.all_gather_into_tensor.default, (x, 2, "0"))
    assert not may_recompute(gather)[0]
    assert may_recompute(graph.call_function(aten.exp.default, (x,))) == (True, "")


def test_a_unit_without_gradients_saves_nothing() -> None:
    parts = split(unit_of(Mlp().requires_grad_(False), X.detach()))
    assert parts.saved == []
    assert not [node for node in parts.backward.nodes if node.op == "call_function"]


def test_constants_are_at_hand_in_both_graphs() -> None:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.exp(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])

    parts = check(Constant(), X)
    assert [place.op for place in parts.placements] == ["aten.exp.default"], "a constant is not saved"
    assert parts.backward.find_nodes(op="get_attr")


STEPS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a * b,
    lambda a, b: a + b.tanh(),
    lambda a, b: torch.sigmoid(a) - b,
    lambda a, b: (a @ b.t()) @ b,
    lambda a, b: torch.cat([a, b], 0)[1 : a.shape[0] + 1],
    lambda a, b: a.t().reshape(a.shape) * 0.5,
    lambda a, b: F.softplus(a.t()).t() + b.mean(),
    lambda a, b: a / (1 + b.square()),
]


class Random(nn.Module):
    def __init__(self, program: list[tuple[int, int, int]]) -> None:
        super().__init__()
        self.program = program
        self.proj = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        values = [x, self.proj(x)]
        for step, one, two in self.program:
            values.append(STEPS[step](values[one % len(values)], values[two % len(values)]))
        return values[-1] + values[-2]


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6)
)
def test_any_program_gives_autograds_gradients_kept_or_computed_again(program: list[tuple[int, int, int]]) -> None:
    torch.manual_seed(3)
    module = Random(program).double()
    args = (torch.randn(3, 4, dtype=torch.float64).requires_grad_(),)
    kept, again = check(module, *args), check(module, *args, recompute=True)
    assert again.saved_bytes <= kept.saved_bytes
    assert kept.saved_bytes == sum(nbytes(node.meta["val"]) for node in kept.saved)
