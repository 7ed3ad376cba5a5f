"""Autocast: a compiled step has the dtypes of its model, so whoever asks for others is told instead of ignored.

A trace sees the ops above autocast, before their inputs are cast, and torch.export loses a `no_grad` inside of an
autocast context. While a model is traced, its own `torch.autocast(..., enabled=False)` does nothing, which is right
since none is on around it, and any other raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moec.compiler._torch_compat import autocast_is_enabled
from moec.compiler.errors import UnsupportedModelError

AUTOCAST_HINT = "convert the model or its layer instead, model.to(torch.bfloat16), and leave out torch.autocast"


class AutocastInModel(RuntimeError):
    """Raised where a traced model enters autocast."""


def refuse_autocast_around(what: str, device: torch.device) -> None:
    """Raise UnsupportedModelError when autocast is on for `device`; `what` begins the sentence: "the step"."""
    if torch.is_autocast_enabled(device.type):
        raise UnsupportedModelError(
            f"{what} runs under torch.autocast for {device.type}",
            why="a compiled step computes in the dtypes of the model, and autocast would change them behind its ops",
            hint=AUTOCAST_HINT,
        )


@contextmanager
def refuse_autocast_inside() -> Iterator[None]:
    """Within the context, entering an enabled autocast raises AutocastInModel; entering a disabled one does nothing."""
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__

    def checked_enter(self: torch.autocast) -> torch.autocast:
        if autocast_is_enabled(self):
            raise AutocastInModel(f"the model enters torch.autocast for {self.device}")
        return self

    def checked_leave(self: torch.autocast, *error: Any) -> bool:
        return False

    torch.autocast.__enter__, torch.autocast.__exit__ = checked_enter, checked_leave  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__, torch.autocast.__exit__ = enter, leave  # type: ignore[method-assign]
