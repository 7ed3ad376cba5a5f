"""recognize_norm: every spelling of RMS, gated and L2 norms, and what is left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from moec.passes.recognize_norm import RecognizeNorm

from .support import Call, apply, assert_golden, check, counts, graph_text, reasons, unit_of, what

D = 6
SQUARES: dict[str, Callable[[Tensor], Tensor]] = {
    "pow": lambda x: x.pow(2),
    "square": torch.square,
    "product": lambda x: x * x,
}
ROOTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rsqrt": lambda x, total: x * torch.rsqrt(total),
    "rsqrt first": lambda x, total: torch.rsqrt(total) * x,
    "sqrt": lambda x, total: x / torch.sqrt(total),
}


def _rms(square: str, root: str, early_cast: bool, centred: bool, flipped: bool) -> Callable[[Tensor, Tensor], Tensor]:
    def function(x: Tensor, w: Tensor) -> Tensor:
        wide = x.float()
        unit = ROOTS[root](wide, SQUARES[square](wide).mean(-1, keepdim=True) + 1e-5)
        scale = 1.0 + w if centred else w
        unit = unit.to(x.dtype) if early_cast else unit
        return (scale * unit if flipped else unit * scale).to(x.dtype)

    return function


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(sorted(SQUARES)),
    st.sampled_from(sorted(ROOTS)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_every_spelling_of_rms_norm(
    square: str, root: str, early: bool, centred: bool, flipped: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    module = Call(_rms(square, root, early, centred, flipped), w=torch.randn(D).to(dtype))
    bound = 1e-6 if dtype == torch.float32 else 2e-2
    unit, report = check(RecognizeNorm(), module, torch.randn(2, 3, D).to(dtype), bound=bound)
    assert counts(unit) == {"rms_norm": 1}
    assert what(report) == ["rms_norm over 6, eps 1e-05" + (", 1 + weight" if centred else "")]
    assert not report.near_misses
    (node,) = unit.graph.find_nodes(op="call_function", target=torch.ops.moec.rms_norm.default)
    assert node.args[3:] == (centred, early and dtype == torch.bfloat16)


def test_golden_text() -> None:
    module = Call(_rms("pow", "rsqrt", True, True, True), w=torch.randn(D).to(torch.bfloat16))
    unit, _ = check(RecognizeNorm(), module, torch.randn(2, 3, D).to(torch.bfloat16), bound=2e-2)
    assert_golden("rms_norm", graph_text(unit))


def test_float64_throughout() -> None:
    module = Call(lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w, w=torch.randn(D).double())
    unit, _ = check(RecognizeNorm(), module, torch.randn(2, D).double(), bound=1e-12)
    assert counts(unit) == {"rms_norm": 1}


def test_float64_computed_in_float32_stays_so() -> None:
    """The norm is of the rounded value: it is recognised behind the cast, and the results stay equal."""
    module = Call(_rms("pow", "rsqrt", False, False, False), w=torch.randn(D))
    unit, _ = check(RecognizeNorm(), module, torch.randn(2, D).double(), bound=1e-6)
    (node,) = unit.graph.find_nodes(op="call_function", target=torch.ops.moec.rms_norm.default)
    assert node.args[0].meta["val"].dtype == torch.float32


def test_a_result_that_stays_in_float32_gets_a_wide_input() -> None:
    module = Call(lambda x, w: (y := x.float()) * torch.rsqrt(y.pow(2).mean(-1, True) + 1e-5) * w, w=torch.randn(D))
    unit, _ = check(RecognizeNorm(), module, torch.randn(2, D).to(torch.bfloat16), bound=1e-6)
    assert counts(unit) == {"rms_norm": 1}


def test_torch_rms_norm() -> None:
    module = Call(lambda x, w: F.rms_norm(x, (D,), w, 1e-5) + F.rms_norm(x, (D,), w), w=torch.randn(D))
    unit, _ = check(RecognizeNorm(), module, torch.randn(2, D))
    nodes = unit.graph.find_nodes(op="call_function", target=torch.ops.moec.rms_norm.default)
    assert [node.args[2] for node in nodes] == [1e-5, torch.finfo(torch.float32).eps]


@pytest.mark.parametrize("order", ["weight first", "gate first"])
@pytest.mark.parametrize("activation", ["sigmoid", "silu", "written silu"])
def test_gated_norm(order: str, activation: str) -> None:
    act = {"sigmoid": torch.sigmoid, "silu": F.silu, "written silu": lambda g: g * torch.sigmoid(g)}[activation]

    def function(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
        unit = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return unit * w * act(gate) if order == "weight first" else act(gate) * unit * w

    unit, report = check(RecognizeNorm(), Call(function, w=torch.randn(D)), torch.randn(2, D), torch.randn(2, D))
    assert counts(unit) == {"gated_norm": 1}
    assert what(report) == [f"gated_norm over 6, {activation.split()[-1]} gate, eps 1e-06"]


@pytest.mark.parametrize("root", sorted(ROOTS))
def test_l2_norm(root: str) -> None:
    module = Call(lambda x: ROOTS[root](x, x.pow(2).sum(-1, keepdim=True) + 1e-6))
    unit, report = check(RecognizeNorm(), module, torch.randn(2, 3, D))
    assert counts(unit) == {"l2_norm": 1}
    assert what(report) == ["l2_norm over 6, eps 1e-06"]


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, w: _unit(x).sin() + w, "no weight"),
        (lambda x, w: (y := _unit(x)) * w + y, "is used outside the pattern too"),
        (lambda x, w: x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-5) * w, "instead of dimension -1"),
        (lambda x, w: x * torch.rsqrt(x.pow(2).mean((0, 1), keepdim=True) + 1e-5) * w, "instead of dimension -1"),
        (lambda x, w: _unit(x) * w.expand(2, D), "the weight has shape [2, 6], not one dimension"),
        (lambda x, w: _unit(x).half().float() * w, "the normalised value is cast to torch.float16"),
        (lambda x, w: F.rms_norm(x, (D,)) + w, "it has no weight"),
        (lambda x, w: F.normalize(x, dim=-1) * w, "its epsilon bounds the norm from below"),
    ],
)
def test_near_misses(function: Callable[[Tensor, Tensor], Tensor], reason: str) -> None:
    unit, report = check(RecognizeNorm(), Call(function, w=torch.randn(D)), torch.randn(2, D), exact=True)
    assert reason in "\n".join(reasons(report))
    assert not counts(unit)
    assert not report.matches


def test_a_gate_of_another_shape_is_left_outside() -> None:
    def function(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
        return _unit(x) * w * torch.sigmoid(gate)

    unit, _ = check(RecognizeNorm(), Call(function, w=torch.randn(D)), torch.randn(2, D), torch.randn(2, 1))
    assert counts(unit) == {"rms_norm": 1}


def test_the_warning_counts_what_was_left() -> None:
    unit = unit_of(Call(lambda x: torch.rsqrt(x)), torch.rand(3))
    apply([], unit)
    assert RecognizeNorm().expected(unit) == "1 reciprocal roots are in the graph, none was recognised as a norm"
