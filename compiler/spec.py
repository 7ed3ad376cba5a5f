"""What must hold of a unit at each stage, checked after every pass with `check=True` and in tests.

`recognized` and `fused` graphs: one flat signature, only ATen and dialect ops (and sizes), metadata on every value,
module paths for compute nodes, no op that the passes promise to have removed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from moec.compiler.errors import PassError
from moec.compiler.graph import Unit, module_path, source_line
from moec.compiler.pass_manager import Pass
from moec.compiler.printer import graph_text

AROUND = 10


@dataclass(frozen=True)
class Rule:
    """One invariant: `broken(unit, node)` says what is wrong with a node, '' when nothing is."""

    name: str
    broken: Callable[[Unit, fx.Node], str]


def check_stage(unit: Unit, step: Pass) -> None:
    """Raise PassError naming the pass, the node, its module and source line, with the ten nodes around it."""
    for node in unit.graph.nodes:
        for rule in RULES:
            wrong = rule.broken(unit, node)
            if wrong:
                raise _spec_error(unit, step, rule, node, wrong)
    placeholders = unit.graph.find_nodes(op="placeholder")
    if len(placeholders) != len(unit.signature.inputs):
        raise PassError(
            f"after pass {step.name} the unit {unit.name} takes {len(placeholders)} values, "
            f"its signature says {len(unit.signature.inputs)}",
            hint="a pass that adds or removes an input must change unit.signature too",
        )


def _spec_error(unit: Unit, step: Pass, rule: Rule, node: fx.Node, wrong: str) -> PassError:
    lines = graph_text(unit.graph).splitlines()
    index = list(unit.graph.nodes).index(node)
    around = lines[max(0, index - AROUND // 2) : index + AROUND // 2 + 1]
    return PassError(
        f"after pass {step.name} the {step.stage} spec does not hold: {rule.name}",
        where=f"unit {unit.name}, node %{node.name}, module {module_path(node) or '?'} {source_line(node)}",
        why=f"{wrong}; around it:\n    " + "\n    ".join(around),
        hint="run the compilation with this pass in plan.disable to get past it, and report the pass",
    )


def _known_target(unit: Unit, node: fx.Node) -> str:
    if node.op != "call_function" or isinstance(node.target, torch._ops.OpOverload):
        return ""
    if node.target in _SIZE_ARITHMETIC or getattr(node.target, "__module__", "") == "torch.fx.experimental._sym":
        return ""
    return f"{node.target!r} is neither a registered op nor arithmetic on sizes"


def _has_value(unit: Unit, node: fx.Node) -> str:
    if node.op == "call_function" and "val" not in node.meta and node.users:
        return 'meta["val"] is missing, so nothing knows its shape'
    return ""


def _shapes_agree(unit: Unit, node: fx.Node) -> str:
    if node.op != "output":
        return ""
    values = node.args[0]
    count = len(values) if isinstance(values, list | tuple) else 1
    wanted = len(unit.signature.outputs)
    return "" if count == wanted else f"it returns {count} values, the signature says {wanted}"


_SIZE_ARITHMETIC = {
    operator.getitem,
    operator.add,
    operator.sub,
    operator.mul,
    operator.floordiv,
    operator.truediv,
    operator.mod,
    operator.neg,
    operator.eq,
    operator.ge,
    operator.le,
    operator.lt,
    operator.gt,
    operator.ne,
    torch.sym_min,
    torch.sym_max,
    torch.sym_float,
    torch.sym_not,
}

RULES = (
    Rule("only registered ops", _known_target),
    Rule("every value is described", _has_value),
    Rule("outputs match the signature", _shapes_agree),
)
