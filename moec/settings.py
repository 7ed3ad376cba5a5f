"""The plan as the command line gives it: defaults of the command, then a YAML file, then `--set field=value`.

Imports no torch, so that a mistake in a plan is answered at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from moec.artifact_files import ARTIFACT, PLAN
from moec.compiler.plan import Plan
from moec.runtime.identity import rows_per_step

if TYPE_CHECKING:
    from torch import nn

TO_VERIFY = {"batch": 2, "length": 128}
"""Plan fields of `moec verify` where the user gives none: equality does not need long rows."""


def read_plan(
    file: Path | None, settings: Sequence[str], defaults: Mapping[str, Any] | None = None
) -> tuple[Plan, set[str]]:
    """The plan, and the names of the top-level fields that the user gave (not those of `defaults`).

    Raises PlanError naming the field for an unknown one or a wrong value.
    """
    given: dict[str, Any] = {}
    if file is not None:
        Plan.from_yaml(file)  # reports a missing file, broken YAML and wrong fields
        given = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    plan = Plan.from_dict({**(defaults or {}), **given}).override(settings)
    return plan, {*given, *(setting.partition("=")[0].strip().split(".")[0] for setting in settings)}


def earlier_plan(out: Path, ranks: int) -> dict[str, Any]:
    """Fields of the plan that the run in `out` has been trained with, for `ranks` ranks; none when there is none yet.

    `batch` is such that a step reads as many rows as before, where microbatches of one size can; `mesh.ep` is the most
    of before that divides the ranks, and experts keep their capacity while rows are exchanged at all.
    """
    path = out / ARTIFACT / PLAN
    if not path.is_file():
        return {}
    plan = Plan.from_yaml(path)
    batch, rest = divmod(rows_per_step(plan), plan.accumulation * ranks)
    ep = math.gcd(plan.mesh.ep, ranks)
    mesh = replace(plan.mesh, fsdp=ranks, ep=ep, capacity=plan.mesh.capacity if ep > 1 else 0.0)
    return replace(plan, mesh=mesh, batch=plan.batch if rest else batch).to_dict()


def with_packing(plan: Plan, given: set[str], model: nn.Module) -> Plan:
    """The plan with packing on where the model can keep documents apart, unless the user said something about it."""
    from moec.models.adapters import training_view

    if "packing" in given:
        return plan
    return replace(plan, packing=not training_view(model, plan).packing_refusal)
