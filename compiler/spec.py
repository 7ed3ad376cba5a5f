"""What must hold at each stage, checked after every pass and stage with `check=True` and in tests.

captured, recognized, fused: one flat signature, only registered ops and arithmetic on sizes, metadata on every value.
joint: functional (nothing is written in place), a node for every result, and gradients only of inputs that want one.
placed: the backward reads nothing but inputs, saved values and tangents, every saved value is read, and nothing runs
again that must run once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moec.compiler._torch_compat import HigherOrderOperator, OpOverload, set_grad_enabled_op
from moec.compiler.differentiate import Joint
from moec.compiler.errors import PassError
from moec.compiler.graph import Unit, module_path, source_line
from moec.compiler.partition import Partitioned, may_recompute
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


def check_joint(joint: Joint) -> None:
    """Raise PassError when a differentiated unit is not functional or returns what its signature does not allow."""
    wanted = {i for i, value in enumerate(joint.unit.signature.inputs) if value.requires_grad}
    extra = sorted(joint.unit.signature.inputs[i].name for i in set(joint.grads) - wanted)
    if extra:
        raise PassError(f"the joint graph of {joint.unit.name} has gradients of {', '.join(extra)}, which wants none")
    for node in joint.graph.nodes:
        written = [argument.name for argument in _arguments(node) if _is_written(argument)]
        if written:
            wrong = f"{node.target} writes its argument {written[0]} in place"
            raise _broken("joint", joint.unit.name, joint.graph, "nothing is written in place", node, wrong)


def check_placed(parts: Partitioned) -> None:
    """Raise PassError when the backward cannot run from what the forward gives it."""
    unit = parts.joint.unit.name
    read = {node.meta["role"] for node in parts.backward.find_nodes(op="placeholder")}
    unread = [node.name for index, node in enumerate(parts.saved) if ("saved", index) not in read]
    if unread:
        raise PassError(f"unit {unit} saves {', '.join(unread)}, which its backward never reads")
    forward = {node.name for node in parts.forward.nodes if node.op == "call_function"}
    for node in parts.backward.nodes:
        again = (
            node.op == "call_function" and node.name in forward and node.meta.get("partitioner_tag") != "is_backward"
        )
        allowed, reason = may_recompute(node) if again else (True, "")
        if not allowed:
            wrong = f"it runs again in backward, although {reason}"
            raise _broken("placed", unit, parts.backward, "what must run once runs once", node, wrong)


def _spec_error(unit: Unit, step: Pass, rule: Rule, node: fx.Node, wrong: str) -> PassError:
    return _broken(
        step.stage,
        unit.name,
        unit.graph,
        rule.name,
        node,
        wrong,
        after=f"after pass {step.name} ",
        hint="run the compilation with this pass in plan.disable to get past it, and report the pass",
    )


def _broken(
    stage: str, unit: str, graph: fx.Graph, rule: str, node: fx.Node, wrong: str, after: str = "", hint: str = ""
) -> PassError:
    lines = graph_text(graph).splitlines()
    index = list(graph.nodes).index(node)
    around = lines[max(0, index - AROUND // 2) : index + AROUND // 2 + 1]
    return PassError(
        f"{after}the {stage} spec does not hold: {rule}",
        where=f"unit {unit}, node %{node.name}, module {module_path(node) or '?'} {source_line(node)}",
        why=f"{wrong}; around it:\n    " + "\n    ".join(around),
        hint=hint,
    )


def _arguments(node: fx.Node) -> list[Any]:
    return list(node.target._schema.arguments) if isinstance(node.target, OpOverload) else []


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _known_target(unit: Unit, node: fx.Node) -> str:
    if node.op != "call_function" or isinstance(node.target, OpOverload):
        return ""
    if isinstance(node.target, HigherOrderOperator) or node.target is set_grad_enabled_op:
        return ""  # only in graphs of the torch.compile backend, where passes leave them as they are
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
