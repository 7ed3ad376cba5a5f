"""`moec.compile(model, plan)`: all stages in order, from a module to a running, readable training step.

1. captured    the view of the model, traced on fakes; one graph per layer template and the outer graph
2. fused       semantic passes on every graph (passes/)
3. joint       each graph differentiated
4. placed      split into forward and backward, with a decision for every value that crosses
5. lowered     an implementation chosen for every dialect op
6. emitted     the program text; loaded again from that text, so what runs is what can be read
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, fx, nn

import moec.codegen.triton  # noqa: F401  registers the kernels
from moec import runtime
from moec.artifact import StateMap, derived_buffers, write_artifact
from moec.codegen.program import OBJECTIVE, ProgramText, Section, write_program
from moec.codegen.update import header_text, update_text
from moec.compiler.autocast import refuse_autocast_around
from moec.compiler.capture import Capture, capture
from moec.compiler.differentiate import Joint, differentiate
from moec.compiler.document_inputs import document_inputs
from moec.compiler.errors import PlanError, UnsupportedModelError
from moec.compiler.graph import OUTER, Unit
from moec.compiler.layout import BucketInstance
from moec.compiler.log import PassLog, StageTime
from moec.compiler.lower import add_choice, lower
from moec.compiler.partition import Partitioned, partition
from moec.compiler.pass_manager import Pass, PassContext, Pipeline
from moec.compiler.placement import JointProgram, run_placement, shared_weights
from moec.compiler.plan import Plan
from moec.compiler.printer import StageGraphs, graph_text
from moec.compiler.recompute_rules import apply_recompute_rules
from moec.compiler.region_op import templates_in_scope
from moec.compiler.spec import check_joint, check_lowered, check_placed, check_stage
from moec.compiler.spec_program import check_emitted
from moec.compiler.template import Template
from moec.compiler.unused_results import detach_unused_results
from moec.compiler.view import TrainingView
from moec.compiler.wire import Collective, microbatch_collectives
from moec.models.adapters import training_view
from moec.passes import SEMANTIC_PASSES, SHARDING_PASSES
from moec.placing import step_over
from moec.rank_files import write_rank_files
from moec.runtime.program import load_program
from moec.step import CompiledStep


@dataclass
class Compilation:
    """Everything the stages produced; `compile` wraps it into a step, the command line prints it.

    stages: stage name -> graphs as text. unreached: trainable parameters that no gradient reaches by the model's own
    design; the optimizer leaves them alone. buckets: what lies sharded where, on several ranks.
    """

    model: nn.Module
    view: TrainingView
    plan: Plan
    captured: Capture
    log: PassLog
    sections: list[Section] = field(default_factory=list)
    outer: Partitioned | None = None
    unreached: list[str] = field(default_factory=list)
    buckets: dict[str, BucketInstance] = field(default_factory=dict)
    stages: dict[str, StageGraphs] = field(default_factory=dict)
    program: ProgramText | None = None

    def collectives(self) -> list[Collective]:
        """Those of one microbatch, in program order."""
        layers = {section.template.name: section.parts for section in self.sections}
        return microbatch_collectives(self.outer, layers) if self.outer is not None else []


AfterPass = Callable[[Pass, Unit], None]

# Tracing swaps parts of the model and of torch for a while: one compilation at a time in a process.
_COMPILING = threading.RLock()


def compile(model: nn.Module, plan: Plan | None = None) -> CompiledStep:
    """Compile a training step for `model`, which keeps its parameters: the step updates them in place.

    model: an nn.Module of ours, of Hugging Face, or any whose forward(input_ids, labels) returns its loss; in training
    mode. plan: shapes, mesh, optimizer, recomputation (compiler/plan.py); the default plan where it is None. With a
    mesh of several ranks all of them call this together, after torch.distributed is initialised, and the parameters
    become DTensors; in a process that is alone the step can be read, saved and simulated.

    Raises CaptureError, PlanError, UnsupportedModelError or UnsupportedOpError before anything runs.
    """
    plan = plan or Plan()
    compilation = build(model, plan)
    folder = Path(tempfile.mkdtemp(prefix="moec-step-"))
    write(compilation, folder)
    step = step_over(model, load_program(folder), folder, compilation.log, plan, compilation.unreached)
    weakref.finalize(step, shutil.rmtree, folder, ignore_errors=True)
    return step


def write(compilation: Compilation, folder: Path) -> None:
    """Write a compilation as an artefact that `moec.load` reads."""
    assert compilation.program is not None
    model = compilation.model
    folder.mkdir(parents=True, exist_ok=True)
    write_rank_files(folder, compilation.buckets, compilation.collectives())
    write_artifact(
        folder,
        program=compilation.program,
        plan=compilation.plan,
        log=compilation.log,
        stages=compilation.stages,
        state_map=StateMap.of(model, compilation.unreached, compilation.view),
        device=str(_device_of_program(model, compilation.plan)),
        derived_buffers=derived_buffers(model),
    )


def build(model: nn.Module, plan: Plan, after_pass: AfterPass | None = None) -> Compilation:
    """All stages up to the program's text; works on fake and meta weights too."""
    if not model.training:
        raise UnsupportedModelError(
            "the model is in evaluation mode", why="a training step is compiled", hint="call model.train() first"
        )
    refuse_autocast_around("moec.compile", _device(model))
    with _COMPILING, torch.inference_mode(False), torch.enable_grad():
        return _build(model, plan, after_pass)


def _build(model: nn.Module, plan: Plan, after_pass: AfterPass | None) -> Compilation:
    log = PassLog()
    view = _checked_view(model, plan)
    with _timed(log, "captured") as count:
        captured = capture(view, plan, example_inputs(model, plan, view.images))
        count(unit.graph for unit in captured.program.units.values())
    log.notes += captured.notes
    log.near_misses += captured.near_misses
    result = Compilation(model, view, plan, captured, log)
    result.stages["captured"] = _unit_graphs("captured", captured)
    with _timed(log, "fused") as count:
        run_passes(captured, plan, log, after_pass)
        count(unit.graph for unit in captured.program.units.values())
    result.stages["fused"] = _unit_graphs("fused", captured)
    _differentiate_and_place(result)
    with _timed(log, "emitted"):
        result.program = _emit(result)
    return result


def run_passes(captured: Capture, plan: Plan, log: PassLog, after_pass: AfterPass | None = None) -> None:
    """The semantic passes that the plan does not disable, in order, on every unit."""
    passes = selected_passes(plan)

    def after(step: Pass, unit: Unit) -> None:
        if plan.check:
            check_stage(unit, step)
        if after_pass is not None:
            after_pass(step, unit)

    pipeline = Pipeline(passes, after_pass=after)
    pipeline.validate()
    context = PassContext(plan=plan, documents=document_inputs(captured.program))
    log.records += pipeline.run(captured.program, context)
    for template in captured.templates.values():
        template.follow_unit()


def selected_passes(plan: Plan) -> list[Pass]:
    """Passes that the plan wants and does not disable; a name in plan.disable that is no pass raises PlanError."""
    known = [step.name for step in SEMANTIC_PASSES]
    unknown = [name for name in plan.disable if name not in known]
    if unknown:
        raise PlanError(
            f"plan.disable names {', '.join(unknown)}, which is no pass",
            where="plan.disable",
            hint=f"passes: {', '.join(known)}",
        )
    return [step for step in SEMANTIC_PASSES if step.wanted(plan) and step.name not in plan.disable]


def example_inputs(model: nn.Module, plan: Plan, images: tuple[int, int] | None = None) -> dict[str, Tensor]:
    """Tensors of the plan's shapes on the model's device; only their metadata is used.

    images: (placeholder token, width of a feature) of the model, for a plan with image tokens.
    """
    device = _device(model)
    ids = torch.zeros(plan.batch, plan.length, dtype=torch.int64, device=device)
    inputs = {"input_ids": ids, "labels": ids, "inverse_tokens": torch.ones((), device=device)}
    inputs |= {"document_ids": ids} if plan.packing else {}
    if plan.image_tokens and images is not None:
        inputs["image_features"] = torch.zeros(plan.image_tokens, images[1], device=device)
    return inputs


def _device_of_program(model: nn.Module, plan: Plan) -> torch.device:
    """The model's; on several ranks without its number, since all have the same text and each a device of its own."""
    device = _device(model)
    return device if plan.mesh.world == 1 else torch.device(device.type)


def _device(model: nn.Module) -> torch.device:
    """The device of all parameters; raises UnsupportedModelError when there are several."""
    found: dict[torch.device, str] = {}
    for path, parameter in model.named_parameters():
        if not parameter.is_meta:
            found.setdefault(parameter.device, path)
    if len(found) > 1:
        raise UnsupportedModelError(
            f"the model lies on several devices: {', '.join(f'{path} on {d}' for d, path in found.items())}",
            why="one process compiles for one device",
            hint="move the model to one device before compiling",
        )
    return next(iter(found), torch.device("cpu"))


def _unreached(result: Compilation, outer: Joint) -> list[str]:
    reached = {outer.unit.signature.inputs[index].name for index in outer.grads}
    tied = result.captured.tied
    wanted = [n for n, p in result.model.named_parameters(remove_duplicate=False) if p.requires_grad]
    return [
        name for name in wanted if name not in tied and name not in reached and not _alias_reached(name, tied, reached)
    ]


def _alias_reached(name: str, tied: dict[str, str], reached: set[str]) -> bool:
    return any(owner == name and alias in reached for alias, owner in tied.items())


def _checked_view(model: nn.Module, plan: Plan) -> TrainingView:
    view = training_view(model, plan)
    if plan.packing and view.packing_refusal:
        raise UnsupportedModelError(
            "the plan packs documents, but this model cannot keep them apart",
            where=view.packing_refusal,
            hint="set packing: false in the plan, and give one document per row",
        )
    if plan.image_tokens and view.images is None:
        raise PlanError(
            f"plan field image_tokens is {plan.image_tokens}",
            where="plan.image_tokens",
            why=f"{type(model).__name__} takes no image features",
            hint="set image_tokens: 0, or use a model with an image placeholder token",
        )
    if view.max_length is not None and plan.length > view.max_length:
        raise PlanError(
            f"plan field length is {plan.length}",
            where="plan.length",
            why=f"the model supports at most {view.max_length} positions",
        )
    if plan.dtype is not None:
        _check_dtype(model, plan)
    return view


def _check_dtype(model: nn.Module, plan: Plan) -> None:
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    main = max(sizes, key=lambda dtype: sizes[dtype]) if sizes else None
    if main is not None and main != getattr(torch, str(plan.dtype)):
        raise PlanError(
            f"plan field dtype is {plan.dtype}, the model's parameters are {str(main).removeprefix('torch.')}",
            where="plan.dtype",
            hint=f"convert the model first (model.to(torch.{plan.dtype})), or leave dtype out",
        )


def _differentiate_and_place(result: Compilation) -> None:
    captured, plan, log = result.captured, result.plan, result.log
    joints: dict[str, Joint] = {}
    log.notes += detach_unused_results(captured, OBJECTIVE)
    recomputed = apply_recompute_rules(captured, plan.recompute)
    with _timed(log, "joint") as count:
        for unit in captured.program.templates():
            joints[unit.name] = _differentiated(unit, plan)
        for template in captured.templates.values():
            template.take_gradients(joints[template.unit.name])
        count(joint.graph for joint in joints.values())
    with _timed(log, "joint (outer)") as count, templates_in_scope(captured.templates):
        _report_only(captured.program.outer)
        outer = _differentiated(captured.program.outer, plan)
        _by_path_only(outer, captured.templates)
        count([outer.graph])
    program = JointProgram(captured.templates, joints, outer, shared_weights(captured), captured.tied)
    result.unreached = _unreached(result, outer)
    result.stages["joint"] = _joint_graphs("joint", program)
    if plan.mesh.world > 1:
        _shard(result, program)
    with _timed(log, "placed") as count:
        for template in captured.templates.values():
            parts = _partitioned(
                joints[template.unit.name], plan, recompute=template.name in recomputed, changing=template.changing
            )
            result.sections.append(Section(template, parts))
        result.outer = _partitioned(outer, plan)
        everything = [*((s.template.name, s.parts) for s in result.sections), (OUTER, result.outer)]
        count(graph for _, parts in everything for graph in (parts.forward, parts.backward))
    log.placements = {name: parts.placements for name, parts in everything}
    result.stages["placed"] = _placed_graphs("placed", everything)
    with _timed(log, "lowered"):
        for name, parts in everything:
            for graph in (parts.forward, parts.backward):
                for op, text in lower(graph).items():
                    add_choice(log.lowering, op, text)
                if plan.check:
                    check_lowered(graph, name)
    result.stages["lowered"] = _placed_graphs("lowered", everything)


def _shard(result: Compilation, program: JointProgram) -> None:
    _refuse_written_buffers(result, program)
    with _timed(result.log, "sharded") as count:
        context = PassContext(plan=result.plan)
        result.log.records += run_placement(SHARDING_PASSES, program, context)
        result.buckets = program.buckets
        count(graph for _, graph in program.graphs())
    result.stages["sharded"] = _joint_graphs("sharded", program)


def _refuse_written_buffers(result: Compilation, program: JointProgram) -> None:
    """Every rank would write a value of its own; only what routers count is summed over them."""
    counts = {histogram for _, histogram, _ in result.view.balanced}
    for path in program.outer.buffers:
        if path not in counts:
            raise UnsupportedModelError(
                f"the forward writes the buffer {path}",
                where=path.rpartition(".")[0],
                why=f"each of {result.plan.mesh.world} ranks sees other rows, so their buffers would differ",
                hint="compile for one rank, or freeze the statistics that the forward keeps",
            )


def _differentiated(unit: Unit, plan: Plan) -> Joint:
    joint = differentiate(unit)
    if plan.check:
        check_joint(joint)
    return joint


def _partitioned(joint: Joint, plan: Plan, *, recompute: bool = False, changing: Collection[str] = ()) -> Partitioned:
    parts = partition(joint, recompute=recompute, changing=changing)
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


def _emit(result: Compilation) -> ProgramText:
    assert result.outer is not None
    program = write_program(
        header_text(type(result.model).__name__, result.plan, result.captured),
        _device_of_program(result.model, result.plan),
        result.sections,
        result.outer,
        result.captured.program.outer.signature.outputs,
        result.captured.tied,
        update_text(result.plan, balanced_routers(result)),
    )
    if result.plan.check:
        check_emitted(program.text, runtime)
    return program


def balanced_routers(result: Compilation) -> list[tuple[str, str, int]]:
    """(bias path, histogram path, top-k) of every router whose counts the program writes."""
    written = result.outer.joint.buffers if result.outer is not None else {}
    return [router for router in result.view.balanced if router[1] in written]


def _unit_graphs(stage: str, captured: Capture) -> StageGraphs:
    return StageGraphs(
        stage,
        {
            unit.name: graph_text(unit.graph, {node: value.name for node, value in unit.placeholders()})
            for unit in captured.program.units.values()
        },
    )


def _joint_graphs(stage: str, program: JointProgram) -> StageGraphs:
    return StageGraphs(stage, {name: graph_text(graph) for name, graph in program.graphs()})


def _placed_graphs(stage: str, everything: list[tuple[str, Partitioned]]) -> StageGraphs:
    texts = {}
    for name, parts in everything:
        texts[f"{name}.forward"] = graph_text(parts.forward)
        texts[f"{name}.backward"] = graph_text(parts.backward)
    return StageGraphs(stage, texts)


@contextmanager
def _timed(log: PassLog, stage: str) -> Iterator[Callable[..., None]]:
    counted = [0]

    def count(graphs: Iterator[fx.Graph]) -> None:
        counted[0] = sum(len(graph.nodes) for graph in graphs)

    started = time.perf_counter()
    yield count
    log.stages.append(StageTime(stage, time.perf_counter() - started, counted[0]))
