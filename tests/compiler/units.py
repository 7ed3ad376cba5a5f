"""Units from modules, and running what differentiation and partition make of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind

from moec.compiler.capture import _inline_constant
from moec.compiler.differentiate import Joint, differentiate
from moec.compiler.graph import InputValue, OutputValue, Signature, Unit, source_line
from moec.compiler.partition import KEEP, RECOMPUTE, Partitioned, every, partition

_KINDS = {InputKind.PARAMETER: "weight", InputKind.BUFFER: "buffer", InputKind.USER_INPUT: "input"}


def unit_of(module: nn.Module, *args: Tensor, dynamic_shapes: Any = None, name: str = "unit") -> Unit:
    """The unit that a capture makes of a module with these inputs."""
    exported = torch.export.export(module, args, strict=False, dynamic_shapes=dynamic_shapes)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    given = iter(args)
    inputs = []
    placeholders = exported.graph_module.graph.find_nodes(op="placeholder")
    for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True):
        if spec.kind not in _KINDS:
            _inline_constant(exported.graph_module, node, exported.constants[str(spec.target)])
            continue
        kind: Any = _KINDS[spec.kind]
        source = next(given) if kind == "input" else parameters.get(str(spec.target))
        inputs.append(InputValue(kind, str(spec.target or spec.arg.name), source is not None and source.requires_grad))
    graph = exported.graph_module.graph
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {"": ("", None)}
        path = str(list(stack.values())[-1][0]).removeprefix("L['self'].")
        node.meta["custom"] = {"path": "" if path == "L['self']" else path, "line": source_line(node)}
    count = len(graph.output_node().args[0])  # type: ignore[arg-type]
    return Unit(
        name,
        exported.graph_module,
        Signature(tuple(inputs), tuple(OutputValue("result", f"r{i}") for i in range(count))),
    )


@dataclass
class Ran:
    """What a run yields: results, new buffer values by name, gradients by input name."""

    results: list[Tensor]
    buffers: dict[str, Tensor]
    grads: dict[str, Tensor]


def run_parts(parts: Partitioned, module: nn.Module, args: Sequence[Tensor], tangents: dict[int, Tensor]) -> Ran:
    """Forward, then backward from only what the forward saved and the inputs."""
    joint = parts.joint
    inputs = _inputs(joint.unit, module, args)
    outputs = fx.Interpreter(fx.GraphModule(joint.module, parts.forward)).run(*inputs)
    results, buffers = outputs[: len(joint.results)], outputs[len(joint.results) : len(outputs) - len(parts.saved)]
    sources = {"input": inputs, "saved": outputs[len(outputs) - len(parts.saved) :], "tangent": tangents}
    roles = [node.meta["role"] for node in parts.backward.find_nodes(op="placeholder")]
    given = [sources[kind][index] for kind, index in roles]  # type: ignore[index]
    grads = fx.Interpreter(fx.GraphModule(joint.module, parts.backward)).run(*given)
    names = [joint.unit.signature.inputs[index].name for index in joint.grads]
    return Ran(list(results), dict(zip(joint.buffers, buffers, strict=True)), dict(zip(names, grads, strict=True)))


def run_joint(joint: Joint, module: nn.Module, args: Sequence[Tensor], tangents: dict[int, Tensor]) -> Ran:
    """All outputs of the joint graph at once."""
    values = dict(zip(joint.inputs, _inputs(joint.unit, module, args), strict=True))
    values |= {node: tangents[index] for index, node in joint.tangents.items()}
    graph, copies = fx.Graph(), {}
    for node in joint.graph.nodes:
        if node.op != "output":
            copies[node] = graph.node_copy(node, lambda source: copies[source])
    grads = {joint.unit.signature.inputs[index].name: node for index, node in joint.grads.items()}
    graph.output(
        (
            [copies[n] for n in joint.results],
            {k: copies[n] for k, n in joint.buffers.items()},
            {k: copies[n] for k, n in grads.items()},
        )
    )
    order = [values.get(node) for node in joint.graph.find_nodes(op="placeholder")]
    return Ran(*fx.Interpreter(fx.GraphModule(joint.module, graph)).run(*order))


def autograd(module: nn.Module, args: Sequence[Tensor], tangents: dict[int, Tensor]) -> Ran:
    """The same by eager autograd; buffers of `module` are changed."""
    leaves = [arg.detach().clone().requires_grad_(arg.requires_grad) for arg in args]
    module.zero_grad(set_to_none=True)
    results = module(*leaves)
    results = list(results) if isinstance(results, tuple) else [results]
    torch.autograd.backward([results[i] for i in tangents], list(tangents.values()))
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    unit_names = [f"input {i}" for i in range(len(args))]
    grads |= {name: leaf.grad for name, leaf in zip(unit_names, leaves, strict=True) if leaf.grad is not None}
    return Ran([r.detach() for r in results], dict(module.named_buffers()), grads)


def split(unit: Unit, recompute: bool = False) -> Partitioned:
    return partition(differentiate(unit), every(RECOMPUTE if recompute else KEEP))


def _inputs(unit: Unit, module: nn.Module, args: Sequence[Tensor]) -> list[Tensor]:
    state = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    given = iter(args)
    values = [next(given) if value.kind == "input" else state[value.name] for value in unit.signature.inputs]
    return [value.detach().clone() for value in values]
