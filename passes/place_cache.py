"""Decide for every forward value that backward uses: keep it, offload it to host memory, or recompute it.

By the rules of the plan, each of which names values by module path and op; the last one that covers a value counts. Or
by a solver (`passes/cache_search.py`), as fast as the limits of the plan on device and host memory allow.

Layers of one template whose values go different ways get templates of their own. What may not run again is kept
whatever a rule says, with the reason in the log. `compiler/partition.py` carries the choices out.
"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from moec.compiler.cache_choices import choices_by_rules, split_templates
from moec.compiler.graph import OUTER
from moec.compiler.op_times import device_of_plan
from moec.compiler.pass_manager import Change, PassContext, Report
from moec.compiler.placement import JointProgram, PlacementPass
from moec.passes.cache_search import CacheSearch, Found


class PlaceCache(PlacementPass):
    """Fill `JointProgram.choices` and split templates accordingly."""

    name: ClassVar[str] = "place_cache"
    stage: ClassVar[str] = "placed"
    provides: ClassVar[tuple[str, ...]] = ("cache",)

    def run(self, program: JointProgram, context: PassContext) -> Report:
        """Choose for every layer; the graphs stay as they are, but for the names of templates."""
        report = Report()
        if context.plan.cache.policy == "auto":
            search = CacheSearch(program, context.plan.cache, context.facts["predict"], device_of_plan(context.plan))
            found = search.run()
            by_layer, outside = found.choices, found.outside
            report.matches.append(Change("", _found_text(found)))
        else:
            cache = context.plan.cache
            by_layer, outside = choices_by_rules(program, cache.rules, layers_only=cache.policy == "recompute")
        program.choices = {**split_templates(program, by_layer), OUTER: outside}
        for name, choices in program.choices.items():
            counts = Counter(choice.decision for _, choice in choices.by_name)
            if counts:
                text = ", ".join(f"{decision} {count} values" for decision, count in counts.items())
                layers = 0 if name == OUTER else len(program.templates[name].calls)
                where = f"of each of {layers} layers" if layers else "outside of layers"
                report.matches.append(Change(name, f"{text} {where}"))
        return report


def _found_text(found: Found) -> str:
    """The predicted time of a microbatch, and how much faster another choice could be at most."""
    return (
        f"a microbatch takes {1e3 * found.timing.total:.3g} ms by its costs, "
        f"at most {100 * found.gap:.2g} % above what any choice can reach"
    )
