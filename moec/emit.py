"""Compile straight into a folder, as `moec compile` does: no run follows, so fake weights are enough."""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import nn

from moec.artifact_files import BUFFERS, GRAPHS, WEIGHTS, check_room
from moec.compiler.log import PassLog
from moec.compiler.plan import Plan
from moec.driver import build, write
from moec.runtime import StepState, export_weights
from moec.runtime.program import CONSTANTS


def emit(model: nn.Module, plan: Plan, out: Path, *, with_weights: bool = False) -> PassLog:
    """Write the artefact of `model` and `plan` into `out`, an empty folder or an older artefact, and return its log.

    with_weights: store the model's weights beside it, so that `moec run` needs nothing else.
    """
    check_room(out)
    compilation = build(model, plan)
    _remove_old(out)
    write(compilation, out)
    if with_weights:
        state = StepState.from_module(model, without_gradient=compilation.unreached)
        export_weights(state, out / WEIGHTS)
    return compilation.log


def _remove_old(out: Path) -> None:
    """What the new artefact may not write again must not be left over."""
    shutil.rmtree(out / GRAPHS, ignore_errors=True)
    for name in (WEIGHTS, BUFFERS, CONSTANTS):
        (out / name).unlink(missing_ok=True)
