"""Readable names: templates after what tells them apart, values after the modules they come from."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from moec.compiler.graph import OUTER
from moec.compiler.regions import RegionCall


def template_names(modules: Sequence[Sequence[nn.Module]], groups: Sequence[Sequence[RegionCall]]) -> list[str]:
    """One distinct identifier per group: the regions' common name, and the child classes that set it apart."""
    bases = [_base(group[0].path) for group in groups]
    children = [_child_classes(bodies[0]) for bodies in modules]
    names = []
    for index, base in enumerate(bases):
        rivals = [children[i] for i, other in enumerate(bases) if other == base]
        if len(rivals) == 1:
            names.append(base)
            continue
        shared = set(rivals[0]).intersection(*rivals)
        own = [name for name in children[index] if name not in shared]
        prefix = _common_prefix([name for rival in rivals for name in rival])
        words = [snake_case(name[len(prefix) :] or name) for name in own[:2]]
        names.append("_".join([base, *words]))
    return _distinct(names)


def snake_case(name: str) -> str:
    """'GatedMLAttention' -> 'gated_ml_attention'."""
    parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])|(?<=[a-z0-9])(?=[A-Z]{2})|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return re.sub(r"\W+", "_", parts, flags=re.ASCII).strip("_").lower()


def _distinct(names: Sequence[str]) -> list[str]:
    """The names, those that occur more than once numbered; none is that of the outer unit."""
    found: list[str] = []
    for name in names:
        choices = [name] if names.count(name) == 1 else []
        choices += [f"{name}_{number}" for number in range(1, 2 * len(names) + 2)]
        found.append(next(choice for choice in choices if choice not in (OUTER, *found, *({*names} - {name}))))
    return found


def _common_prefix(names: Sequence[str]) -> str:
    if not names:
        return ""
    shortest, longest = min(names), max(names)
    same = [a == b for a, b in zip(shortest, longest, strict=False)]
    return shortest[: same.index(False)] if False in same else shortest


def _base(path: str) -> str:
    words = [part for part in path.split(".") if not part.isdigit()]
    last = re.sub(r"\W", "_", words[-1], flags=re.ASCII) if words else "layer"
    last = last.removesuffix("s") if path.split(".")[-1].isdigit() or last == "layers" else last
    return f"layer_{last}" if not last or last[0].isdigit() else last if last.strip("_") else "layer"


def _child_classes(body: nn.Module) -> list[str]:
    return [type(child).__name__ for _, child in body.named_children()]
