"""Swapping one thing for another while tracing, and putting it back: the mechanism behind `prepare`.

A swap is a context manager over a model. It replaces values in plain dictionaries (a module's or config's attributes,
the globals of a modeling file), says so in the notes, and restores every value on exit, so that the user's model runs
as before once the trace is done.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn


class Notes(list[str]):
    """What was swapped or kept and why, each finding once: swaps are entered several times per compilation."""

    def add(self, text: str) -> None:
        """Append `text` unless it is there already."""
        if text not in self:
            self.append(text)


Swap = Callable[[nn.Module, Notes], AbstractContextManager[None]]
Replacement = tuple[dict[str, Any], str, Any]


@contextmanager
def replaced(replacements: Iterable[Replacement]) -> Iterator[None]:
    """Within the context `table[name]` is `value` for each (table, name, value); restored in reverse order."""
    undo: list[Replacement] = []
    try:
        for table, name, value in replacements:
            undo.append((table, name, table.get(name, _ABSENT)))
            table[name] = value
        yield
    finally:
        for table, name, before in reversed(undo):
            if before is _ABSENT:
                del table[name]
            else:
                table[name] = before


def modeling_globals(model: nn.Module) -> Iterator[dict[str, Any]]:
    """The global namespaces of the files that define the classes of `model`, transformers' own helpers left out."""
    files = dict.fromkeys(type(module).__module__ for module in model.modules())
    for name in files:
        if ".modeling_" in name and name in sys.modules:
            yield vars(sys.modules[name])


def forward_of(module: nn.Module) -> Any:
    """The forward that the module's author wrote, below all decorators."""
    return inspect.unwrap(type(module).forward)


def summary(paths: Iterable[tuple[str, nn.Module]]) -> str:
    """'MixtralExperts x2 (model.layers.0.mlp.experts, ...)' for notes."""
    by_class: dict[str, list[str]] = {}
    for path, module in paths:
        by_class.setdefault(type(module).__name__, []).append(path)
    return ", ".join(
        f"{name} x{len(found)} ({found[0]}, ...)" if len(found) > 1 else f"{name} ({found[0]})"
        for name, found in by_class.items()
    )


_ABSENT: Any = object()
