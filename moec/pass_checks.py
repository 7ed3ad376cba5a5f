"""Check every pass on its own: a unit's graph before and after it, on real values, forward and backward.

1. The model runs once in eager mode; the inputs of one layer of each template are kept.
2. After each pass that changed a unit's graph, the graph of before and that of after run on the same inputs, weights,
   random state and output gradients. The outer graph runs with its layers executed, the same ones both times.
3. Results and all gradients are compared. An error beyond the fixed bound of the dtype may still be up to three times
   what the old graph does when all of its inputs are off by a rounding: such a number is noise, whatever computes it.
4. Where they differ, the values of all surviving nodes (those that both graphs have) are compared in order, which leads
   to the first one that moved and to the new node it depends on. Where only gradients differ, the same is done with
   the gradients of surviving nodes, last node first.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, fx, nn

from moec.comparison import Progress, silent
from moec.compiler._torch_compat import pytree
from moec.compiler.ambient import current
from moec.compiler.capture import Capture, capture
from moec.compiler.graph import OUTER, Signature, Unit, module_path
from moec.compiler.log import PassLog
from moec.compiler.nodes import source_of
from moec.compiler.pass_manager import Pass
from moec.compiler.plan import Plan
from moec.compiler.printer import graph_text, op_text
from moec.compiler.regions import patched_forwards, weight_slots
from moec.compiler.template import Template
from moec.compiler.view import TrainingView
from moec.distance import largest_by_role, relative_error, role
from moec.fused_stage import DEVICE_PASSES, run_passes
from moec.models.adapters import training_view
from moec.preflight import example_inputs

_BOUNDS = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
_NOISE_RATIO = 3.0
_SAMPLES = 4


@dataclass(frozen=True)
class PassCheck:
    """One pass on one unit.

    changed: False when the graph is the same text. exact: the pass promises the same bits. output_error,
    gradient_error: largest relative error over results and over gradients. excess: largest error over its bound.
    where: the node where numbers move.
    """

    name: str
    unit: str
    changed: bool
    exact: bool
    output_error: float = 0.0
    gradient_error: float = 0.0
    excess: float = 0.0
    where: str = ""

    @property
    def error(self) -> float:
        return max(self.output_error, self.gradient_error)

    @property
    def equal(self) -> bool:
        return self.excess <= 1.0


def check_passes(
    model: nn.Module, plan: Plan, microbatch: Mapping[str, Tensor], progress: Progress = silent
) -> list[PassCheck]:
    """Run all passes of a plan and check each, in the order in which they ran; those for other devices run too.

    microbatch: what the training view takes, [B, T]. The model's buffers change as in any training forward.
    """
    plan = replace(plan, enable=DEVICE_PASSES)
    view = training_view(model, plan)
    captured = capture(view, plan, example_inputs(model, plan))
    values = _record_values(view, captured, microbatch)
    before = {name: _Graph.of(unit, captured.templates) for name, unit in captured.program.units.items()}
    found: list[PassCheck] = []

    def after(step: Pass, unit: Unit) -> None:
        progress(f"pass {step.name} on {unit.name}")
        old, new = before[unit.name], _Graph.of(unit, captured.templates)
        before[unit.name] = new
        if graph_text(old.module.graph) == graph_text(new.module.graph):
            found.append(PassCheck(step.name, unit.name, False, not step.changes_numerics))
            return
        found.append(_check(step, unit.name, old, new, values[unit.name]))

    run_passes(captured, plan, PassLog(), after)
    return found


def pass_check_table(checks: Iterable[PassCheck]) -> Table:
    """One row per pass: on how many graphs it did something, and the largest errors among them."""
    table = Table(title="every pass on its own", title_justify="left", pad_edge=False)
    for title in ("pass", "changed", "results", "gradients", "of the bound", ""):
        table.add_column(title, justify="left" if title in ("pass", "") else "right")
    groups: dict[str, list[PassCheck]] = {}
    for check in checks:
        groups.setdefault(check.name, []).append(check)
    for name, members in groups.items():
        changed = [check for check in members if check.changed]
        row = [name, f"{len(changed)} of {len(members)}"]
        if changed:
            largest = [max(c.output_error for c in changed), max(c.gradient_error for c in changed)]
            row += [f"{error:.2e}" if error else "same bits" for error in largest]
            row += [f"{max(c.excess for c in changed):.2g}", _verdict(changed)]
        table.add_row(*row)
    return table


def _verdict(checks: list[PassCheck]) -> str:
    if not all(check.equal for check in checks):
        return "[red]differs[/red]"
    if any(check.exact and check.error for check in checks):
        return "[yellow]rounds, though it says it does not[/yellow]"
    return "[green]equal[/green]"


@dataclass(frozen=True)
class _Graph:
    """A unit's graph as it was at one moment; the templates that it calls are as they are now."""

    module: fx.GraphModule
    signature: Signature
    templates: Mapping[str, Template]

    @classmethod
    def of(cls, unit: Unit, templates: Mapping[str, Template]) -> _Graph:
        return cls(fx.GraphModule(unit.module, copy.deepcopy(unit.graph)), unit.signature, templates)


@dataclass(frozen=True)
class _Values:
    """Real tensors for a unit's placeholders: weights and buffers by path below the unit, inputs by name."""

    weights: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]

    def of(self, signature: Signature) -> list[Tensor]:
        """Fresh copies, since a graph may write its buffers; leaves where a gradient is wanted."""
        tables = {"input": self.inputs, "weight": self.weights, "buffer": self.weights}
        return [
            tables[value.kind][value.name].detach().clone().requires_grad_(value.requires_grad)
            for value in signature.inputs
        ]

    def rounded_differently(self, seed: int) -> _Values:
        """Every floating point value off by about half a unit in the last place: what rounding alone can do."""
        generator = torch.Generator().manual_seed(seed)

        def off(value: Tensor) -> Tensor:
            if not value.is_floating_point():
                return value
            noise = torch.randn(value.shape, generator=generator).to(value.device)
            return (value.double() * (1.0 + torch.finfo(value.dtype).eps / 2 * noise)).to(value.dtype)

        return _Values({n: off(v) for n, v in self.weights.items()}, {n: off(v) for n, v in self.inputs.items()})


def _record_values(view: TrainingView, captured: Capture, microbatch: Mapping[str, Tensor]) -> dict[str, _Values]:
    root = view.module.get_submodule(view.prefix.removesuffix("."))
    calls = {template.calls[0].path: template.calls[0] for template in captured.templates.values()}
    recorded: dict[str, dict[str, Tensor]] = {}

    def recording(path: str, body: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            tensors += [current()[name] for name in calls[path].ambient]
            recorded[path] = {n: t.detach().clone() for n, t in zip(calls[path].names, tensors, strict=True)}
            return forward(*args, **kwargs)

        return run

    with view.prepare(), patched_forwards({path: root.get_submodule(path) for path in calls}, recording):
        view.module(**microbatch)
    found = {
        name: _Values(dict(weight_slots(root.get_submodule(template.calls[0].path))), recorded[template.calls[0].path])
        for name, template in captured.templates.items()
    }
    return found | {OUTER: _Values(dict(weight_slots(root)), microbatch)}


@dataclass
class _Run:
    """One execution of a graph. nodes (tensors that each yields), node_gradients: by name, only when traced."""

    results: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    nodes: dict[str, list[Tensor]] = field(default_factory=dict)
    node_gradients: dict[str, Tensor | None] = field(default_factory=dict)


def _check(step: Pass, unit: str, old: _Graph, new: _Graph, values: _Values) -> PassCheck:
    one, two = _run(old, values), _run(new, values)
    errors = _errors(one, two)
    base = max(_BOUNDS.get(tensor.dtype, 0.0) for tensor in [*one.results.values(), *values.weights.values()])
    bounds = dict.fromkeys(errors, base)
    if any(error > base for error in errors.values()):
        noise = [largest_by_role(_errors(one, _run(old, values.rounded_differently(seed)))) for seed in range(_SAMPLES)]
        bounds = {name: max(base, _NOISE_RATIO * max(sample[role(name)] for sample in noise)) for name in errors}
    excess = max((error / bounds[name] for name, error in errors.items()), default=0.0)
    where = ""
    if excess > 1.0:
        where = _find_move(new, _run(old, values, trace=True), _run(new, values, trace=True), base)
    return PassCheck(
        step.name,
        unit,
        True,
        not step.changes_numerics,
        max((errors[name] for name in one.results), default=0.0),
        max((errors[name] for name in one.gradients), default=0.0),
        excess,
        where,
    )


def _errors(one: _Run, two: _Run) -> dict[str, float]:
    """Relative error of every result and gradient of the second run."""
    outputs = {name: relative_error(two.results.get(name), value) for name, value in one.results.items()}
    return outputs | {name: relative_error(two.gradients.get(name), value) for name, value in one.gradients.items()}


def _run(graph: _Graph, values: _Values, trace: bool = False) -> _Run:
    leaves = values.of(graph.signature)
    tracer = _Tracer(graph, trace)
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(0)
        outputs = zip(graph.signature.outputs, tracer.run(*leaves), strict=True)
        results = {f"result {output.name}": value for output, value in outputs if isinstance(value, Tensor)}
        starts = [value for value in results.values() if value.requires_grad]
        directions = [torch.randn(value.shape).to(value) for value in starts]
    names = [value.name for value in graph.signature.inputs if value.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    inner = {name: value for name, value in tracer.live.items() if value.requires_grad}
    gradients: list[Tensor | None] = [None] * (len(wanted) + len(inner))
    if starts:
        gradients = list(torch.autograd.grad(starts, [*wanted, *inner.values()], directions, allow_unused=True))
    return _Run(
        {name: value.detach() for name, value in results.items()},
        dict(zip(names, gradients[: len(wanted)], strict=True)),
        tracer.values,
        dict(zip(inner, gradients[len(wanted) :], strict=True)),
    )


class _Tracer(fx.Interpreter):
    """Runs a graph; with `trace` keeps what every node yields: a copy, and the tensor that autograd knows."""

    def __init__(self, graph: _Graph, trace: bool) -> None:
        super().__init__(graph.module)
        self._templates = graph.templates
        self.values: dict[str, list[Tensor]] = {}
        self.live: dict[str, Tensor] = {}
        self._trace = trace

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.moec.region.default:
            template, _, inputs, weights = args
            return self._templates[template].run(inputs, weights)  # the op itself is opaque to autograd
        return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if self._trace and n.op == "call_function":
            tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
            self.values[n.name] = [tensor.detach().clone() for tensor in tensors]
            self.live |= {n.name: value} if isinstance(value, Tensor) else {}
        return value


def _find_move(new: _Graph, one: _Run, two: _Run, bound: float) -> str:
    """The first surviving node of the `new` graph whose value differs, or else the last whose gradient does.

    Where no surviving node is off, the same for results, and for the gradients of inputs.
    """
    graph = new.module.graph
    surviving = [node for node in graph.nodes if node.name in one.nodes and node.name in two.nodes]
    for node in surviving:
        pairs = list(itertools.zip_longest(two.nodes[node.name], one.nodes[node.name]))
        if any(_differs(value, reference, bound) for value, reference in pairs):
            return f"value of {_text(node)}{_new(node.all_input_nodes, one, 'computed from the new')}"
    for node in reversed(surviving):
        gradients = two.node_gradients.get(node.name), one.node_gradients.get(node.name)
        if _differs(*gradients, bound):
            return f"gradient of {_text(node)}{_new(node.users, one, 'which goes through the new')}"
    results: Any = graph.output_node().args[0]
    for node, output in zip(results, new.signature.outputs, strict=True):
        name = f"result {output.name}"
        if name in one.results and _differs(two.results.get(name), one.results[name], bound):
            return f"{name}{_new([node], one, 'which is the new')}"
    for node, value in zip(graph.find_nodes(op="placeholder"), new.signature.inputs, strict=True):
        if _differs(two.gradients.get(value.name), one.gradients.get(value.name), bound):
            return f"gradient of {value.name}{_new(node.users, one, 'which goes through the new')}"
    return "no value or gradient by itself: all are within the bound of their dtype"


def _differs(value: Tensor | None, reference: Tensor | None, bound: float) -> bool:
    if value is None or reference is None:
        return value is not reference
    return value.shape != reference.shape or relative_error(value, reference) > bound


def _new(neighbours: Iterable[fx.Node], one: _Run, phrase: str) -> str:
    """What the old graph did not have among `neighbours`; a result of several by the op that makes them."""
    found = [node for node in neighbours if node.op == "call_function" and node.name not in one.nodes]
    new = dict.fromkeys(source_of(node) if node.target is operator.getitem else node for node in found)
    return f", {phrase} {', '.join(map(_text, new))}" if new else ", whose own arguments changed"


def _text(node: fx.Node) -> str:
    path = module_path(node)
    return f"%{node.name} = {op_text(node.target)}" + (f" in {path}" if path else "")
