"""What the KDA kernels are said to hold while they run is what their launches allocate, counted on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from moec.compiler.allocations import AllocationCount
from moec.compiler.workspace import WORKSPACE
from tests.kernels import kda_cases

pytest.importorskip("triton")


class NoKernel:
    """In the place of a kernel: launches nothing."""

    arg_names: tuple[str, ...] = ()

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None


def call_of(op: Any, arguments: list[Any], results: Any) -> fx.Node:
    graph = fx.Graph()
    nodes = []
    for index, value in enumerate(arguments):
        node = graph.placeholder(f"value_{index}") if isinstance(value, Tensor) else value
        if isinstance(value, Tensor):
            node.meta["val"] = value
        nodes.append(node)
    call = graph.call_function(op, tuple(nodes))
    call.meta["val"] = results
    return call


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    "settings", [{}, {"conv": False}, {"width": 32, "value_heads": 4}, {"norm": False}, {"scalar": True}]
)
def test_the_rule_counts_what_is_allocated(
    direction: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from moec.codegen.triton import kda, kda_launch

    for name in vars(kda_launch):
        if name.startswith("kda_"):
            monkeypatch.setattr(kda_launch, name, NoKernel())
    arguments = kda_cases.inputs(700, dtype=torch.bfloat16, device="cpu", **settings)
    grad = kda_cases.grad_for(arguments).to("meta")
    arguments = [value.to("meta") if isinstance(value, Tensor) else value for value in arguments]
    inputs = kda_launch.Inputs(*arguments)
    op, given = kda.FORWARD, arguments
    with torch.no_grad(), AllocationCount() as count:
        if direction == "forward":
            results: Any = kda_launch.forward(inputs)
        else:
            op, given = kda.BACKWARD, [grad, *arguments]
            results = kda_launch.backward(grad, inputs)
        expected = count.peak - count.held
    found = WORKSPACE[op](call_of(op, given, results))
    assert found == pytest.approx(expected, rel=0.01)
    assert expected > 0
