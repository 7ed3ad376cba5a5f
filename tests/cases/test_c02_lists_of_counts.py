"""C02: experts by a Python list of counts: no break under fullgraph, otherwise breaks that the log lists with cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moec import backend
from moec.backend import BackendLog

from ..moec.dynamo import assert_same, batch_of, compiled
from ..spine import WIDTH, Language, Layer, seeded

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Split(nn.Module):
    """Experts by a Python list of counts, which no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.router = nn.Linear(WIDTH, 2)

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        experts = self.router(tokens).argmax(-1)
        order = experts.argsort(stable=True)
        counts = torch.stack([(experts == expert).sum() for expert in range(2)])
        parts = tokens[order].split(counts.tolist())
        rows = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return hidden + torch.zeros_like(rows).index_copy(0, order, rows).view_as(hidden)


class Choosing(Layer):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) if hidden.sum() > 0 else hidden


def assert_an_error_with_its_line() -> None:
    model = seeded(Language, Choosing())
    with pytest.raises(Exception, match=r"if hidden.sum\(\) > 0 else hidden") as caught:
        compiled(model)[0](*batch_of())
    line = Choosing.forward.__code__.co_firstlineno + 1
    assert f'{__file__}", line {line}, in forward' in str(caught.value)


def test_c02_a_break_is_an_error_with_its_line_under_fullgraph() -> None:
    assert_an_error_with_its_line()


def test_c02_a_list_of_counts_is_no_break_under_fullgraph() -> None:
    model = seeded(Language, Split(), Layer())
    function, log = compiled(model)
    for seed in range(3):
        assert_same(function, model, *batch_of(seed=seed))
    assert (len(log.compiled), log.breaks) == (1, [])


def assert_breaks_are_listed(log: BackendLog) -> None:
    """The line of the list, its reason, and what leaves the graph there, in the log and in its text."""
    assert len(log.compiled) > 1
    at_the_list = [found for found in log.breaks if "in Split.forward" in found.where]
    assert at_the_list
    found = at_the_list[0]
    line = Split.forward.__code__.co_firstlineno
    number = int(found.where.split(":")[1].split(" ")[0])
    assert line < number < line + 9, "the line of the list of counts"
    assert found.module == "router", "what ran last, below the frame that broke"
    assert found.reason.startswith("Data dependent operator")
    assert found.values > 0
    assert found.bytes > 0
    assert f"graph break at {found.where}" in str(log)
    assert "leave the graph" in str(log)


def test_c02_breaks_are_listed_and_results_are_eagers() -> None:
    model = seeded(Language, Split(), Layer())
    function, log = compiled(model, fullgraph=False)
    for seed in range(2):
        assert_same(function, model, *batch_of(seed=seed))
    assert_breaks_are_listed(log)


def test_c02_a_silent_break_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that does not look at why a graph ends; and, under fullgraph, breaks that are let pass."""
    monkeypatch.setattr(backend, "_note_break", lambda gm, log: None)
    function, log = compiled(seeded(Language, Split(), Layer()), fullgraph=False)
    function(*batch_of())
    with pytest.raises(AssertionError):
        assert_breaks_are_listed(log)


def test_c02_a_break_that_fullgraph_lets_pass_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.compile

    def lax(model: Any, **options: Any) -> Any:
        return plain(model, **{**options, "fullgraph": False})

    monkeypatch.setattr(torch, "compile", lax)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        assert_an_error_with_its_line()
