"""The compiled training step: an emitted program, the state it works on, and the checks around it.

One call is one optimizer step. The batch is checked on the way in (shape, dtype, ranges, document starts), the number
of valid tokens of the whole step is counted, and the program's `step` runs every microbatch and the update.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moec.compiler.autocast import refuse_autocast_around
from moec.compiler.errors import NonFiniteError
from moec.compiler.plan import Plan
from moec.runtime import identity
from moec.runtime.batch import IGNORED, BatchRules
from moec.runtime.protocol import StepResult
from moec.runtime.schedule import Schedule
from moec.runtime.state import StepState
from moec.runtime.trace import first_non_finite


@dataclass
class TrainStep:
    """`step(batch)` or `step(input_ids, labels)`: forward, backward and update over A microbatches, in place.

    batch: input_ids and labels int64 [A, B, T] ([B, T] when A is 1), labels unshifted, -100 ignored; document_ids
    int64 of the same shape when the plan packs (all one document when left out); image_features [A, n, D] when the
    plan has n image tokens per microbatch, one row per placeholder in reading order.
    artifact: fingerprint of the emitted step (moec/artifact.py).
    vocabulary: number of token ids. images: (placeholder token, width of a feature).
    total_steps: length of the run that the learning rate schedule covers; without it a cosine stays at its peak.
    """

    program: ModuleType
    state: StepState
    plan: Plan
    artifact: dict[str, Any]
    vocabulary: int | None = None
    images: tuple[int, int] | None = None
    total_steps: int = 0

    def __post_init__(self) -> None:
        self._rules = BatchRules(self.plan, self.vocabulary, self.images)

    def __call__(
        self,
        batch: Mapping[str, Tensor] | Tensor,
        labels: Tensor | None = None,
        *,
        document_ids: Tensor | None = None,
        lr: float | None = None,
    ) -> StepResult:
        """Run one step; raises BatchError before anything changes, NonFiniteError before weights change."""
        if isinstance(batch, Tensor):
            given = {"input_ids": batch, "labels": labels, "document_ids": document_ids}
            batch = {name: value for name, value in given.items() if value is not None}
        refuse_autocast_around("the step", self.program.DEVICE)
        checked = self._rules.checked(batch)
        valid = int((checked["labels"][..., 1:] != IGNORED).sum())
        if valid == 0:
            warnings.warn("no label of this batch is valid: the loss is 0 and no gradient flows", stacklevel=2)
        rate = self.learning_rate() if lr is None else lr
        self.state.clear_gradients()
        self.state.follow_weights()
        microbatches = self._microbatches(checked, valid)
        try:
            totals, norm = self.program.step(self.state, microbatches, rate)
        except NonFiniteError as error:
            site = first_non_finite(self.program, self.state, microbatches)
            raise NonFiniteError(error.what, where=f"{error.where}: {site}", why=error.why, hint=error.hint) from error
        loss = totals["lm_loss"]
        self.state.note_weights()
        self.state.step += 1
        metrics: dict[str, float | Tensor] = {
            name: value for name, value in totals.items() if name not in ("lm_loss", "objective")
        }
        metrics["lr"] = rate
        return StepResult(loss, norm, checked["input_ids"].numel(), metrics)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint must share with this step."""
        return identity.fingerprint(self.artifact, self.plan)

    @property
    def settings(self) -> dict[str, Any]:
        """What may change between two parts of a run."""
        return identity.settings(self.artifact, self.plan, self.total_steps)

    def learning_rate(self) -> float:
        """The schedule's rate for the step about to run."""
        optimizer = self.plan.optimizer
        total = self.total_steps or optimizer.total_steps
        kind = optimizer.schedule if total > optimizer.warmup_steps else "constant"
        schedule = Schedule(optimizer.lr, kind, optimizer.warmup_steps, total, optimizer.min_lr_ratio)
        return schedule(self.state.step)

    def loss(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Results of the forward alone, summed over the microbatches; changes nothing."""
        totals: dict[str, Tensor] = {}
        with torch.no_grad(), self._buffers_kept():
            for microbatch in self._prepared(batch):
                results, _ = self.program.forward(self.state, microbatch)
                for name, value in results.items():
                    totals[name] = totals[name] + value if name in totals else value
        return totals

    def gradients(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weight path -> gradient of the objective over the batch; changes nothing."""
        self.state.clear_gradients()
        with torch.no_grad(), self._buffers_kept():
            for microbatch in self._prepared(batch):
                _, saved = self.program.forward(self.state, microbatch)
                self.program.backward(self.state, saved)
        found = dict(self.state.gradients)
        self.state.clear_gradients()
        return found

    @contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        """Within the context the program may write buffers (routing counts); they are as before on exit."""
        before = {path: buffer.clone() for path, buffer in self.state.buffers.items()}
        try:
            yield
        finally:
            for path, value in before.items():
                self.state.buffers[path].copy_(value)

    def _prepared(self, batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        refuse_autocast_around("the step", self.program.DEVICE)
        self.state.follow_weights()
        checked = self._rules.checked(batch)
        return self._microbatches(checked, int((checked["labels"][..., 1:] != IGNORED).sum()))

    def _microbatches(self, batch: dict[str, Tensor], valid: int) -> list[dict[str, Tensor]]:
        device = self.program.DEVICE
        inverse = torch.tensor(1.0 / valid if valid else 0.0, dtype=torch.float32, device=device)
        moved = {name: value.to(device) for name, value in batch.items()}
        return [
            {name: value[index] for name, value in moved.items()} | {"inverse_tokens": inverse}
            for index in range(self.plan.accumulation)
        ]
