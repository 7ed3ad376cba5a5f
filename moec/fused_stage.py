"""The stage `fused`: the semantic passes that a plan wants, on every graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moec.compiler.capture import Capture
from moec.compiler.document_inputs import document_inputs
from moec.compiler.errors import PlanError
from moec.compiler.graph import Unit
from moec.compiler.log import PassLog
from moec.compiler.pass_manager import Pass, PassContext, Pipeline
from moec.compiler.plan import Plan
from moec.compiler.spec import check_stage
from moec.passes import SEMANTIC_PASSES

AfterPass = Callable[[Pass, Unit], None]


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
    """Passes that the plan wants and does not disable; a name in its lists that is no such pass raises PlanError."""
    _check_names("disable", plan.disable, [step.name for step in SEMANTIC_PASSES], "is no pass")
    _check_names("enable", plan.enable, DEVICE_PASSES, "is no pass for one kind of device")
    return [step for step in SEMANTIC_PASSES if step.wanted(plan) and step.name not in plan.disable]


DEVICE_PASSES = tuple(step.name for step in SEMANTIC_PASSES if step.device)
"""Names of the passes that are for one kind of device."""


def _check_names(field: str, names: Sequence[str], known: Sequence[str], what: str) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise PlanError(
            f"plan.{field} names {', '.join(unknown)}, which {what}",
            where=f"plan.{field}",
            hint=f"passes: {', '.join(known)}",
        )
