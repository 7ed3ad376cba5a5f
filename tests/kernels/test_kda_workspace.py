"""What the KDA kernels are said to hold while they run is what their launches allocate, counted on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

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
    "settings",
    [
        {},
        {"conv": False},
        {"width": 32, "value_heads": 4},
        {"norm": False},
        {"scalar": True},
        {"width": 256, "state": True},
        {"taps": 6},
    ],
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
    final = [value.to("meta") for value in kda_cases.state_grad_for(arguments)]
    arguments = [value.to("meta") if isinstance(value, Tensor) else value for value in arguments]
    inputs, results = kda_launch.Inputs(*arguments), None
    op, given = (kda.FORWARD_WITH_STATE if final else kda.FORWARD), arguments
    with torch.no_grad(), AllocationCount() as count:
        if direction == "forward":
            results = kda_launch.forward_with_state(inputs) if final else kda_launch.forward(inputs)
        else:
            op, given = (kda.BACKWARD_WITH_STATE if final else kda.BACKWARD), [grad, *final, *arguments]
            results = kda_launch.backward_with_state(grad, *(final or [None]), inputs)[: None if final else -1]
        expected = count.peak - count.held
    found = WORKSPACE[op](call_of(op, given, results))
    assert found == pytest.approx(expected, rel=0.01)
    assert expected > 0


@pytest.mark.parametrize(("conv", "expected"), [(True, (4, 10)), (False, (4, 9))])
def test_nothing_but_the_kernels_is_launched(
    conv: bool, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from moec.codegen.triton import kda_launch

    launched: list[str] = []

    class Counted(NoKernel):
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **kwargs: launched.append(self.name)

    class OnlyRoom(TorchDispatchMode):
        """No PyTorch op that reads or writes numbers: room is made, and looked at in another shape."""

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert "empty" in str(function) or "detach" in str(function), function
            return function(*args, **(kwargs or {}))

    for name in vars(kda_launch):
        if name.startswith("kda_"):
            monkeypatch.setattr(kda_launch, name, Counted(name))
    arguments = kda_cases.inputs(130, dtype=torch.bfloat16, conv=conv)
    grad = kda_cases.grad_for(arguments).to("meta")
    inputs = kda_launch.Inputs(*(value.to("meta") if isinstance(value, Tensor) else value for value in arguments))
    with torch.no_grad(), OnlyRoom():
        kda_launch.forward(inputs)
        forward = len(launched)
        kda_launch.backward(grad, inputs)
    assert (forward, len(launched) - forward) == expected
