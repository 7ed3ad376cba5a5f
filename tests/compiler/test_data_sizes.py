"""Sizes that are data (the rows an exchange delivers): backward reads them off a tensor that it has, or saves them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

import moec
from moec.compiler import dialect
from moec.compiler.partition import Partitioned
from moec.compiler.plan import MeshPlan, Plan
from moec.eager import EagerStep
from moec.runtime.simulate import simulate

from ..spine import WIDTH, Language, Layer, assert_equal_gradients, batch_for, distance, seeded
from .units import autograd, run_parts, split, unit_of

aten = torch.ops.aten


class Exchanged(nn.Module):
    """Rows that are exchanged with nobody, and some function of them to a scalar per column."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.function = function

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, WIDTH) * self.scale
        ends = torch.full((2,), rows.shape[0], dtype=torch.int32)
        counts = dialect.exchange_counts(ends, ranks=1, local_experts=2, role="exchange")
        total = self.function(dialect.exchange(rows, counts, role="exchange"))
        return hidden + total


def alone(rows: Tensor) -> Tensor:
    """Backward needs the number of rows and none of them."""
    return rows.sum(0)


def beside(rows: Tensor) -> Tensor:
    """Backward needs the exponentials, which have as many rows."""
    return rows.mul(0.1).exp().sum(0)


def doubled(rows: Tensor) -> Tensor:
    """Backward needs twice the number of rows."""
    return torch.cat((rows, rows)).sum(0)


def itself(rows: Tensor) -> Tensor:
    """Backward needs the rows."""
    return rows.square().sum(0)


def sizes_saved(parts: Partitioned) -> list[fx.Node]:
    return [node for node in parts.saved if isinstance(node.meta["val"], torch.SymInt)]


def sizes_read(graph: fx.Graph) -> list[str]:
    """What backward reads sizes off: roles of the placeholders."""
    return [
        str(node.args[0].meta.get("role", ("computed",))[0])
        for node in graph.find_nodes(op="call_function", target=aten.sym_size.int)
    ]  # type: ignore[union-attr]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("function", "saved", "read"), [(alone, 1, []), (beside, 0, ["saved"]), (doubled, 2, []), (itself, 0, ["saved"])]
)
def test_backward_has_the_size(
    function: Callable[[Tensor], Tensor], saved: int, read: list[str], recompute: bool
) -> None:
    module = Exchanged(function)
    hidden = torch.randn(2, 3, WIDTH, requires_grad=True)
    parts = split(unit_of(module, hidden), recompute)
    assert len(sizes_saved(parts)) == saved
    assert sizes_read(parts.backward) == read
    tangents = {0: torch.randn(2, 3, WIDTH)}

    def run(rank: int) -> None:
        found, wanted = run_parts(parts, module, [hidden], tangents), autograd(module, [hidden], tangents)
        assert distance(found.results[0], wanted.results[0]) <= 1e-6
        assert distance(found.grads["scale"], wanted.grads["scale"]) <= 1e-5
        assert distance(found.grads["hidden"], wanted.grads["input 0"]) <= 1e-5

    simulate(MeshPlan(), run)


@pytest.mark.parametrize("function", [alone, beside, doubled])
def test_emitted_programs_pass_sizes_on(function: Callable[[Tensor], Tensor]) -> None:
    plan = Plan(batch=2, length=6, check=True)
    model = seeded(Language, Exchanged(function), Layer(), Exchanged(function))
    step, batch = moec.compile(model, plan), batch_for(plan)
    assert "_assert_scalar" not in step.source  # that a size is not negative needs no check

    def run(rank: int) -> None:
        losses, wanted = EagerStep(model, plan).gradients(batch)
        assert distance(step.loss(batch)["lm_loss"], losses["lm_loss"]) <= 1e-6
        assert_equal_gradients(step.gradients(batch), wanted)

    simulate(MeshPlan(), run)
