"""Costs of graphs: FLOPs and bytes against counts made by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moec.compiler import dialect
from moec.compiler.cost import graph_cost, node_bytes, node_flops
from moec.compiler.differentiate import differentiate
from moec.compiler.graph import Unit

from .units import unit_of

FLOAT = 4


class Call(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def flops(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> float:
    return graph_cost(unit_of(Call(function), *[torch.randn(shape) for shape in shapes]).graph)["flops"]


@pytest.mark.parametrize(
    ("function", "shapes", "wanted"),
    [
        (torch.mm, [(3, 4), (4, 5)], 2 * 3 * 4 * 5),
        (torch.matmul, [(2, 3, 4), (4, 5)], 2 * 2 * 3 * 4 * 5),
        (torch.bmm, [(2, 3, 4), (2, 4, 5)], 2 * 2 * 3 * 4 * 5),
        (F.linear, [(2, 3, 4), (5, 4)], 2 * 2 * 3 * 4 * 5),
        (torch.addmm, [(5,), (3, 4), (4, 5)], 2 * 3 * 4 * 5),
        (torch.exp, [(3, 4)], 12),
        (torch.add, [(3, 4), (4,)], 12),
        (lambda x: x.t()[1:].reshape(2, -1), [(4, 3)], 0),
        (lambda x, w: dialect.rms_norm(x, w, 1e-6), [(3, 4), (4,)], 4 * 3 * 4),
    ],
)
def test_flops(function: Callable[..., Tensor], shapes: list[tuple[int, ...]], wanted: int) -> None:
    assert flops(function, *shapes) == wanted


def attention_unit() -> Unit:
    q, k, v = (torch.randn(2, 6, heads, 4, requires_grad=True) for heads in (4, 2, 2))
    return unit_of(Call(lambda q, k, v: dialect.attention(q, k, v, scale=0.5)[0]), q, k, v)


def test_dialect_ops_cost_what_their_definition_says_in_both_directions() -> None:
    joint = differentiate(attention_unit())
    costs = {str(node.target): node_flops(node) for node in joint.graph.nodes if "attention" in str(node.target)}
    definition = dialect.registry.DEFINITIONS["attention"]
    q, k, v = (torch.empty(2, 6, heads, 4) for heads in (4, 2, 2))
    given = {"q": q, "k": k, "v": v, "scale": 0.5, "window": 0, "causal": True}
    assert costs["moec.attention.default"] == float(definition.flops_of((), given)) > 0
    assert costs["moec.attention_backward.default"] == float(definition.backward_flops_of((), given))


def test_bytes_are_what_each_op_reads_and_writes() -> None:
    unit = unit_of(Call(lambda x, y: (x + y).t()), torch.randn(3, 4), torch.randn(4))
    add, transpose = (node for node in unit.graph.nodes if node.op == "call_function")
    assert node_bytes(add) == FLOAT * (12 + 4 + 12)
    assert node_bytes(transpose) == 0
    assert graph_cost(unit.graph) == {"flops": 12.0, "bytes": float(FLOAT * 28)}


def test_symbolic_sizes_count_by_their_hint_and_add_no_guard() -> None:
    def pool(x: Tensor, w: Tensor) -> Tensor:
        return dialect.rms_norm(F.linear(x, w), w[0], 1e-6).exp()

    args = torch.randn(6, 4), torch.randn(4, 4)
    dynamic = unit_of(Call(pool), *args, dynamic_shapes=(({0: torch.export.Dim("n")}, None),))
    environment = dynamic.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode.shape_env
    guards = len(environment.guards)
    assert graph_cost(dynamic.graph) == graph_cost(unit_of(Call(pool), *args).graph)
    assert len(environment.guards) == guards
