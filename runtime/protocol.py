"""What the training loop expects of a compiled step and of a source of batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from moec.runtime.state import StepState


@dataclass(frozen=True)
class StepResult:
    """Outcome of one optimizer step.

    loss: float scalar tensor, the language-model loss in nats per valid token over all microbatches.
    gradient_norm: float scalar tensor before clipping. tokens: tokens processed, all microbatches together.
    metrics: further scalars for the log ("lr", "indexer_loss" ...), numbers or scalar tensors.
    """

    loss: Tensor
    gradient_norm: Tensor
    tokens: int
    metrics: Mapping[str, float | Tensor] = field(default_factory=dict)


class OptimizerStep(Protocol):
    """One call is one optimizer step, and adds one to `state.step`.

    fingerprint, settings: JSON values by field name, which a resumed run must share, and which may have changed.
    """

    @property
    def state(self) -> StepState: ...

    @property
    def fingerprint(self) -> Mapping[str, Any]: ...

    @property
    def settings(self) -> Mapping[str, Any]: ...

    def __call__(self, batch: Mapping[str, Tensor], /) -> StepResult: ...


class Batches(Protocol):
    """An endless, resumable source of batches. The position that `state_dict` gives holds JSON values only."""

    def __next__(self) -> dict[str, Tensor]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, position: Mapping[str, Any]) -> None: ...

    def describe(self) -> str:
        """One line on what is read and what was left out."""
        ...
