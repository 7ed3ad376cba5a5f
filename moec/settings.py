"""The plan as the command line gives it: defaults of the command, then a YAML file, then `--set field=value`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from moec.compiler.plan import Plan
from moec.models.adapters import training_view


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


def with_packing(plan: Plan, given: set[str], model: nn.Module) -> Plan:
    """The plan with packing on where the model can keep documents apart, unless the user said something about it."""
    if "packing" in given:
        return plan
    return replace(plan, packing=not training_view(model, plan).packing_refusal)
