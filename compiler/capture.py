"""Capture: a training view becomes a `Program`, on fake tensors, with each repeated layer traced once.

1. Weights are replaced by fakes (`fake_weights`), so no memory is needed and nothing can be changed by accident.
2. The probe runs the view once and groups the regions by program (`regions.py`). With `dynamic="length"` a second
   run at another length tells which sizes follow the length.
3. One region of each group is exported, alone, with every weight an input.
4. The view is exported with each region replaced by one `moec::region` node.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind as ExportKind

from moec.compiler._torch_compat import FakeTensor, pytree
from moec.compiler.ambient import ambient_scope, current
from moec.compiler.autocast import refuse_autocast_inside
from moec.compiler.errors import CaptureError, LengthError
from moec.compiler.exporting import LengthRefused, capture_error, export
from moec.compiler.fake import fake_like, fake_mode_of, fake_weights
from moec.compiler.grad_modes import inline_grad_modes
from moec.compiler.graph import OUTER, InputValue, OutputValue, Program, Signature, Unit, source_line
from moec.compiler.lengths import not_every_length
from moec.compiler.naming import template_names
from moec.compiler.overlap import overlapping
from moec.compiler.pass_manager import NearMiss
from moec.compiler.plan import Plan
from moec.compiler.python_gradients import hooked_parameters, refuse_python_gradients
from moec.compiler.region_op import region, templates_in_scope
from moec.compiler.regions import Probe, RegionCall, find_regions, patched_forwards, probe, weight_slots
from moec.compiler.template import Template, ValueSpec
from moec.compiler.view import TrainingView
from moec.compiler.writes import watched_writes


@dataclass
class Capture:
    """The captured program and what was learned on the way.

    templates: by name. results: keys of the view's result dict, in output order. tied: alias path -> canonical path.
    written: canonical paths of the weights and buffers that a forward writes, in module order.
    """

    program: Program
    templates: dict[str, Template]
    results: tuple[str, ...]
    tied: dict[str, str]
    written: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    near_misses: list[NearMiss] = field(default_factory=list)


def capture(view: TrainingView, plan: Plan, inputs: dict[str, Tensor]) -> Capture:
    """Trace `view.module` on fakes of `inputs` (by argument name; values are never read).

    Raises CaptureError with the module path and source line when the model cannot be traced into one graph, and with
    the lengths that it takes when these are not all that the plan asks for.
    """
    hooked = hooked_parameters(_root(view))
    if hooked:
        raise CaptureError(
            f"the parameter {hooked[0]} has a hook on its gradient",
            where=", ".join(hooked),
            why="a compiled step computes gradients itself and calls no hooks of autograd",
            hint="remove the hook, or do its work in the model's forward",
        )
    try:
        return _capture(view, plan, inputs)
    except LengthRefused as refusal:
        raise _length_error(view, plan, inputs, refusal) from refusal


def _length_error(view: TrainingView, plan: Plan, inputs: dict[str, Tensor], refusal: LengthRefused) -> LengthError:
    """The lengths that everything takes: what was refused last gives the next shortest length to try."""
    refusals = [refusal]
    while refusals[-1].shortest < plan.length:
        try:
            _capture(view, replace(plan, min_length=refusals[-1].shortest), inputs)
            break
        except LengthRefused as further:
            refusals.append(further)
    reasons = [(refused.what, refused.reason) for refused in refusals]
    return not_every_length(plan, refusals[-1].shortest, reasons)


def _capture(view: TrainingView, plan: Plan, inputs: dict[str, Tensor]) -> Capture:
    module, root = view.module, _root(view)
    mode, shared = fake_mode_of(module), overlapping(dict(weight_slots(root)))
    with ExitStack() as stack:
        stack.enter_context(refuse_autocast_inside())
        stack.enter_context(view.prepare())
        stack.enter_context(fake_weights(module, mode))
        fakes = {name: fake_like(value, mode) for name, value in inputs.items()}
        regions = find_regions(root)
        found = _probe(view, regions, fakes, mode)
        _refuse_shared_writes(found.written, shared)
        moving = _moving_sizes(view, regions, found, fakes, mode, plan)
        templates = _capture_templates(root, found, moving, plan)
        program, results = _capture_outer(view, regions, templates, fakes, found.written, plan)
        tied = _tied(root)
        written = tuple(path for path, _ in weight_slots(root) if path in found.written and path not in tied)
    return Capture(program, templates, results, tied, written, list(view.notes), found.near_misses)


def _root(view: TrainingView) -> nn.Module:
    return view.module.get_submodule(view.prefix.removesuffix("."))


def _probe(view: TrainingView, regions: dict[str, nn.Module], fakes: dict[str, Tensor], mode: Any) -> Probe:
    before = dict(_root(view).named_buffers(remove_duplicate=False))
    slots = dict(weight_slots(_root(view)))
    with mode, torch.enable_grad(), refuse_python_gradients():
        try:
            with watched_writes(slots) as written:
                found = probe(view.module, regions, lambda: view.module(**fakes))
        except (RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError) as error:
            raise capture_error("the model", error, _root(view)) from error
    for path, buffer in _root(view).named_buffers(remove_duplicate=False):
        if buffer is not before.get(path):
            raise CaptureError(
                f"the forward replaces the buffer {path} by another tensor",
                where=path.rpartition(".")[0],
                why="a trace sees writes into a buffer, not a new tensor under its name",
                hint=f"write in place: self.{path.rpartition('.')[2]}.copy_(...)",
            )
    found.written |= written
    return found


def _refuse_shared_writes(written: set[str], shared: list[tuple[str, str]]) -> None:
    for one, two in shared:
        if {one, two} & written:
            raise CaptureError(
                f"{one} and {two} are different tensors over the same memory, and the forward writes there",
                where=", ".join(sorted({one, two} & written)),
                why="a write to the one would not be seen in the other",
                hint="register the same tensor object under both names, or give each its own memory",
            )


def _moving_sizes(
    view: TrainingView,
    regions: dict[str, nn.Module],
    found: Probe,
    fakes: dict[str, Tensor],
    mode: Any,
    plan: Plan,
) -> dict[str, list[set[int]]]:
    """Per region path and input: the dimensions that follow the length, by comparing two runs."""
    if plan.dynamic is None:
        return {path: [set() for _ in call.inputs] for path, call in found.calls.items()}
    shorter = max(plan.shortest, plan.length // 2 + 1)
    others = {name: fake_like(_cut(name, value, shorter), mode) for name, value in fakes.items()}
    try:
        second = _probe(view, {path: regions[path] for path in found.calls}, others, mode)
    except CaptureError as error:
        raise CaptureError(
            f"the model runs at length {plan.length}, and not at length {shorter}",
            where=error.where,
            why=error.why,
            hint=f"dynamic lengths need a model that takes every one from {plan.shortest} to {plan.length}",
        ) from error
    moving: dict[str, list[set[int]]] = {}
    for path, call in list(found.calls.items()):
        other = second.calls.get(path)
        if other is None or (call.constants, call.output_constants) != (other.constants, other.output_constants):
            del found.calls[path]
            reason = "a constant it takes or returns depends on the length"
            found.near_misses.append(NearMiss(path, "layer", reason))
            continue
        moving[path] = [
            {dim for dim, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b}
            for one, two in zip(call.inputs, other.inputs, strict=True)
        ]
        wrong = [
            name
            for name, one, dims in zip(call.names, call.inputs, moving[path], strict=True)
            if any(one.shape[dim] != plan.length for dim in dims)
        ]
        if wrong:
            del found.calls[path]
            reason = f"the size of {', '.join(wrong)} depends on the length but is not the length"
            found.near_misses.append(NearMiss(path, "layer", reason))
    return moving


def _capture_templates(
    root: nn.Module, found: Probe, moving: dict[str, list[set[int]]], plan: Plan
) -> dict[str, Template]:
    groups = found.groups()
    names = template_names([[root.get_submodule(call.path) for call in group] for group in groups], groups)
    return {
        name: _capture_template(name, group, root, moving[group[0].path], found.written, plan)
        for name, group in zip(names, groups, strict=True)
    }


def _capture_template(
    name: str, calls: list[RegionCall], root: nn.Module, moving: list[set[int]], written: set[str], plan: Plan
) -> Template:
    call, body = calls[0], root.get_submodule(calls[0].path)
    shapes = [dict.fromkeys(dims, _length(plan)) if dims else None for dims in moving]
    exported = export(
        _RegionBody(body, call), call.inputs, (tuple(shapes),) if plan.dynamic else None, plan, root, call.path
    )
    flags = {n: tensor.requires_grad for n, tensor in weight_slots(body)}
    unit = _unit(name, exported, "body.", flags, call.names, [t.requires_grad for t in call.inputs])
    unit.instances = tuple(item.path for item in calls)
    placeholders = [(node, value) for node, value in unit.placeholders()]
    weights = {v.name: n.meta["val"] for n, v in placeholders if v.kind != "input"}
    inputs = [n.meta["val"] for n, v in placeholders if v.kind == "input"]
    outputs = [n.meta["val"] for n in unit.graph.output_node().args[0]]  # type: ignore[union-attr]
    mutated = _written_names(unit, call.mutated, dict(weight_slots(body)))
    buffers = [weights[buffer] for buffer in mutated]
    changing = tuple(n for n in weights if any(f"{item.path}.{n}" in written for item in calls))
    template = Template(
        name=name,
        calls=calls,
        weight_names=tuple(weights),
        inputs=tuple(ValueSpec.of(t, requires_grad=f.requires_grad) for t, f in zip(inputs, call.inputs, strict=True)),
        weights=tuple(ValueSpec.of(tensor, requires_grad=flags[n]) for n, tensor in weights.items()),
        results=(
            *(ValueSpec.of(t, requires_grad=f.requires_grad) for t, f in zip(outputs, call.outputs, strict=True)),
            *(ValueSpec.of(buffer) for buffer in buffers),
        ),
        mutated=mutated,
        changing=changing,
        unit=unit,
    )
    template.tangent_positions = tuple(i for i, spec in enumerate(template.results) if spec.requires_grad)
    wants = [*template.inputs, *template.weights]
    template.grad_positions = tuple(i for i, spec in enumerate(wants) if spec.requires_grad)
    template.grads = tuple(wants[i] for i in template.grad_positions)
    return template


def _written_names(unit: Unit, written: tuple[str, ...], slots: dict[str, Tensor]) -> tuple[str, ...]:
    """The names of written buffers in the unit: of several names of one buffer, a trace uses only one."""
    written_ids = {id(slots[name]) for name in written}
    names = [(value.name, bool(node.users)) for node, value in unit.placeholders() if value.name in slots]
    chosen: dict[int, str] = {}
    for name, used in names:
        if id(slots[name]) in written_ids and (used or id(slots[name]) not in chosen):
            chosen[id(slots[name])] = name
    return tuple(name for name, _ in names if name in chosen.values())


def _capture_outer(
    view: TrainingView,
    regions: dict[str, nn.Module],
    templates: dict[str, Template],
    fakes: dict[str, Tensor],
    written: set[str],
    plan: Plan,
) -> tuple[Program, tuple[str, ...]]:
    root = _root(view)
    by_path = {call.path: (template, call) for template in templates.values() for call in template.calls}

    def replace(path: str, body: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        return _calling(*by_path[path], body, is_written) if path in by_path else forward

    owners = [(root.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in sorted(written)]

    def is_written(tensor: Tensor) -> bool:
        buffers = [getattr(owner, name) for owner, name in owners]
        return any(tensor is buffer or tensor._base is buffer for buffer in buffers)

    collected: list[str] = []
    wrapper = _OuterBody(view.module, tuple(fakes), collected)
    shapes = tuple({1: _length(plan)} if plan.dynamic and name in _WITH_LENGTH else None for name in fakes)
    with templates_in_scope(templates), patched_forwards({p: regions[p] for p in by_path}, replace):
        exported = export(wrapper, tuple(fakes.values()), (shapes,) if plan.dynamic else None, plan, root)
    flags = {n.removeprefix(view.prefix): tensor.requires_grad for n, tensor in weight_slots(view.module)}
    outer = _unit(OUTER, exported, f"body.{view.prefix}", flags, tuple(fakes), [False] * len(fakes), tuple(collected))
    program = Program({name: template.unit for name, template in templates.items()} | {OUTER: outer})
    return program, tuple(collected)


class _RegionBody(nn.Module):
    """A region with a flat signature of tensors."""

    def __init__(self, body: nn.Module, call: RegionCall) -> None:
        super().__init__()
        self.body = body
        self.call = call

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs, around = self.call.arguments(tensors)
        with ambient_scope(**around):
            output = self.body.forward(*args, **kwargs)  # its hooks run around the call in the outer graph
        return tuple(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))


class _OuterBody(nn.Module):
    """The view with a flat signature; writes the keys of its result dict into `keys`."""

    def __init__(self, body: nn.Module, names: tuple[str, ...], keys: list[str]) -> None:
        super().__init__()
        self.body = body
        self._names = names
        self._keys = keys

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        result = self.body(**dict(zip(self._names, tensors, strict=True)))
        self._keys[:] = list(result)
        return tuple(result.values())


def _calling(
    template: Template, call: RegionCall, body: nn.Module, is_written: Callable[[Tensor], bool]
) -> Callable[..., Any]:
    """The forward that stands in for a region while the outer graph is traced.

    is_written: whether a tensor is, or views, a buffer that the forward writes.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        around = current()
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)] + [around[name] for name in call.ambient]
        slots = dict(weight_slots(body))
        # What somebody writes is passed as a copy: autograd must not see a saved value change.
        tensors = [tensor.clone() if is_written(tensor) else tensor for tensor in tensors]
        weights = [slots[n].clone() if n in template.changing else slots[n] for n in template.weight_names]
        outputs = region(template.name, call.path, tensors, weights)
        count = template.result_count - len(template.mutated)
        for name, value in zip(template.mutated, outputs[count:], strict=True):
            slots[name].copy_(value.detach())
        return call.result(list(outputs[:count]))

    return run


def _unit(
    name: str,
    exported: ExportedProgram,
    prefix: str,
    flags: dict[str, bool],
    input_names: tuple[str, ...],
    input_flags: list[bool],
    output_names: tuple[str, ...] = (),
) -> Unit:
    """A unit with the flat signature: weights and buffers in module order, lifted constants, then inputs."""
    graph_module = exported.graph_module
    kinds = {ExportKind.PARAMETER: "weight", ExportKind.BUFFER: "buffer"}
    inputs: list[InputValue] = []
    user = iter(zip(input_names, input_flags, strict=True))
    nodes = graph_module.graph.find_nodes(op="placeholder")
    for node, spec in zip(nodes, exported.graph_signature.input_specs, strict=True):
        if spec.kind in kinds:
            path = str(spec.target).removeprefix(prefix)
            inputs.append(InputValue(kinds[spec.kind], path, flags.get(path, False)))  # type: ignore[arg-type]
        elif spec.kind == ExportKind.USER_INPUT:
            inputs.append(InputValue("input", *next(user)))
        else:
            _inline_constant(graph_module, node, exported.constants[str(spec.target)])
    count = len(graph_module.graph.output_node().args[0])  # type: ignore[arg-type]
    outputs = tuple(OutputValue("result", key) for key in output_names or [f"result{i}" for i in range(count)])
    unit = Unit(name, graph_module, Signature(tuple(inputs), outputs))
    for module in graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            _set_path(node, prefix.removesuffix("."))
    inline_grad_modes(graph_module, [node for node, value in unit.placeholders() if value.requires_grad])
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return unit


def _inline_constant(module: fx.GraphModule, node: fx.Node, value: Any) -> None:
    if isinstance(value, FakeTensor):
        raise CaptureError(
            "the forward uses a tensor that the trace has no values of",
            where=", ".join({source_line(user): None for user in node.users}),
            why="`.data` of a parameter or buffer, or a tensor that an earlier forward stored on the model",
            hint="write x.detach() instead of x.data, and keep tensors in parameters and buffers",
        )
    target = f"constant_{node.name}"
    setattr(module, target, value)
    with module.graph.inserting_after(node):
        attribute = module.graph.create_node("get_attr", target)
    attribute.meta.update(node.meta)
    node.replace_all_uses_with(attribute)
    module.graph.erase_node(node)


def _set_path(node: fx.Node, prefix: str) -> None:
    stack = node.meta.get("nn_module_stack")
    path = ""
    if stack:
        path = str(list(stack.values())[-1][0]).removeprefix("L['self'].")
        path = "" if path in (prefix, "body") else path.removeprefix(f"{prefix}.")
    node.meta["custom"] = {**(node.meta.get("custom") or {}), "path": path, "line": source_line(node)}


def _length(plan: Plan) -> Any:
    return Dim("length", min=plan.shortest, max=plan.length)


# Inputs of a view that are [B, T].
_WITH_LENGTH = {"input_ids", "labels", "document_ids"}


def _cut(name: str, value: Tensor, length: int) -> Tensor:
    return value[:, :length] if name in _WITH_LENGTH else value


def _tied(module: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    tied = {}
    for path, tensor in weight_slots(module):
        canonical = first.setdefault(id(tensor), path)
        if canonical != path:
            tied[path] = canonical
    return tied
