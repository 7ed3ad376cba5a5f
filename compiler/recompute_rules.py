"""Recompute rules of a plan: which layers run again in backward instead of keeping their values.

A rule is a module path pattern as `fnmatch` reads it ("layers.*.feed_forward", "layers.3.attention", "*"). A rule that
covers only some layers of a template splits it: the covered ones get a template of their own with the same graph.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import replace

import torch

from moec.compiler.capture import Capture
from moec.compiler.errors import PlanError


def apply_recompute_rules(captured: Capture, patterns: Sequence[str]) -> set[str]:
    """Names of the templates to recompute, after splitting those that the rules cover in part.

    Raises PlanError for a pattern that matches no layer, naming the nearest ones.
    """
    paths = [path for template in captured.templates.values() for path in template.paths]
    for pattern in patterns:
        if not fnmatch.filter(paths, pattern):
            near = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.2) or paths[:3]
            raise PlanError(
                f"recompute rule {pattern!r} matches no layer",
                where="plan.recompute",
                hint=f"layers are, for example: {', '.join(near)}" if near else "the model has no repeated layers",
            )
    covered = {path for pattern in patterns for path in fnmatch.filter(paths, pattern)}
    chosen = set()
    for template in list(captured.templates.values()):
        matched = [call for call in template.calls if call.path in covered]
        if not matched:
            continue
        if len(matched) == len(template.calls):
            chosen.add(template.name)
            continue
        twin = replace(template, name=f"{template.name}_recomputed", calls=matched)
        template.calls = [call for call in template.calls if call.path not in covered]
        captured.templates[twin.name] = twin
        chosen.add(twin.name)
        _call_instead(captured, template.name, twin.name, {call.path for call in matched})
    return chosen


def _call_instead(captured: Capture, old: str, new: str, paths: set[str]) -> None:
    for node in captured.program.outer.graph.find_nodes(op="call_function", target=torch.ops.moec.region.default):
        if node.args[0] == old and node.args[1] in paths:
            node.args = (new, *node.args[1:])
    captured.program.outer.module.recompile()
