"""Layers on several ranks: a unit with its experts spread, differentiated and partitioned, run in lock step.

The rows of a batch are divided among the ranks. Compared is one rank with the whole batch: results and gradients of
inputs row by row, gradients of dense weights summed over ranks, of experts put together, counts summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from moec.compiler.capture import capture
from moec.compiler.differentiate import differentiate
from moec.compiler.graph import InputValue, Unit
from moec.compiler.log import PassLog
from moec.compiler.partition import KEEP, RECOMPUTE, Partitioned, every, partition
from moec.compiler.plan import MeshPlan, Plan
from moec.fused_stage import run_passes
from moec.models.adapters import training_view
from moec.preflight import example_inputs
from moec.runtime.simulate import simulate


@dataclass
class Values:
    """Results by position, new buffer values, gradients by input name, and rows beyond a capacity."""

    results: list[Tensor]
    buffers: dict[str, Tensor]
    grads: dict[str, Tensor]
    overflow: list[Tensor] = field(default_factory=list)


@dataclass
class Given:
    """What a layer is run on: values of the whole batch by input name, gradients of its results by position.

    rows: inputs whose first dimension is the batch's.
    """

    values: dict[str, Tensor]
    tangents: dict[int, Tensor]
    rows: set[str] = field(default_factory=set)


def units_of(model: nn.Module, plan: Plan) -> tuple[dict[str, Unit], PassLog]:
    """The units of a model after all passes, and the log."""
    model.train()
    view = training_view(model, plan)
    log = PassLog()
    captured = capture(view, plan, example_inputs(model, plan))
    run_passes(captured, plan, log)
    return captured.program.units, log


def layers_with_experts(units: dict[str, Unit]) -> list[str]:
    """Names of the layer templates that hold experts."""
    permute = torch.ops.moec.permute.default
    return [
        name
        for name, unit in units.items()
        if not unit.is_outer and unit.graph.find_nodes(op="call_function", target=permute)
    ]


def given_for(whole: Unit, model: nn.Module, batch: int, seed: int = 0) -> Given:
    """The first layer's own weights, random inputs and random gradients of the results, for a batch of `batch` rows."""
    generator = torch.Generator().manual_seed(seed)
    body = model.get_submodule(whole.instances[0]) if whole.instances[0] else model
    state = dict(body.named_parameters(remove_duplicate=False)) | dict(body.named_buffers(remove_duplicate=False))
    given = Given({}, {})
    for node, value in whole.placeholders():
        fake = node.meta["val"]
        if value.kind != "input":
            given.values[value.name] = state[value.name].detach().clone()
            continue
        shape = [int(size) for size in fake.shape]
        if fake.is_floating_point():
            given.values[value.name] = torch.randn(shape, generator=generator, dtype=fake.dtype)
        else:
            given.values[value.name] = torch.zeros(shape, dtype=fake.dtype)
        if shape and shape[0] == batch:
            given.rows.add(value.name)
    for index, node in enumerate(whole.graph.output_node().args[0]):  # type: ignore[arg-type]
        value = node.meta["val"]
        if value.is_floating_point():
            shape = [int(size) for size in value.shape]
            given.tangents[index] = torch.randn(shape, generator=generator, dtype=value.dtype)
    return given


def run_whole(unit: Unit, given: Given, *, recompute: bool = False) -> Values:
    """One rank, the whole batch."""
    parts = partition(differentiate(unit), every(RECOMPUTE if recompute else KEEP))
    return run_parts(parts, given.values, given.tangents)


def run_spread(
    unit: Unit, mesh: MeshPlan, given: Given, parts: Partitioned | None = None, *, recompute: bool = False
) -> list[Values]:
    """All ranks, each with its rows; experts that no rank holds (padding) are NaN, so that nothing can read them."""
    ready = parts or partition(differentiate(unit), every(RECOMPUTE if recompute else KEEP))
    return simulate(mesh, lambda rank: run_parts(ready, *_of_rank(unit, mesh, given, rank)))


def joined(unit: Unit, mesh: MeshPlan, given: Given, ranks: Sequence[Values]) -> Values:
    """What the ranks' values are together, to be compared with those of one rank."""
    inputs = {value.name: value for value in unit.signature.inputs}
    results = [torch.cat(parts) for parts in zip(*(rank.results for rank in ranks), strict=True)]
    buffers = {
        name: given.values[name] + sum(rank.buffers[name] - given.values[name] for rank in ranks)
        for name in ranks[0].buffers
    }
    grads = {}
    for name in ranks[0].grads:
        parts = [rank.grads[name] for rank in ranks]
        if name in given.rows:
            grads[name] = torch.cat(parts)
        elif inputs[name].experts:
            experts = torch.cat([torch.stack(parts[index :: mesh.ep]).sum(0) for index in range(mesh.ep)])
            assert not experts[inputs[name].experts :].any(), f"{name}: padding has a gradient"
            grads[name] = experts[: inputs[name].experts]
        else:
            grads[name] = torch.stack(parts).sum(0)
    overflow = [torch.stack(parts).sum(0) for parts in zip(*(rank.overflow for rank in ranks), strict=True)]
    return Values(results, buffers, grads, overflow)


def run_parts(parts: Partitioned, values: dict[str, Tensor], tangents: dict[int, Tensor]) -> Values:
    """Forward, then backward from only what the forward saved and the inputs."""
    joint = parts.joint
    inputs = [values[value.name] for value in joint.unit.signature.inputs]
    outputs = fx.Interpreter(fx.GraphModule(joint.module, parts.forward)).run(*inputs)
    count = len(outputs) - len(parts.saved)
    sources: dict[str, Any] = {"input": inputs, "saved": outputs[count:], "tangent": tangents}
    roles = [node.meta["role"] for node in parts.backward.find_nodes(op="placeholder")]
    grads = fx.Interpreter(fx.GraphModule(joint.module, parts.backward)).run(*(sources[k][i] for k, i in roles))
    names = [joint.unit.signature.inputs[index].name for index in joint.grads]
    split = len(joint.results)
    results = list(zip(joint.unit.signature.outputs, outputs[:split], strict=True))
    return Values(
        [value for output, value in results if output.kind == "result"],
        dict(zip(joint.buffers, outputs[split:count], strict=True)),
        dict(zip(names, grads, strict=True)),
        [value for output, value in results if output.kind == "overflow"],
    )


def assert_same(found: Values, wanted: Values, bound: float = 1e-5) -> None:
    """Results within 1e-6, gradients within `bound` (relative, per tensor), counts and zeros exactly."""
    assert found.grads.keys() == wanted.grads.keys()
    pairs = [(f"result {i}", a, b, 1e-6) for i, (a, b) in enumerate(zip(found.results, wanted.results, strict=True))]
    pairs += [(name, found.buffers[name], value, 0.0) for name, value in wanted.buffers.items()]
    pairs += [(name, found.grads[name], value, bound) for name, value in wanted.grads.items()]
    for name, a, b, limit in pairs:
        assert a.shape == b.shape, name
        size = float(b.double().norm())
        error = float((a.double() - b.double()).norm())
        assert error <= limit * size if limit else torch.equal(a, b), f"{name}: {error / (size or 1):.1e}"


def check_layer(
    make: Callable[[], nn.Module],
    mesh: MeshPlan,
    *,
    batch: int = 24,
    plan: Plan | None = None,
    change: Callable[[str, Given], None] | None = None,
    recompute: bool = False,
) -> list[str]:
    """Every layer with experts of a model: the same on `mesh` as on one rank. Returns the layers' names.

    batch: rows over all ranks. change: alters what a layer is run on.
    """
    plan = plan or Plan(length=8, check=True)
    model = make()
    whole, _ = units_of(model, replace(plan, batch=batch))
    spread, _ = units_of(model, replace(plan, batch=batch // mesh.world, mesh=mesh))
    names = layers_with_experts(spread)
    for name in names:
        given = given_for(whole[name], model, batch)
        if change is not None:
            change(name, given)
        wanted = run_whole(whole[name], given)
        ranks = run_spread(spread[name], mesh, given, recompute=recompute)
        assert_same(joined(spread[name], mesh, given, ranks), wanted)
        assert any(value.experts for value in spread[name].signature.inputs)
    return names


def _of_rank(unit: Unit, mesh: MeshPlan, given: Given, rank: int) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
    def part(tensor: Tensor) -> Tensor:
        return tensor.chunk(mesh.world)[rank].clone()

    values = {}
    for node, value in unit.placeholders():
        tensor = given.values[value.name]
        if value.experts:
            values[value.name] = local_experts(tensor, value, node.meta["val"].shape[0], rank % mesh.ep)
        else:
            values[value.name] = part(tensor) if value.name in given.rows else tensor.clone()
    return values, {index: part(tensor) for index, tensor in given.tangents.items()}


def local_experts(tensor: Tensor, value: InputValue, count: int, index: int) -> Tensor:
    """The experts of one rank, NaN where there are no more."""
    assert tensor.shape[0] == value.experts
    found = tensor.new_full((count, *tensor.shape[1:]), float("nan"))
    mine = tensor[index * count : (index + 1) * count]
    found[: len(mine)] = mine
    return found
