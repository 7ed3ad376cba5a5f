"""Ambient tensors: values that layers read without receiving them as arguments.

A model whose layers take no document ids in their signature can still keep packed documents apart: its training view
enters `ambient_scope(document_ids=...)` around the model's forward, and an op swapped into a layer asks for
`ambient("document_ids")`. Capture treats what is in scope at the call of a layer as further inputs of that layer: it
reads `current()`, and inside the layer's own graph enters `ambient_scope` again with the graph's placeholders.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor


class Ambient:
    """A table of named tensors with nested scopes.

    A plain object, not a ContextVar, so that Dynamo can trace reads of it; use from one thread at a time.
    """

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    @contextmanager
    def scope(self, **tensors: Tensor | None) -> Iterator[None]:
        """Within the context the given names hold these tensors; None hides an outer value. Restores on exit."""
        outer = self.values
        self.values = {name: value for name, value in {**outer, **tensors}.items() if value is not None}
        try:
            yield
        finally:
            self.values = outer


AMBIENT = Ambient()


def ambient(name: str) -> Tensor | None:
    """The tensor of this name in the innermost scope, or None."""
    return AMBIENT.values.get(name)


def ambient_scope(**tensors: Tensor | None) -> AbstractContextManager[None]:
    """A context in which `ambient(name)` yields the given tensors; see Ambient.scope."""
    return AMBIENT.scope(**tensors)


def current() -> dict[str, Tensor]:
    """All tensors in scope, by name, in the order in which they were set."""
    return dict(AMBIENT.values)
