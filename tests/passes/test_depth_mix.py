"""recognize_depth_mix: stack or cat, scores normalised after or values before, and what is left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moec.models.k3.residual import DepthMix
from moec.passes.recognize_depth_mix import RecognizeDepthMix

from .support import Call, assert_golden, check, counts, graph_text, reasons, what

D = 6


def _sources(count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(2, 3, D, generator=generator).to(dtype) for _ in range(count)]


class Mix(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = DepthMix(D, 1e-5)
        torch.nn.init.normal_(self.mix.proj)

    def forward(self, *sources: Tensor) -> Tensor:
        return self.mix(list(sources))


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_own_form(count: int, dtype: torch.dtype) -> None:
    bound = 1e-6 if dtype == torch.float32 else 2e-2
    unit, report = check(RecognizeDepthMix(), Mix().to(dtype), *_sources(count, dtype), bound=bound)
    assert what(report) == [f"depth_mix of {count} sources, eps 1e-05"]
    assert counts(unit) == {"depth_mix": 1}
    assert len([node for node in unit.graph.nodes if node.op == "call_function"]) == 1


def test_golden_text() -> None:
    unit, _ = check(RecognizeDepthMix(), Mix(), *_sources(3))
    assert_golden("depth_mix", graph_text(unit))


def _mixed(stacked: Tensor, scores: Tensor) -> Tensor:
    return (stacked * scores.softmax(-1).unsqueeze(-1)).sum(-2)


def _inverse(x: Tensor, keep: bool) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=keep) + 1e-6)


FORMS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "values normalised": lambda a, b, n, p: _mixed(
        s := torch.stack([a, b], dim=-2), (s * _inverse(s, True) * (n * p)).sum(-1)
    ),
    "norm, then projection": lambda a, b, n, p: _mixed(
        s := torch.stack([a, b], dim=2), (s * _inverse(s, True) * n * p).sum(-1)
    ),
    "concatenated": lambda a, b, n, p: _mixed(
        s := torch.cat([a.unsqueeze(-2), b.unsqueeze(2)], dim=-2), (s * (n * p)).sum(-1) * _inverse(s, False)
    ),
}


@pytest.mark.parametrize("name", sorted(FORMS))
def test_other_spellings(name: str) -> None:
    module = Call(lambda a, b, n, p: FORMS[name](a, b, n, p), n=torch.randn(D), p=torch.randn(D))
    unit, report = check(RecognizeDepthMix(), module, *_sources(2))
    assert what(report) == ["depth_mix of 2 sources, eps 1e-06"]
    assert counts(unit) == {"depth_mix": 1}


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda a, b, n, p: _mixed(s := torch.stack([a, b], -2), (s * n).sum(-1)), "expected aten.mul.Tensor"),
        (
            lambda a, b, n, p: (s := torch.stack([a, b], -2), _mixed(s, (s * n * p).sum(-1) * _inverse(s, False)))[1],
            "expected",
        ),
        (
            lambda a, b, n, p: _mixed(s := torch.cat([a, b], 1), (s * (n * p)).sum(-1) * _inverse(s, False)),
            "have no dimension of their own",
        ),
    ],
)
def test_near_misses(function: Callable[..., Tensor], reason: str) -> None:
    module = Call(lambda a, b, n, p: function(a, b, n, p), n=torch.randn(D), p=torch.randn(D))
    unit, report = check(RecognizeDepthMix(), module, *_sources(2), exact=True)
    assert reason in "\n".join(reasons(report))
    assert not counts(unit)
