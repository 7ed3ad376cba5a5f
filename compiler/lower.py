"""Lowering: choose an implementation for every dialect op, late, so that all earlier passes see the meaning.

1. `OPTIONAL` results that nothing uses are not asked for.
2. `IMPLEMENTATIONS` maps an op to the implementations that exist, best first; an op without one that fits runs its
   reference, the plain PyTorch body of the op itself.
3. `TUNING` sets arguments of a reference that change speed but not meaning.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moec.compiler._torch_compat import OpOverload
from moec.compiler.dialect.registry import lookup


@dataclass(frozen=True)
class Implementation:
    """One way to run an op. `refusal` says why it does not fit a node, '' when it fits."""

    name: str
    target: OpOverload
    refusal: Callable[[fx.Node], str]


@dataclass(frozen=True)
class Tuning:
    """Arguments that suit a node's sizes and device, and why."""

    arguments: Mapping[str, Any]
    reason: str


IMPLEMENTATIONS: dict[OpOverload, tuple[Implementation, ...]] = {}


def register_implementation(op: OpOverload, implementation: Implementation) -> None:
    """Add a way to run `op`, tried after those registered before; the layers above this one bring them."""
    IMPLEMENTATIONS[op] = (*IMPLEMENTATIONS.get(op, ()), implementation)


def lower(graph: fx.Graph) -> dict[str, str]:
    """Replace dialect ops by their implementations; op name -> what was chosen and why, for the log."""
    chosen: dict[str, str] = {}
    for node in graph.nodes:
        if lookup(node.target) is not None:
            _ask_for_less(node)
            add_choice(chosen, str(node.target), _choose(node))
    return chosen


def add_choice(chosen: dict[str, str], op: str, text: str) -> None:
    """Note a choice beside those made elsewhere for the same op."""
    before = chosen.get(op)
    if before is None:
        chosen[op] = text
    elif text not in before.split(_AND):
        chosen[op] = f"{before}{_AND}{text}"


def _choose(node: fx.Node) -> str:
    reasons = []
    op: Any = node.target
    for candidate in IMPLEMENTATIONS.get(op, ()):
        reason = candidate.refusal(node)
        if not reason:
            node.target = candidate.target
            return candidate.name
        reasons.append(f"{candidate.name}: {reason}")
    text = "reference, plain PyTorch inside the op"
    rule = TUNING.get(op)
    tuning = rule(node) if rule is not None else None
    if tuning is not None:
        _set_arguments(node, tuning.arguments)
        reasons.append(tuning.reason)
    return f"{text} ({'; '.join(reasons)})" if reasons else text


def _ask_for_less(node: fx.Node) -> None:
    wanted: dict[str, bool] = {}
    used = {user.args[1] for user in node.users if user.target is operator.getitem and user.users}
    for result, argument in OPTIONAL.get(node.target, {}).items():  # type: ignore[call-overload]
        wanted[argument] = wanted.get(argument, False) or result in used
    off = {name: False for name, asked in wanted.items() if not asked}
    if off:
        _set_arguments(node, off)


def argument_of(node: fx.Node, name: str) -> Any:
    """An argument of a node by its schema's name, the default where the call leaves it out."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    position = next(i for i, argument in enumerate(arguments) if argument.name == name)
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name, arguments[position].default_value)


def _set_arguments(node: fx.Node, values: Mapping[str, Any]) -> None:
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    positional = [values.get(name, given) for name, given in zip(names, node.args, strict=False)]
    node.args = tuple(positional)
    node.kwargs = {**node.kwargs, **{name: v for name, v in values.items() if names.index(name) >= len(positional)}}


def _short_chunks(width: Callable[[fx.Node], int]) -> Callable[[fx.Node], Tuning | None]:
    """On a CPU narrow heads are quicker in short chunks: less work inside a chunk, and the state is small."""

    def rule(node: fx.Node) -> Tuning | None:
        on_cpu = argument_of(node, "q").meta["val"].device.type == "cpu"
        return Tuning({"chunk": 16}, "chunk 16 for narrow heads on a CPU") if on_cpu and width(node) <= 32 else None

    return rule


def _kda_width(node: fx.Node) -> int:
    return int(argument_of(node, "q").meta["val"].shape[-1]) // int(argument_of(node, "heads"))


def _delta_width(node: fx.Node) -> int:
    return int(argument_of(node, "q").meta["val"].shape[-1])


_AND = " / "
_OPS = torch.ops.moec
OPTIONAL: dict[OpOverload, Mapping[int, str]] = {
    _OPS.linear_cross_entropy_sum.default: {2: "hidden_grad", 3: "weight_grad", 4: "weight_grad"},
    _OPS.expert_up.default: {0: "keep_pre", 1: "keep_act"},
}
TUNING: dict[OpOverload, Callable[[fx.Node], Tuning | None]] = {
    _OPS.kda.default: _short_chunks(_kda_width),
    _OPS.kda_backward.default: _short_chunks(_kda_width),
    _OPS.kda_with_state.default: _short_chunks(_kda_width),
    _OPS.kda_with_state_backward.default: _short_chunks(_kda_width),
    _OPS.delta_rule.default: _short_chunks(_delta_width),
    _OPS.delta_rule_backward.default: _short_chunks(_delta_width),
}
