"""The compiled training step: an emitted program, the state it works on, and the checks around it.

One call is one optimizer step. The batch is checked on the way in (shape, dtype, ranges, document starts), the number
of valid tokens of the whole step is counted, and the program's `step` runs every microbatch and the update.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moec.compiler.errors import BatchError, NonFiniteError
from moec.compiler.plan import Plan
from moec.runtime.protocol import StepResult
from moec.runtime.schedule import Schedule
from moec.runtime.state import StepState
from moec.runtime.trace import first_non_finite

IGNORED = -100


@dataclass
class TrainStep:
    """`step(batch)` or `step(input_ids, labels)`: forward, backward and update over A microbatches, in place.

    batch: input_ids and labels int64 [A, B, T] ([B, T] when A is 1), labels unshifted, -100 ignored; document_ids
    int64 of the same shape when the plan packs (all one document when left out).
    total_steps: length of the run that the learning rate schedule covers; without it a cosine stays at its peak.
    """

    program: ModuleType
    state: StepState
    plan: Plan
    fingerprint: dict[str, Any]
    vocabulary: int | None = None
    total_steps: int = 0

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
        checked = self._checked(batch)
        valid = int((checked["labels"][..., 1:] != IGNORED).sum())
        if valid == 0:
            warnings.warn("no label of this batch is valid: the loss is 0 and no gradient flows", stacklevel=2)
        rate = self.learning_rate() if lr is None else lr
        self.state.clear_gradients()
        microbatches = self._microbatches(checked, valid)
        try:
            totals, norm = self.program.step(self.state, microbatches, rate)
        except NonFiniteError as error:
            site = first_non_finite(self.program, self.state, microbatches)
            raise NonFiniteError(error.what, where=f"{error.where}: {site}", why=error.why, hint=error.hint) from error
        loss = totals["lm_loss"]
        self.state.step += 1
        metrics: dict[str, float | Tensor] = {
            name: value for name, value in totals.items() if name not in ("lm_loss", "objective")
        }
        metrics["lr"] = rate
        return StepResult(loss, norm, checked["input_ids"].numel(), metrics)

    def learning_rate(self) -> float:
        """The schedule's rate for the step about to run."""
        optimizer = self.plan.optimizer
        kind = optimizer.schedule if self.total_steps > optimizer.warmup_steps else "constant"
        schedule = Schedule(optimizer.lr, kind, optimizer.warmup_steps, self.total_steps, optimizer.min_lr_ratio)
        return schedule(self.state.step)

    def loss(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Results of the forward alone, summed over the microbatches; changes nothing but routing counts."""
        checked = self._checked(batch)
        valid = int((checked["labels"][..., 1:] != IGNORED).sum())
        totals: dict[str, Tensor] = {}
        for microbatch in self._microbatches(checked, valid):
            with torch.no_grad():
                results, _ = self.program.forward(self.state, microbatch)
            for name, value in results.items():
                totals[name] = totals[name] + value if name in totals else value
        return totals

    def gradients(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weight path -> gradient of the objective over the batch, without an update."""
        checked = self._checked(batch)
        valid = int((checked["labels"][..., 1:] != IGNORED).sum())
        self.state.clear_gradients()
        for microbatch in self._microbatches(checked, valid):
            with torch.no_grad():
                _, saved = self.program.forward(self.state, microbatch)
                self.program.backward(self.state, saved)
        found = dict(self.state.gradients)
        self.state.clear_gradients()
        return found

    def _microbatches(self, batch: dict[str, Tensor], valid: int) -> list[dict[str, Tensor]]:
        device = self.program.DEVICE
        inverse = torch.tensor(1.0 / valid if valid else 0.0, dtype=torch.float32, device=device)
        moved = {name: value.to(device) for name, value in batch.items()}
        return [
            {name: value[index] for name, value in moved.items()} | {"inverse_tokens": inverse}
            for index in range(self.plan.accumulation)
        ]

    def _checked(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The batch as [A, B, T] tensors, or BatchError."""
        names = ["input_ids", "labels", *(["document_ids"] if self.plan.packing else [])]
        unknown = sorted(set(batch) - {"input_ids", "labels", "document_ids"})
        if unknown:
            raise BatchError(f"the batch holds {', '.join(unknown)}, which the step does not take")
        for name in ("input_ids", "labels"):
            if name not in batch:
                raise BatchError(f"the batch has no {name}", hint="give input_ids and labels, int64 [A, B, T]")
        if "document_ids" in batch and not self.plan.packing:
            raise BatchError("the batch holds document_ids, but the plan says packing: false")
        given = dict(batch)
        if self.plan.packing and "document_ids" not in given:
            given["document_ids"] = torch.zeros_like(given["input_ids"])
        shaped = {name: self._shaped(name, given[name]) for name in names}
        lengths = {name: tuple(value.shape) for name, value in shaped.items()}
        if len(set(lengths.values())) > 1:
            raise BatchError("the tensors of a batch have different shapes", why=str(lengths))
        self._check_values(shaped)
        return shaped

    def _shaped(self, name: str, value: Tensor) -> Tensor:
        plan = self.plan
        wanted = f"[{plan.accumulation}, {plan.batch}, {self._length_text()}]"
        if value.dtype != torch.int64:
            raise BatchError(f"{name} has dtype {value.dtype}", hint=f"{name} is int64 {wanted}")
        shaped = value.unsqueeze(0) if value.dim() == 2 and plan.accumulation == 1 else value
        right = shaped.dim() == 3 and tuple(shaped.shape[:2]) == (plan.accumulation, plan.batch)
        if right and plan.dynamic == "length":
            right = plan.min_length <= shaped.shape[2] <= plan.length
        elif right:
            right = shaped.shape[2] == plan.length
        if not right:
            raise BatchError(
                f"{name} has shape {list(value.shape)}, the step was compiled for {wanted}",
                where="plan.accumulation, plan.batch, plan.length",
                hint="pad or cut the batch, or compile again with a plan of this shape",
            )
        return shaped

    def _length_text(self) -> str:
        plan = self.plan
        return f"{plan.min_length}..{plan.length}" if plan.dynamic == "length" else str(plan.length)

    def _check_values(self, batch: dict[str, Tensor]) -> None:
        ids, labels = batch["input_ids"], batch["labels"]
        if self.vocabulary is not None:
            size = self.vocabulary
            _refuse(ids, (ids < 0) | (ids >= size), "input_ids", f"token ids lie in [0, {size})")
            bad = ((labels < 0) & (labels != IGNORED)) | (labels >= size)
            _refuse(labels, bad, "labels", f"labels lie in [0, {size}), or are {IGNORED} to be ignored")
        documents = batch.get("document_ids")
        if documents is not None:
            steps = documents[..., 1:] - documents[..., :-1]
            _refuse(documents[..., 1:], steps < 0, "document_ids", "document ids never decrease along a row")
            crossing = (steps != 0) & (labels[..., 1:] != IGNORED)
            _refuse(
                labels[..., 1:],
                crossing,
                "labels",
                f"the first token of a document must have label {IGNORED}: nothing of its own document predicts it",
            )


def _refuse(values: Tensor, bad: Tensor, name: str, rule: str) -> None:
    if bool(bad.any()):
        place = bad.nonzero()[0].tolist()
        raise BatchError(
            f"{name} holds {int(values[tuple(place)])} at {place} ({int(bad.sum())} such values)", why=rule
        )
