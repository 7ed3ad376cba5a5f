"""What makes a run the same run, and what may change while it goes on.

A checkpoint and the step that goes on from it must have equal fingerprints: the weights by name, shape, dtype and tie,
and what a step reads: rows of all microbatches and ranks together, and their length. All else are settings: how the
rows are shared out (ranks, microbatches), how the step is computed (recomputation, loss chunks, passes), by which
versions on which device, and how the optimizer is set. They may change when a run is resumed, and each change is noted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moec.compiler.plan import Plan

_FIXED = ("length", "dtype", "packing", "image_tokens")
_VERSIONS = ("moec", "torch", "device", "program")


def fingerprint(artifact: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """What must be equal. artifact: the fingerprint of the emitted step."""
    values = plan.to_dict()
    fixed = {name: values[name] for name in _FIXED}
    return {"weights": artifact["weights"], "rows_per_step": rows_per_step(plan), "plan": fixed}


def rows_per_step(plan: Plan) -> int:
    """Rows that all microbatches of all ranks hold together."""
    return plan.batch * plan.accumulation * plan.mesh.world


def settings(artifact: Mapping[str, Any], plan: Plan, steps: int) -> dict[str, Any]:
    """What may change. steps: length of the whole run, 0 when it is not known."""
    rest = {name: value for name, value in plan.to_dict().items() if name not in _FIXED}
    return {**{name: artifact[name] for name in _VERSIONS}, "steps": steps, "plan": rest}


def may_change(field: str) -> bool:
    """Whether a field of an artefact's fingerprint, as `plan.optimizer.lr`, is a setting."""
    first, *rest = field.split(".")
    return rest[0] not in _FIXED if first == "plan" and rest else first in ("format", *_VERSIONS)
