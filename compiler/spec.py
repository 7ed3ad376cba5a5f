"""What must hold at each stage, checked after every pass and stage with `check=True` and in tests.

captured, recognized, fused: one flat signature, only registered ops and arithmetic on sizes, metadata on every value.
joint: functional (nothing is written in place), a node for every result, and gradients only of inputs that want one.
placed: the backward reads nothing but inputs, saved values and tangents, every saved value is read, and nothing runs
again that must run once.
lowered: only registered ops and arithmetic on sizes, which the program can write; every op has an implementation for
its device; what stands for something else is gone, but for calls of layers in the outer graph.
emitted: see `spec_program.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import moec.compiler.dynamo  # noqa: F401  (registers moec::held)
from moec.compiler._torch_compat import HigherOrderOperator, OpOverload, has_kernel, pytree, set_grad_enabled_op
from moec.compiler.differentiate import Joint
from moec.compiler.errors import PassError
from moec.compiler.graph import OUTER, Unit, module_path, source_line
from moec.compiler.partition import Partitioned, may_recompute
from moec.compiler.pass_manager import Pass
from moec.compiler.printer import graph_text
from moec.compiler.region_op import region, region_backward
from moec.compiler.size_ops import SIZE_OPS

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
                raise _broken(_of(step), unit.name, unit.graph, rule.name, node, wrong)
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
            raise _broken(DIFFERENTIATE, joint.unit.name, joint.graph, "nothing is written in place", node, wrong)


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
            raise _broken(PARTITION, unit, parts.backward, "what must run once runs once", node, wrong)


def check_lowered(graph: fx.Graph, unit: str) -> None:
    """Raise PassError when the graph of a unit, forward or backward, holds what no program can write or run."""
    for node in graph.nodes:
        for name, broken in LOWERED_RULES:
            wrong = broken(unit, node)
            if wrong:
                raise _broken(LOWER, unit, graph, name, node, wrong)


def _of(step: Pass) -> _Step:
    hint = "run the compilation with this pass in plan.disable to get past it, and report the pass"
    return _Step(f"pass {step.name}", step.stage, hint)


@dataclass(frozen=True)
class _Step:
    """What made a stage, and what to do about its mistakes."""

    name: str
    stage: str
    hint: str


def _broken(step: _Step, unit: str, graph: fx.Graph, rule: str, node: fx.Node, wrong: str) -> PassError:
    lines = graph_text(graph).splitlines()
    index = list(graph.nodes).index(node)
    around = lines[max(0, index - AROUND // 2) : index + AROUND // 2 + 1]
    return PassError(
        f"after {step.name} the {step.stage} spec does not hold: {rule}",
        where=f"unit {unit}, node %{node.name}, module {module_path(node) or '?'} {source_line(node)}",
        why=f"{wrong}; around it:\n    " + "\n    ".join(around),
        hint=step.hint,
    )


_OURS = "report it with the model and the plan: a compilation must not get here"
DIFFERENTIATE = _Step("differentiation", "joint", _OURS)
PARTITION = _Step("partition", "placed", _OURS)
LOWER = _Step("lowering", "lowered", "register what is missing (docs/extending.md), or report it")


def _arguments(node: fx.Node) -> list[Any]:
    return list(node.target._schema.arguments) if isinstance(node.target, OpOverload) else []


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _known_target(unit: Unit, node: fx.Node) -> str:
    if node.op != "call_function" or isinstance(node.target, OpOverload):
        return ""
    if isinstance(node.target, HigherOrderOperator) or node.target is set_grad_enabled_op:
        return ""  # only in graphs of the torch.compile backend, where passes leave them as they are
    if node.target in SIZE_OPS:
        return ""
    return f"{node.target!r} is neither a registered op nor arithmetic on sizes"


def _has_value(unit: Unit, node: fx.Node) -> str:
    return _described(unit.name, node)


def _described(unit: str, node: fx.Node) -> str:
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


def _can_be_written(unit: str, node: fx.Node) -> str:
    if node.op != "call_function" or isinstance(node.target, OpOverload) or node.target in SIZE_OPS:
        return ""
    return f"{node.target!r} is neither a registered op nor arithmetic on sizes, so no program can call it"


def _is_a_call_of_a_layer(unit: str, node: fx.Node) -> str:
    if node.target in _LAYERS and unit != OUTER:
        return f"{node.target} calls a layer from inside of another one"
    return ""


def _has_an_implementation(unit: str, node: fx.Node) -> str:
    if not isinstance(node.target, OpOverload) or node.target in _LAYERS:
        return ""
    if node.target is torch.ops.moec.held.default:
        return "moec.held stands for a higher-order op while a graph is traced, and never runs"
    devices = sorted({tensor.device.type for tensor in _tensors_of(node)})
    missing = [device for device in devices if not has_kernel(node.target, device)]
    return f"{node.target} has no implementation for {missing[0]}" if missing else ""


def _tensors_of(node: fx.Node) -> list[torch.Tensor]:
    values = [node.meta.get("val"), *(source.meta.get("val") for source in node.all_input_nodes)]
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


_LAYERS = {region._opoverload, region_backward._opoverload}

RULES = (
    Rule("only registered ops", _known_target),
    Rule("every value is described", _has_value),
    Rule("outputs match the signature", _shapes_agree),
)
LOWERED_RULES: tuple[tuple[str, Callable[[str, fx.Node], str]], ...] = (
    ("every op can be written", _can_be_written),
    ("every op has an implementation", _has_an_implementation),
    ("layers are called by the model alone", _is_a_call_of_a_layer),
    ("every value is described", _described),
)
