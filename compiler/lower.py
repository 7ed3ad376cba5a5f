"""Lowering: choose an implementation for every dialect op, late, so that all earlier passes see the meaning.

The table below maps an op to the implementations that exist, best first. An op without an entry runs its reference,
the plain PyTorch body of the op itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from moec.compiler.dialect.registry import lookup


@dataclass(frozen=True)
class Implementation:
    """One way to run an op. `refusal` says why it does not fit a node, '' when it fits."""

    name: str
    target: Callable[..., object]
    refusal: Callable[[fx.Node], str]


IMPLEMENTATIONS: dict[object, tuple[Implementation, ...]] = {}


def lower(graph: fx.Graph) -> dict[str, str]:
    """Replace dialect ops by their implementations; op name -> what was chosen and why, for the log."""
    chosen: dict[str, str] = {}
    for node in graph.nodes:
        definition = lookup(node.target)
        if definition is None:
            continue
        reasons = []
        for candidate in IMPLEMENTATIONS.get(node.target, ()):
            reason = candidate.refusal(node)
            if not reason:
                node.target = candidate.target
                chosen[str(node.target)] = candidate.name
                break
            reasons.append(f"{candidate.name}: {reason}")
        else:
            text = "reference, plain PyTorch inside the op"
            chosen[str(node.target)] = f"{text} ({'; '.join(reasons)})" if reasons else text
    return chosen
