"""The stages behind the semantic passes: `joint`, `sharded`, `placed` and `lowered`.

1. joint     each layer template differentiated, then the outer graph, in which a layer is one op with a backward
2. sharded   on several ranks: parameters in buckets, gathered and reduced (passes/shard_parameters.py)
3. placed    every joint graph split into forward and backward, with a decision for each value that crosses
4. lowered   an implementation for each dialect op
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx

from moec.codegen.program import OBJECTIVE, Section
from moec.compilation import Compilation
from moec.compiler.differentiate import Joint, differentiate
from moec.compiler.errors import UnsupportedModelError
from moec.compiler.graph import OUTER, Unit
from moec.compiler.lengths import length_range, not_every_length
from moec.compiler.lower import add_choice, lower
from moec.compiler.partition import Choices, Partitioned, partition
from moec.compiler.pass_manager import PassContext
from moec.compiler.placement import JointProgram, run_placement, shared_weights
from moec.compiler.plan import Plan
from moec.compiler.region_op import templates_in_scope
from moec.compiler.spec import check_joint, check_lowered, check_placed
from moec.compiler.template import Template
from moec.compiler.unused_results import detach_unused_results
from moec.forecast import Forecast, refuse_too_much, timing_of
from moec.passes import CACHING_PASSES
from moec.stage_record import joint_graphs, placed_graphs, timed


def differentiate_and_place(result: Compilation) -> None:
    """Take a compilation from the stage `fused` to `lowered`."""
    captured, plan, log = result.captured, result.plan, result.log
    joints: dict[str, Joint] = {}
    log.notes += detach_unused_results(captured, OBJECTIVE)
    with timed(log, "joint") as count:
        for unit in captured.program.templates():
            joints[unit.name] = _differentiated(unit, plan)
        for template in captured.templates.values():
            template.take_gradients(joints[template.unit.name])
        count(joint.graph for joint in joints.values())
    with timed(log, "joint (outer)") as count, templates_in_scope(captured.templates):
        _report_only(captured.program.outer)
        outer = result.joint = _differentiated(captured.program.outer, plan)
        _by_path_only(outer, captured.templates)
        count([outer.graph])
    log.notes += _checked_lengths(plan, [*joints.values(), outer])
    program = JointProgram(captured.templates, joints, outer, shared_weights(captured), captured.tied)
    result.unreached = _unreached(result, outer)
    result.stages["joint"] = joint_graphs("joint", program)
    if plan.mesh.world > 1:
        _shard(result, program)
    forecast = Forecast(result)
    if plan.cache.policy != "keep":
        _choose(result, program, forecast)
    with timed(log, "placed") as count:
        for template in captured.templates.values():
            parts = _partitioned(
                joints[template.unit.name], plan, program.choices.get(template.name, Choices()), template.changing
            )
            result.sections.append(Section(template, parts))
        result.outer = _partitioned(outer, plan, program.choices.get(OUTER, Choices()))
        everything = [*((s.template.name, s.parts) for s in result.sections), (OUTER, result.outer)]
        count(graph for _, parts in everything for graph in (parts.forward, parts.backward))
    log.placements = {name: parts.placements for name, parts in everything}
    result.stages["placed"] = placed_graphs("placed", everything)
    with timed(log, "lowered"):
        for name, parts in everything:
            for graph in (parts.forward, parts.backward):
                for op, text in lower(graph).items():
                    add_choice(log.lowering, op, text)
                if plan.check:
                    check_lowered(graph, name)
    result.stages["lowered"] = placed_graphs("lowered", everything)
    with timed(log, "memory"):
        result.timing = timing_of(result.sections, result.outer, plan)
        log.times = dict(result.timing.units)
        parts_by_name = {section.template.name: (section.template, section.parts) for section in result.sections}
        log.memory = forecast.of(parts_by_name, result.outer, result.timing.schedule)
    refuse_too_much(log.memory, plan)


def _choose(result: Compilation, program: JointProgram, forecast: Forecast) -> None:
    with timed(result.log, "cached"):
        context = PassContext(plan=result.plan, facts={"predict": forecast.of})
        result.log.records += run_placement(CACHING_PASSES, program, context)


def _checked_lengths(plan: Plan, joints: Sequence[Joint]) -> list[str]:
    """A note on the lengths that a step takes; CaptureError where differentiation made conditions that some break."""
    if plan.dynamic is None:
        return []
    ranges = [(joint, *length_range(joint.graph, plan.shortest, plan.length)) for joint in joints]
    reasons = [(f"the backward of {joint.unit.name}", reason) for joint, least, reason in ranges if reason]
    if reasons:
        raise not_every_length(plan, max(least for _, least, _ in ranges), reasons)
    return [f"one graph for every length from {plan.shortest} to {plan.length}, backward included"]


def _shard(result: Compilation, program: JointProgram) -> None:
    _refuse_written_weights(result, program)
    with timed(result.log, "sharded") as count:
        context = PassContext(plan=result.plan)
        result.log.records += run_placement(result.sharding, program, context)
        result.buckets = program.buckets
        count(graph for _, graph in program.graphs())
    result.stages["sharded"] = joint_graphs("sharded", program)


def _refuse_written_weights(result: Compilation, program: JointProgram) -> None:
    """A forward has whole weights for a while; what it writes to them would not reach the rows that ranks hold."""
    weights = dict(result.model.named_parameters(remove_duplicate=False))
    for path in program.outer.buffers:
        if path in weights:
            raise UnsupportedModelError(
                f"the forward writes the weight {path}",
                where=path.rpartition(".")[0],
                why=f"each of {result.plan.mesh.world} ranks holds a part of it",
                hint="compile for one rank, or make it a buffer: buffers are whole on every rank",
            )


def _unreached(result: Compilation, outer: Joint) -> list[str]:
    reached = {outer.unit.signature.inputs[index].name for index in outer.grads}
    tied = result.captured.tied
    wanted = [n for n, p in result.model.named_parameters(remove_duplicate=False) if p.requires_grad]
    return [
        name for name in wanted if name not in tied and name not in reached and not _alias_reached(name, tied, reached)
    ]


def _alias_reached(name: str, tied: dict[str, str], reached: set[str]) -> bool:
    return any(owner == name and alias in reached for alias, owner in tied.items())


def _differentiated(unit: Unit, plan: Plan) -> Joint:
    joint = differentiate(unit)
    if plan.check:
        check_joint(joint)
    return joint


def _partitioned(
    joint: Joint,
    plan: Plan,
    choices: Choices = Choices(),  # noqa: B008
    changing: Collection[str] = (),
) -> Partitioned:
    parts = partition(joint, choices, changing=changing)
    if plan.check:
        check_placed(parts)
    return parts


def _report_only(unit: Unit) -> None:
    """Backward starts from the objective alone: every other result is detached."""
    output = unit.graph.output_node()
    values = list(output.args[0])  # type: ignore[arg-type]
    for index, description in enumerate(unit.signature.outputs):
        node = values[index]
        if description.name != OBJECTIVE and isinstance(node, fx.Node):
            with unit.graph.inserting_before(output):
                values[index] = unit.graph.call_function(torch.ops.aten.detach.default, (node,))
                values[index].meta = dict(node.meta)
    output.args = (tuple(values),)
    unit.module.recompile()


def _by_path_only(outer: Joint, templates: Mapping[str, Template]) -> None:
    """In the emitted program a layer finds its weights and saved values by its path: drop them from the calls.

    What stays are the values of buffers that the forward writes.
    """
    for node in outer.graph.nodes:
        if node.target is torch.ops.moec.region.default:
            template, path, inputs, weights = node.args
            known = templates[str(template)]
            values = dict(zip(known.weight_names, map(_uncopied, weights), strict=True))
            node.args = (template, path, inputs, [values[name] for name in known.changing])
        elif node.target is torch.ops.moec.region_backward.default:
            template, path, *_, tangents = node.args
            node.args = (template, path, [], [], tangents)
    outer.graph.eliminate_dead_code()


def _uncopied(value: fx.Node) -> fx.Node:
    return value.args[0] if value.target is torch.ops.aten.clone.default else value  # type: ignore[return-value]
