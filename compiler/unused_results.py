"""Results of layers that the objective does not depend on.

Where nothing depends on a result, eager autograd gives no gradient to what only that result needs, and the optimizer
leaves such weights alone. The backward of a template takes a gradient for each of its results, and zeros would reach
those weights. So a result that the objective does not depend on is detached in the template; layers of one template
that differ in what is used get templates of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from moec.compiler.capture import Capture
from moec.compiler.graph import OUTER, Unit, tensor_meta
from moec.compiler.template import Template

aten = torch.ops.aten


def detach_unused_results(captured: Capture, objective: str) -> list[str]:
    """Detach them, splitting templates where needed; returns what to say about it in the log.

    objective: name of the outer result that backward starts from.
    """
    notes = []
    used = _used_results(captured, objective)
    for template in list(captured.templates.values()):
        wanted = frozenset(template.tangent_positions)
        groups: dict[frozenset[int], list[str]] = {}
        for path in template.paths:
            groups.setdefault(wanted & used.get(path, frozenset()), []).append(path)
        stays = wanted if wanted in groups else next(iter(groups), wanted)
        for kept in sorted(groups, key=lambda kept: kept == stays):  # the unit is copied before it is changed itself
            lost = [template.unit.signature.outputs[index].name for index in sorted(wanted - kept)]
            part = template if kept == stays else _split(captured, template, groups[kept], "_".join(lost))
            if lost:
                _detach(part.unit, wanted - kept)
                layers = ", ".join(groups[kept])
                notes.append(f"no loss depends on {', '.join(lost)} of {layers}: no gradient flows from there")
    return notes


def _used_results(captured: Capture, objective: str) -> dict[str, frozenset[int]]:
    """Layer path -> positions of the results from which a gradient can come back."""
    outer = captured.program.outer.graph
    start: Any = outer.output_node().args[0][captured.results.index(objective)]  # type: ignore[index]
    found: dict[str, set[int]] = {}
    seen: set[fx.Node] = set()
    stack: list[fx.Node] = [start]
    while stack:
        node = stack.pop()
        if node in seen or not _passes_gradient(node):
            continue
        seen.add(node)
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        if source is not None and source.target is torch.ops.moec.region.default:
            found.setdefault(str(source.args[1]), set()).add(int(node.args[1]))  # type: ignore[arg-type]
        stack += node.all_input_nodes
    return {path: frozenset(positions) for path, positions in found.items()}


def _passes_gradient(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return node.target is not aten.detach.default and (not isinstance(value, Tensor) or value.is_floating_point())


def _split(captured: Capture, template: Template, paths: list[str], suffix: str) -> Template:
    """Give the layers at `paths` a template and a unit of their own."""
    name = f"{template.name}_without_{suffix}"
    unit = _copy(template.unit, name, tuple(paths))
    part = replace(template, name=name, unit=unit, calls=[call for call in template.calls if call.path in paths])
    template.calls = [call for call in template.calls if call.path not in paths]
    template.unit.instances = template.paths
    captured.templates[name] = part
    outer = captured.program.units.pop(OUTER)
    captured.program.units |= {name: unit, OUTER: outer}
    for node in outer.graph.find_nodes(op="call_function", target=torch.ops.moec.region.default):
        if node.args[1] in paths:
            node.args = (name, *node.args[1:])
    outer.module.recompile()
    return part


def _copy(unit: Unit, name: str, instances: tuple[str, ...]) -> Unit:
    graph = fx.Graph()
    graph.output(graph.graph_copy(unit.graph, {}))
    module = fx.GraphModule(unit.module, graph)
    for constant in list(module._buffers):  # a unit's constants are attributes, and only its placeholders are buffers
        value = module._buffers.pop(constant)
        setattr(module, constant, value)
    return Unit(name, module, unit.signature, instances)


def _detach(unit: Unit, positions: frozenset[int]) -> None:
    output = unit.graph.output_node()
    values = list(output.args[0])  # type: ignore[arg-type]
    for index in positions:
        with unit.graph.inserting_before(output):
            detached = unit.graph.call_function(aten.detach.default, (values[index],))
        detached.meta = {"val": tensor_meta(values[index]), "custom": values[index].meta.get("custom")}
        values[index] = detached
    output.args = (tuple(values),)
    unit.module.recompile()
