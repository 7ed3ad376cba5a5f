"""From the cache rules of a plan to a choice for every value, and from choices to layer templates.

Layers of one template whose values go different ways get templates of their own with the same graph, so the emitted
program has one pair of functions for each kind of layer that differs.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from moec.compiler.differentiate import Joint, is_getitem, is_tensor
from moec.compiler.errors import PlanError
from moec.compiler.graph import module_path
from moec.compiler.nodes import target_name
from moec.compiler.partition import KEEP, Choice, Choices, forward_nodes, is_view, may_offload
from moec.compiler.placement import JointProgram
from moec.compiler.plan import CacheRule
from moec.compiler.regions import RegionCall

INPUT = "input"
"""The name of the op that stands for inputs of a layer in a rule."""


def choices_by_rules(
    program: JointProgram, rules: Sequence[CacheRule], *, layers_only: bool = False
) -> tuple[dict[str, Choices], Choices]:
    """Layer path -> choices, and those outside of layers, by the last rule that covers each value.

    layers_only: rules mean layers alone. Raises PlanError for a rule that covers no value, naming the nearest layers.
    """
    used: set[CacheRule] = set()
    found: dict[str, Choices] = {}
    for template in program.templates.values():
        values = list(layer_values(program.joints[template.unit.name]))
        for call in template.calls:
            found[call.path] = _choices(call.path, values, rules, used)
    own = [value for value in layer_values(program.outer) if value[2] != INPUT]
    outside = Choices() if layers_only else _choices("", own, rules, used)
    for rule in rules:
        if rule not in used:
            raise _covers_nothing(rule, list(found))
    return found, outside


def layer_values(joint: Joint) -> Iterator[tuple[fx.Node, str, str]]:
    """(node, module path in the layer, op) of every value that may be kept in one way or another."""
    inputs = {i for i, value in enumerate(joint.unit.signature.inputs) if value.kind == "input"}
    for index, node in enumerate(joint.inputs):
        if index in inputs and may_offload(node):
            yield node, "", INPUT
    forward = forward_nodes(joint)
    for node in joint.graph.nodes:
        if node.op == "call_function" and node in forward and is_tensor(node) and not is_view(node):
            maker = node.args[0] if is_getitem(node) else node
            assert isinstance(maker, fx.Node)
            yield node, module_path(node), target_name(maker).removesuffix(".default")


def split_templates(program: JointProgram, choices: Mapping[str, Choices]) -> dict[str, Choices]:
    """Give layers of different choices different templates; template name -> its choices."""
    found: dict[str, Choices] = {}
    for template in list(program.templates.values()):
        groups: dict[Choices, list[RegionCall]] = {}
        for call in template.calls:
            groups.setdefault(choices[call.path], []).append(call)
        if len(groups) == 1:
            found[template.name] = next(iter(groups))
            continue
        del program.templates[template.name]
        for one, calls in groups.items():
            name = _free_name(f"{template.name}{_suffix(one)}", program.templates)
            program.templates[name] = replace(template, name=name, calls=calls)
            found[name] = one
            _call_instead(program, name, {call.path for call in calls})
    return found


def _choices(
    path: str, values: Sequence[tuple[fx.Node, str, str]], rules: Sequence[CacheRule], used: set[CacheRule]
) -> Choices:
    by_name = []
    for node, inner, op in values:
        full = ".".join(part for part in (path, inner) if part)
        covering = [rule for rule in rules if _covers(rule, full, op)]
        used.update(covering)
        if covering and covering[-1].decision != "keep":
            rule = covering[-1]
            by_name.append((node.name, Choice(rule.decision, f"the plan's rule to {rule.decision} {rule.path}")))
    return Choices(by_name=tuple(by_name))


def _covers(rule: CacheRule, path: str, op: str) -> bool:
    """Whether a pattern matches the module of a value, or one that contains it. Inputs are meant by name alone."""
    if rule.op != INPUT if op == INPUT else not fnmatch.fnmatchcase(op, rule.op):
        return False
    parts = path.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:end]), rule.path) for end in range(1, len(parts) + 1))


def _covers_nothing(rule: CacheRule, layers: Sequence[str]) -> PlanError:
    near = difflib.get_close_matches(rule.path, layers, n=3, cutoff=0.2) or layers[:3]
    op = "" if rule.op == "*" else f" with op {rule.op!r}"
    return PlanError(
        f"the rule to {rule.decision} {rule.path!r}{op} covers no value",
        where="plan.cache.policy",
        hint=f"layers are, for example: {', '.join(near)}" if near else "the model has no repeated layers",
    )


def _suffix(choices: Choices) -> str:
    decisions = {choice.decision for _, choice in choices.by_name} - {KEEP.decision}
    if len(decisions) > 1:
        return "_mixed"
    return {"offload": "_offloaded", "recompute": "_recomputed"}[decisions.pop()] if decisions else ""


def _free_name(wish: str, taken: Mapping[str, object]) -> str:
    name, number = wish, 2
    while name in taken:
        name, number = f"{wish}_{number}", number + 1
    return name


def _call_instead(program: JointProgram, name: str, paths: set[str]) -> None:
    for op in (torch.ops.moec.region.default, torch.ops.moec.region_backward.default):
        for node in program.outer.graph.find_nodes(op="call_function", target=op):
            if node.args[1] in paths:
                node.args = (name, *node.args[1:])
