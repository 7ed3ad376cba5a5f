"""Decide for every forward value that backward uses: keep it, offload it to host memory, or recompute it.

By the rules of the plan, each of which names values by module path and op; the last one that covers a value counts.
Layers of one template whose values go different ways get templates of their own. What may not run again is kept
whatever a rule says, with the reason in the log. `compiler/partition.py` carries the choices out.
"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from moec.compiler.cache_choices import choices_by_rules, split_templates
from moec.compiler.pass_manager import Change, PassContext, Report
from moec.compiler.placement import JointProgram, PlacementPass


class PlaceCache(PlacementPass):
    """Fill `JointProgram.choices` and split templates accordingly."""

    name: ClassVar[str] = "place_cache"
    stage: ClassVar[str] = "placed"
    provides: ClassVar[tuple[str, ...]] = ("cache",)

    def run(self, program: JointProgram, context: PassContext) -> Report:
        """Choose for every layer; the graphs stay as they are, but for the names of templates."""
        report = Report()
        program.choices = split_templates(program, choices_by_rules(program, context.plan.cache.rules))
        for name, choices in program.choices.items():
            counts = Counter(choice.decision for _, choice in choices.by_name)
            if counts:
                text = ", ".join(f"{decision} {count} values" for decision, count in counts.items())
                report.matches.append(Change(name, f"{text} of each of {len(program.templates[name].calls)} layers"))
        return report
