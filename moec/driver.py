"""`moec.compile(model, plan)`: all stages in order, from a module to a running, readable training step.

1. captured    the view of the model, traced on fakes; one graph per layer template and the outer graph
2. fused       semantic passes on every graph (fused_stage.py)
3. joint, sharded, placed, lowered      from graphs to parts with implementations (placed_stages.py)
4. emitted     the program text; loaded again from that text, so what runs is what can be read
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import moec.codegen.triton  # noqa: F401  registers the kernels
from moec import runtime
from moec.artifact import StateMap, derived_buffers, write_artifact
from moec.codegen.program import ProgramText, write_program
from moec.codegen.update import header_text, update_text
from moec.compilation import Compilation
from moec.compiler.autocast import refuse_autocast_around
from moec.compiler.capture import capture
from moec.compiler.deferred import make_buffers
from moec.compiler.errors import LengthError, PlanError, UnsupportedModelError
from moec.compiler.log import PassLog
from moec.compiler.placement import PlacementPass
from moec.compiler.plan import Plan
from moec.compiler.spec_program import check_emitted
from moec.fused_stage import AfterPass, run_passes
from moec.passes import SHARDING_PASSES
from moec.placed_stages import differentiate_and_place
from moec.placing import step_over
from moec.preflight import checked_view, device_of, device_of_program, example_inputs
from moec.rank_files import write_rank_files
from moec.runtime.program import load_program
from moec.stage_record import timed, unit_graphs
from moec.step import CompiledStep

# Tracing swaps parts of the model and of torch for a while: one compilation at a time in a process.
_COMPILING = threading.RLock()


def compile(model: nn.Module, plan: Plan | None = None, *, weights: str | Path | None = None) -> CompiledStep:
    """Compile a training step for `model`, which keeps its parameters: the step updates them in place.

    model: an nn.Module of ours, of Hugging Face, or any whose forward(input_ids, labels) returns its loss; in training
    mode. plan: shapes, mesh, optimizer, recomputation (compiler/plan.py); the default plan where it is None. With a
    mesh of several ranks all of them call this together, after torch.distributed is initialised, and the parameters
    become DTensors; in a process that is alone the step can be read, saved and simulated. weights: a safetensors file,
    a folder of them (as Hugging Face writes it), or a checkpoint of a run, to start from instead of the model's own
    values.

    A model that was built within `moec.deferred_init()` holds no weights: they are made after the compilation, one at a
    time, and each rank keeps its own rows. With `weights` its parameters may also be on the meta device.

    Raises CaptureError, PlanError, UnsupportedModelError or UnsupportedOpError before anything runs, and
    CheckpointError for weights of another model.
    """
    plan = Plan() if plan is None else plan
    if not isinstance(plan, Plan):
        raise PlanError(f"the plan is a {type(plan).__name__}", hint="give a moec.Plan, as from moec.Plan.from_dict")
    compilation = build(model, plan)
    folder = Path(tempfile.mkdtemp(prefix="moec-step-"))
    write(compilation, folder)
    start = None if weights is None else Path(weights)
    step = step_over(
        model, load_program(folder), folder, compilation.log, compilation.plan, compilation.unreached, start
    )
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
        state_map=StateMap.of(model, compilation.unreached, compilation.view, compilation.written_paths()),
        device=str(device_of_program(model, compilation.plan)),
        derived_buffers=derived_buffers(model),
    )


def build(
    model: nn.Module,
    plan: Plan,
    after_pass: AfterPass | None = None,
    sharding: Sequence[PlacementPass] = SHARDING_PASSES,
) -> Compilation:
    """All stages up to the program's text; works on fake and meta weights too.

    sharding: the passes for several ranks; without them the graphs are what one rank computes on its own rows.
    """
    if not model.training:
        raise UnsupportedModelError(
            "the model is in evaluation mode", why="a training step is compiled", hint="call model.train() first"
        )
    refuse_autocast_around("moec.compile", device_of(model))
    make_buffers(model)
    with _COMPILING, torch.inference_mode(False), torch.enable_grad():
        return _shortest_length_found(plan, lambda chosen: _build(model, chosen, after_pass, sharding))


def _shortest_length_found(plan: Plan, built: Callable[[Plan], Compilation]) -> Compilation:
    """`built(plan)`; where the plan leaves its shortest length open, for the shortest that all graphs take."""
    if plan.dynamic is None or plan.min_length is not None:
        return built(plan)
    shortest = plan.shortest
    while True:
        try:
            return built(replace(plan, min_length=shortest))
        except LengthError as error:
            shortest = error.shortest
            if shortest >= plan.length:
                raise


def _build(
    model: nn.Module, plan: Plan, after_pass: AfterPass | None, sharding: Sequence[PlacementPass]
) -> Compilation:
    log = PassLog()
    view = checked_view(model, plan)
    with timed(log, "captured") as count:
        captured = capture(view, plan, example_inputs(model, plan, view.images))
        count(unit.graph for unit in captured.program.units.values())
    log.notes += captured.notes
    log.near_misses += captured.near_misses
    result = Compilation(model, view, plan, captured, log, sharding)
    result.stages["captured"] = unit_graphs("captured", captured)
    with timed(log, "fused") as count:
        run_passes(captured, plan, log, after_pass)
        count(unit.graph for unit in captured.program.units.values())
    result.stages["fused"] = unit_graphs("fused", captured)
    differentiate_and_place(result)
    with timed(log, "emitted"):
        result.program = _emit(result)
    return result


def _emit(result: Compilation) -> ProgramText:
    assert result.outer is not None
    program = write_program(
        header_text(type(result.model).__name__, result.plan, result.captured),
        device_of_program(result.model, result.plan),
        result.sections,
        result.outer,
        result.captured.program.outer.signature.outputs,
        result.captured.tied,
        update_text(result.plan, result.balanced_routers(), result.joined_buffers()),
        result.host_copies(),
    )
    if result.plan.check:
        check_emitted(program.text, runtime)
    return program
