"""`torch.compile(model, backend="moec")`: the semantic passes on the graphs that Dynamo finds in any code.

1. Each Dynamo graph becomes a unit (`compiler/dynamo.py`).
2. The passes of `moec.compile` run on it, before autograd, so that gradients come from the rules of the dialect's ops.
3. AOTAutograd differentiates; forward and backward keep every value that backward needs, and run as FX graphs.

Options, as in `torch.compile(model, backend="moec", options={...})`: `disable`, `enable`, `check` and `loss` mean what
they mean in a plan (compiler/plan.py); `log` is a `BackendLog` to write to.
"""

from __future__ import annotations

import ast
import linecache
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from moec.compiler._torch_compat import BoxedCodeGen, aot_autograd, default_partition
from moec.compiler.dialect.registry import nbytes
from moec.compiler.dynamo import dynamo_units, path_in, runnable
from moec.compiler.errors import PlanError
from moec.compiler.graph import Program, Unit
from moec.compiler.log import PassLog, StageTime
from moec.compiler.lower import add_choice, lower
from moec.compiler.pass_manager import Pass, PassContext, PassRecord, Pipeline
from moec.compiler.plan import Plan
from moec.compiler.spec import check_lowered, check_stage
from moec.fused_stage import selected_passes

aten = torch.ops.aten


@dataclass(frozen=True)
class GraphBreak:
    """A place where Dynamo left the graph for Python.

    where: file:line in the function. module: path of the module that the graph had reached. values, bytes: what the
    graph hands back to Python there; kept alive, and out of reach of every pass.
    """

    where: str
    module: str
    reason: str
    values: int
    bytes: int

    def __str__(self) -> str:
        after = f", after {self.module}" if self.module else ""
        cost = f"{self.values} values ({self.bytes / 2**20:.3g} MiB) leave the graph"
        return f"{self.where}{after}: {self.reason}; {cost}"


@dataclass(eq=False)  # torch.compile compares options: two logs are two backends
class BackendLog:
    """What the backend did: the log of the passes over all graphs, and the breaks between the graphs.

    compiled: Dynamo's id of each graph ("0/1" is the first recompilation of the first frame), in order.
    """

    passes: PassLog = field(default_factory=PassLog)
    compiled: list[str] = field(default_factory=list)
    breaks: list[GraphBreak] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"graphs compiled: {', '.join(self.compiled) or 'none'}"]
        lines += [f"graph break at {found}" for found in self.breaks]
        return "\n".join([*lines, str(self.passes)])


def last_log() -> BackendLog:
    """The log that the latest graph was written to: that of its options, or the one of the whole process."""
    return _latest[0]


def moec_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile one Dynamo graph; called by torch.compile, once for every graph and set of guards.

    Raises PlanError for an unknown option or pass, and what the passes raise.
    """
    plan, log = _read_options(options or {})
    _latest[0] = log
    name = str(gm.meta.get("dynamo_compile_id", len(log.compiled)))
    log.compiled.append(name)
    _note_break(gm, log)
    with _timed(log.passes, f"captured {name}") as nodes:
        units = dynamo_units(gm, f"graph {name}", log.passes.notes)
        nodes[0] = sum(len(unit.graph.nodes) for unit in units)
    with _timed(log.passes, f"fused {name}") as nodes:
        log.passes.records += _run_passes(units, plan)
        nodes[0] = sum(len(unit.graph.nodes) for unit in units)
    module, constants = runnable(units[0], gm) if units else (gm, [])
    with _timed(log.passes, f"differentiated {name}"):
        compiled = aot_autograd(
            fw_compiler=lambda graph, _: _executable(graph, f"graph {name}", plan, log.passes),
            bw_compiler=lambda graph, _: _executable(graph, f"graph {name} backward", plan, log.passes),
            partition_fn=default_partition,
        )(module, [*example_inputs, *constants])
    return (lambda *args: compiled(*args, *constants)) if constants else compiled


def _read_options(options: Mapping[str, Any]) -> tuple[Plan, BackendLog]:
    values = dict(options)
    log = values.pop("log", _process_log)
    if not isinstance(log, BackendLog):
        raise PlanError(f"option log is a {type(log).__name__}", where="options['log']", hint="give a BackendLog")
    unknown = sorted(set(values) - _PLAN_OPTIONS)
    if unknown:
        raise PlanError(
            f"the moec backend has no option {', '.join(unknown)}",
            where="options of torch.compile",
            hint=f"options: {', '.join(sorted(_PLAN_OPTIONS))}, log; everything else of a plan needs moec.compile",
        )
    return Plan.from_dict(values), log


def _run_passes(units: list[Unit], plan: Plan) -> list[PassRecord]:
    def after(step: Pass, unit: Unit) -> None:
        if plan.check:
            check_stage(unit, step)

    pipeline = Pipeline(selected_passes(plan), after_pass=after)
    pipeline.validate()
    return pipeline.run(Program({unit.name: unit for unit in units}), PassContext(plan=plan))


def _executable(module: fx.GraphModule, name: str, plan: Plan, log: PassLog) -> Callable[[list[Any]], Any]:
    """The graph as a function that takes its arguments in a list, and empties the list to free them early."""
    for node in module.graph.nodes:
        if node.target in _VIEWS:
            # A real kernel may return other strides than its fake (softplus_backward does); then `view` would fail.
            node.target = aten.reshape.default
    for op, text in lower(module.graph).items():
        add_choice(log.lowering, op, text)
    if plan.check:
        check_lowered(module.graph, name)
    module.graph.set_codegen(BoxedCodeGen())
    module.recompile()
    forward = module.forward

    def run(args: list[Any]) -> Any:
        return forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@contextmanager
def _timed(log: PassLog, stage: str) -> Iterator[list[int]]:
    """Add the stage to the log; the one item of the list is its node count."""
    nodes = [0]
    started = time.perf_counter()
    yield nodes
    log.stages.append(StageTime(stage, time.perf_counter() - started, nodes[0]))


def _note_break(gm: fx.GraphModule, log: BackendLog) -> None:
    cause = getattr(gm, "compile_subgraph_reason", None)
    if cause is None or not cause.graph_break:
        return
    paths = [path for node in gm.graph.nodes if node.op == "call_function" and (path := path_in(node))]
    outputs = [node.meta.get("example_value") for node in gm.graph.output_node().all_input_nodes]
    tensors = [value for value in outputs if isinstance(value, Tensor)]
    text = [line.strip() for line in str(cause.reason).splitlines() if line.strip()]
    explanation = next((line for line in text if line.startswith("Explanation:")), "").removeprefix("Explanation: ")
    reason = ": ".join(filter(None, [text[0] if text else "unknown", explanation]))
    where = _frame_text(cause.user_stack[-1]) if cause.user_stack else ""
    log.breaks.append(GraphBreak(where, paths[-1] if paths else "", reason, len(tensors), nbytes(tensors)))


def _frame_text(frame: traceback.FrameSummary) -> str:
    """'moe.py:12 in MoE.forward': Dynamo knows the function, the file tells the class."""
    try:
        tree = ast.parse("".join(linecache.getlines(frame.filename)))
    except SyntaxError:
        return f"{frame.filename}:{frame.lineno} in {frame.name}"
    line = frame.lineno or 0
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    around = [
        node for node in ast.walk(tree) if isinstance(node, kinds) and node.lineno <= line <= (node.end_lineno or line)
    ]
    names = [node.name for node in sorted(around, key=lambda node: node.lineno)]
    return f"{frame.filename}:{frame.lineno} in {'.'.join(names) or frame.name}"


_process_log = BackendLog()
_latest = [_process_log]
_PLAN_OPTIONS = {"check", "disable", "enable", "loss"}
_VIEWS = {aten.view.default, aten._unsafe_view.default}
