"""recognize_conv: conv1d with its padding and transposes, and sums over taps with and without documents."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moec.models.k3.short_conv import ShortConv
from moec.passes.normalize import Normalize
from moec.passes.recognize_conv import RecognizeConv

from .support import Call, apply, assert_golden, check, counts, graph_text, reasons, unit_of, what

C, W, T = 4, 3, 6
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])


class DepthwiseConv(nn.Module):
    """As transformers writes it: [B, T, C] -> [B, C, T], padded on both sides, cut, activated, back."""

    def __init__(self, activated: bool = True, padding: str = "both", bias: bool = False, **options: int) -> None:
        super().__init__()
        options = {"groups": C, "padding": W - 1 if padding == "both" else 0} | options
        self.conv = nn.Conv1d(C, C, W, bias=bias, **options)
        self.activated, self.padding = activated, padding

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        x = F.pad(x, (W - 1, 0)) if self.padding == "left" else x
        y = self.conv(x)[..., :T]
        return (F.silu(y) if self.activated else y).transpose(1, 2)


@pytest.mark.parametrize("activated", [True, False])
@pytest.mark.parametrize("padding", ["both", "left"])
def test_conv1d(activated: bool, padding: str) -> None:
    unit, report = check(RecognizeConv(), DepthwiseConv(activated, padding), torch.randn(2, T, C))
    assert counts(unit) == {"short_conv": 1}
    assert what(report) == ["short_conv of 4 channels, 3 taps" + (", SiLU" if activated else "")]
    assert not unit.graph.find_nodes(op="call_function", target=torch.ops.aten.transpose.int)


def test_golden_text() -> None:
    unit, _ = check(RecognizeConv(), DepthwiseConv(), torch.randn(2, T, C))
    assert_golden("short_conv", graph_text(unit))


def test_channels_first_results_are_transposed_back() -> None:
    module = Call(lambda x, w: F.silu(F.conv1d(x, w, padding=W - 1, groups=C)[..., :T]), w=torch.randn(C, 1, W))
    unit, _ = check(RecognizeConv(), module, torch.randn(2, C, T))
    assert counts(unit) == {"short_conv": 1}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"bias": True}, "bias present"),
        ({"groups": 2}, "it mixes channels"),
        ({"padding": "none"}, "padded by"),
        ({"dilation": 2}, "stride [1], dilation [2]"),
    ],
)
def test_near_misses(options: dict[str, object], reason: str) -> None:
    module = DepthwiseConv(**options)  # type: ignore[arg-type]
    unit, report = check(RecognizeConv(), module, torch.randn(2, T, C), exact=True)
    assert reason in "\n".join(reasons(report))
    assert not counts(unit)
    assert RecognizeConv().expected(unit).startswith("1 conv1d")


def test_cut_at_the_wrong_end() -> None:
    module = Call(lambda x, w: F.conv1d(x, w, padding=W - 1, groups=C)[..., 2:], w=torch.randn(C, 1, W))
    unit, report = check(RecognizeConv(), module, torch.randn(2, C, T), exact=True)
    assert not counts(unit)
    assert "the result has shape [2, 4, 8]" in "\n".join(reasons(report))


@pytest.mark.parametrize("width", [2, 4, 5])
@pytest.mark.parametrize("packed", [True, False])
def test_sum_over_taps(width: int, packed: bool) -> None:
    args = (torch.randn(2, T, C), DOCUMENTS) if packed else (torch.randn(2, T, C),)
    unit, report = check(RecognizeConv(), ShortConv(C, width), *args)
    assert counts(unit) == {"short_conv": 1}
    assert what(report) == [f"short_conv of 4 channels, {width} taps, SiLU" + (", by document" if packed else "")]
    assert not unit.graph.find_nodes(op="call_function", target=torch.ops.aten.pad.default)


def test_sum_over_taps_in_bfloat16() -> None:
    module = ShortConv(C, W).to(torch.bfloat16)
    unit, _ = check(RecognizeConv(), module, torch.randn(2, T, C).to(torch.bfloat16), DOCUMENTS, bound=2e-2)
    assert counts(unit) == {"short_conv": 1}


def test_sum_over_taps_of_any_length() -> None:
    length = torch.export.Dim("length", min=2, max=64)
    module = ShortConv(C, W)
    unit = unit_of(module, torch.randn(2, T, C), DOCUMENTS, dynamic_shapes=({1: length}, {1: length}))
    apply([Normalize(), RecognizeConv()], unit)
    assert counts(unit) == {"short_conv": 1}
    x, ids = torch.randn(2, 4, C), DOCUMENTS[:, :4]
    torch.testing.assert_close(unit.module(module.weight, x, ids)[0], module(x, ids))


def test_a_table_that_may_fall_is_no_document_id() -> None:
    unit = unit_of(ShortConv(C, W), torch.randn(2, T, C), DOCUMENTS)
    _, report = apply([Normalize(), RecognizeConv()], unit, documents=False)
    assert not counts(unit)
    assert any("are not provably consecutive" in reason for reason in reasons(report))


def _one_tap_missing(x: Tensor, w: Tensor) -> Tensor:
    return x * w[:, 2] + F.pad(x, (0, 0, 2, 0))[:, :T] * w[:, 0]


def _two_documents(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    def tap(back: int, by: Tensor) -> Tensor:
        same = by == F.pad(by, (back, 0), value=-1)[:, :T]
        return torch.where(same.unsqueeze(-1), F.pad(x, (0, 0, back, 0))[:, :T], 0.0) * w[:, 2 - back]

    return x * w[:, 2] + tap(1, ids) + tap(2, ids + 1)


@pytest.mark.parametrize(("function", "args"), [(_one_tap_missing, ()), (_two_documents, (DOCUMENTS,))])
def test_other_sums_are_left_alone(function: Callable[..., Tensor], args: tuple[Tensor, ...]) -> None:
    module = Call(lambda x, *rest, w: function(x, w, *rest), w=torch.randn(C, W))
    unit, report = check(RecognizeConv(), module, torch.randn(2, T, C), *args, exact=True)
    assert not counts(unit)
    assert report.near_misses
