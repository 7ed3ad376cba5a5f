"""Where a rank takes its rows of each weight from: a module that holds all of them, or files read by parts."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn


class WeightSource(Protocol):
    """Values of a model's weights, a few rows at a time."""

    def rows(self, path: str, rows: range) -> Tensor:
        """Rows of the first dimension of the weight at a path, [len(rows), ...]; a scalar is one row."""
        ...

    def buffer(self, path: str) -> Tensor | None:
        """The value of a buffer; None to keep what the module has."""
        ...


class ModuleWeights:
    """The weights that a module holds whole."""

    def __init__(self, module: nn.Module) -> None:
        self._weights = dict(module.named_parameters(remove_duplicate=False))

    def rows(self, path: str, rows: range) -> Tensor:
        """See `WeightSource`."""
        weight = self._weights[path].detach()
        return (weight if weight.dim() else weight.reshape(1))[rows.start : rows.stop]

    def buffer(self, path: str) -> Tensor | None:
        """The module's own buffers are the run's."""
        return None
