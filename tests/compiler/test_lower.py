"""Lowering: the best implementation that fits is taken, and the log says which and why not another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, fx, nn

from moec.compiler import dialect
from moec.compiler.lower import IMPLEMENTATIONS, TUNING, Implementation, Tuning, lower

from .units import unit_of

NORM = torch.ops.moec.rms_norm.default
OTHER = torch.ops.moec.l2_norm.default


class Norms(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(width) for width in widths)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(dialect.rms_norm(x, w, 1e-6) for x, w in zip(inputs, self.weights, strict=True))


def graph(*widths: int) -> fx.Graph:
    return unit_of(Norms(*widths), *[torch.randn(2, width) for width in widths]).graph


@pytest.fixture(autouse=True)
def _tables() -> Iterator[None]:
    """Every test starts from tables without an entry for the op, and leaves them as they were."""
    before = dict(IMPLEMENTATIONS), dict(TUNING)
    IMPLEMENTATIONS.pop(NORM, None)
    yield
    for table, saved in zip((IMPLEMENTATIONS, TUNING), before, strict=True):
        table.clear()
        table.update(saved)  # type: ignore[arg-type]


def norms(found: fx.Graph) -> list[object]:
    return [node.target for node in found.nodes if node.op == "call_function"]


def test_an_op_without_implementation_runs_its_reference() -> None:
    found = graph(4)
    assert lower(found) == {"moec.rms_norm.default": "reference, plain PyTorch inside the op"}
    assert norms(found) == [NORM]


def test_the_first_that_fits_is_taken() -> None:
    IMPLEMENTATIONS[NORM] = (
        Implementation("fast", OTHER, lambda node: ""),
        Implementation("slow", torch.ops.moec.gated_norm.default, lambda node: ""),
    )
    found = graph(4)
    assert lower(found) == {"moec.rms_norm.default": "fast"}
    assert norms(found) == [OTHER]


def test_refusals_are_reasons() -> None:
    IMPLEMENTATIONS[NORM] = (
        Implementation("tensor cores", OTHER, lambda node: "no GPU"),
        Implementation("wide", OTHER, lambda node: f"{node.name} is narrow"),
    )
    found = graph(4)
    (text,) = lower(found).values()
    assert text == "reference, plain PyTorch inside the op (tensor cores: no GPU; wide: rms_norm is narrow)"
    assert norms(found) == [NORM]


def test_the_choice_is_made_per_call() -> None:
    def narrow(node: fx.Node) -> str:
        return "" if node.meta["val"].shape[-1] > 4 else "narrow"

    IMPLEMENTATIONS[NORM] = (Implementation("wide", OTHER, narrow),)
    found = graph(4, 8)
    lower(found)
    assert norms(found) == [NORM, OTHER]


def test_both_choices_of_an_op_are_in_the_log() -> None:
    def narrow(node: fx.Node) -> str:
        return "" if node.meta["val"].shape[-1] > 4 else "narrow"

    IMPLEMENTATIONS[NORM] = (Implementation("wide", OTHER, narrow),)
    for widths in ((4, 8), (8, 4)):
        text = lower(graph(*widths))["moec.rms_norm.default"]
        assert set(text.split(" / ")) == {"wide", "reference, plain PyTorch inside the op (wide: narrow)"}


def test_tuning_sets_arguments_and_says_so() -> None:
    TUNING[NORM] = lambda node: Tuning({"eps": 0.5, "zero_centered": True}, "because of a test")
    found = graph(4)
    (text,) = lower(found).values()
    (node,) = found.find_nodes(op="call_function", target=NORM)
    names = [argument.name for argument in NORM._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    assert (given["eps"], given["zero_centered"]) == (0.5, True)
    assert text.endswith("(because of a test)")


def test_narrow_heads_get_short_chunks_on_a_cpu() -> None:
    def chunk(width: int) -> object:
        q, g, beta = torch.randn(1, 4, 1, width), -torch.rand(1, 4, 1, width), torch.rand(1, 4, 1)

        class Rule(nn.Module):
            def forward(self, q: Tensor, g: Tensor, beta: Tensor) -> Tensor:
                return dialect.delta_rule(q, q, q, g, beta, None, None, scale=1.0)[0]

        found = unit_of(Rule(), q, g, beta).graph
        lower(found)
        (node,) = found.find_nodes(op="call_function", target=torch.ops.moec.delta_rule.default)
        names = [argument.name for argument in node.target._schema.arguments]
        return (dict(zip(names, node.args, strict=False)) | node.kwargs).get("chunk", 64)

    assert (chunk(8), chunk(64)) == (16, 64)


def test_aten_is_left_alone() -> None:
    found = unit_of(nn.Linear(4, 4), torch.randn(2, 4)).graph
    before = str(found)
    assert lower(found) == {}
    assert str(found) == before
