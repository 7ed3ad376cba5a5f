"""Errors planted in an emitted program: some of the ops that it calls do another thing, in this program alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moec.step import CompiledStep

Op = Callable[..., Any]


class Planted:
    """A namespace of ops as a program sees it, some of which are others."""

    def __init__(self, plain: Any, wrong: dict[str, Op]) -> None:
        self._plain, self._wrong = plain, wrong

    def __getattr__(self, name: str) -> Any:
        return self._wrong[name] if name in self._wrong else getattr(self._plain, name)


def plant(
    monkeypatch: pytest.MonkeyPatch, step: CompiledStep, namespace: str = "moec", /, **wrong: Callable[[Op], Op]
) -> None:
    """Let the step's program have `wrong[name](op)` in place of each op; the eager reference keeps the right ones."""
    plain = getattr(step.program, namespace)
    for name in wrong:
        assert f"{namespace}.{name}" in step.source, f"the program does not call {name}"
    ops = {name: make(getattr(plain, name)) for name, make in wrong.items()}
    monkeypatch.setattr(step.program, namespace, Planted(plain, ops))
