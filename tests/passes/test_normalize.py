"""normalize: one spelling for each thing, values bitwise the same."""

from __future__ import annotations

import pytest
import torch

from moec.passes.normalize import Normalize

from .support import Call, apply, assert_golden, check, graph_text, reasons, unit_of, what


def test_noop_casts_and_views_disappear() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.to(torch.float32).type_as(x).view(x.shape).expand(-1, -1) * 1.0
        return torch.nn.functional.dropout(y[:, :], 0.0).transpose(0, 1).mT.permute(1, 0).t().contiguous() + 1

    unit, report = check(Normalize(), Call(function), torch.randn(3, 4), exact=True)
    assert_golden("normalize_noops", graph_text(unit))
    assert any("_assert_tensor_metadata" in text for text in what(report))


def test_real_casts_stay() -> None:
    unit, _ = check(Normalize(), Call(lambda x: x.double().type_as(x).to(torch.bfloat16)), torch.randn(3), exact=True)
    assert [n.args[1] for n in unit.graph.nodes if n.op == "call_function"] == [
        torch.float64,
        torch.float32,
        torch.bfloat16,
    ]


def test_views_become_reshapes_and_chains_collapse() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.view(6, 4).view(2, 3, 4).unflatten(-1, (2, 2)).flatten(0, 1).view_as(x.reshape(6, 2, 2)) * 2

    unit, _ = check(Normalize(), Call(function), torch.randn(24), exact=True)
    assert_golden("normalize_views", graph_text(unit))


def test_inplace_on_fresh_values_becomes_functional() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        values, indices = x.topk(2)
        values /= values.sum(-1, keepdim=True)
        flags = torch.zeros_like(x).scatter_(1, indices, 1.0)
        return flags.mul_(values.sum()).add_(1)

    unit, report = check(Normalize(), Call(function), torch.randn(3, 5), exact=True)
    assert not any(
        str(n.target).split(".")[1].endswith("_")
        for n in unit.graph.nodes
        if n.op == "call_function" and "aten" in str(n.target)
    )
    assert not report.near_misses
    assert_golden("normalize_inplace", graph_text(unit))


def test_slices_written_into_an_empty_buffer_become_a_cat() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        buffer = a.new_empty(2, 3, 5)
        buffer[..., :3] = a
        buffer[..., 3:] = b
        return buffer * 2

    unit, _ = check(Normalize(), Call(function), torch.randn(2, 3, 3), torch.randn(2, 1, 2), exact=True)
    assert_golden("normalize_cat", graph_text(unit))


def _gap(a: torch.Tensor) -> torch.Tensor:
    buffer = a.new_zeros(2, 6)
    buffer[:, :3] = a
    buffer[:, 4:] = a[:, :2]
    return buffer


def _view_used_later(a: torch.Tensor) -> torch.Tensor:
    y = a * 2
    view = y[0]
    y.add_(1)
    return view + y.sum()


def _view_of_a_result_used_later(a: torch.Tensor) -> torch.Tensor:
    y = (a * 2).add_(1)
    view = y[0]
    y.mul_(3)
    return view + y.sum()


def _narrowing(a: torch.Tensor) -> torch.Tensor:
    y = a.to(torch.bfloat16) + 1
    y *= a
    return y


def _through_a_view(a: torch.Tensor) -> torch.Tensor:
    y = a * 2
    y[0].add_(1)
    return y


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_gap, "the slices written do not fill new_zeros"),
        (_view_used_later, "shares its memory and is used later"),
        (_view_of_a_result_used_later, "shares its memory and is used later"),
        (_narrowing, "its functional form gives torch.float32 instead of torch.bfloat16"),
        (_through_a_view, "it writes through a view, select"),
    ],
)
def test_other_inplace_ops_stay(function: object, reason: str) -> None:
    _, report = check(Normalize(), Call(function), torch.randn(2, 3), exact=True)  # type: ignore[arg-type]
    assert reason in "\n".join(reasons(report))


def test_views_of_what_is_written_keep_sharing_memory() -> None:
    def function(a: torch.Tensor) -> torch.Tensor:
        y = a * 2
        y.view(6)[2:4].add_(1)
        return y.view(3, 2) * 1.0

    check(Normalize(), Call(function), torch.randn(2, 3), exact=True)


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(x.detach().sum(0))
        return x * 2


def test_buffer_updates_stay() -> None:
    unit = unit_of(Counter(), torch.randn(2, 3))
    (report,) = apply([Normalize()], unit)
    assert any("add_" in str(node.target) for node in unit.graph.nodes)
    assert not report.near_misses


def test_symbolic_length() -> None:
    module = Call(lambda x: x.view(x.shape[0], x.shape[1], 2, 2).transpose(1, 2).contiguous().view(x.shape[0], -1) * 1)
    length = torch.export.Dim("length", min=2, max=64)
    unit = unit_of(module, torch.randn(2, 8, 4), dynamic_shapes=(({1: length},),))
    apply([Normalize()], unit)
    x = torch.randn(2, 5, 4)
    assert torch.equal(unit.module(x)[0], module(x))


def test_is_deterministic_and_idempotent() -> None:
    chain = Call(lambda x, w: (x @ w).view(12).view(3, 4).type_as(x).add_(1).t(), w=torch.randn(4, 4))
    module, args = chain, torch.randn(3, 4)
    first, second = unit_of(module, args), unit_of(module, args)
    apply([Normalize()], first)
    apply([Normalize()], second)
    assert graph_text(first) == graph_text(second)
    (again,) = apply([Normalize()], second)
    assert graph_text(first) == graph_text(second)
    assert not again.matches
