"""The compiled training step: an emitted program, the state it works on, and the checks around it.

One call is one optimizer step. The batch is checked on the way in (shape, dtype, ranges, document starts), the number
of valid tokens of the whole step is counted, and the program's `step` runs every microbatch and the update.

On several ranks each has rows of its own, and all call together. Before the first call they compare what they are about
to run. Valid tokens are counted over all ranks and results summed over them, so every rank returns the same loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moec.compiler.autocast import refuse_autocast_around
from moec.compiler.errors import BatchError, NonFiniteError
from moec.compiler.plan import Plan
from moec.runtime import identity
from moec.runtime.batch import IGNORED, BatchRules
from moec.runtime.capacity import dropped_rows, refuse_overflow
from moec.runtime.control import gathered_texts, summed
from moec.runtime.handshake import agreement, shake_hands
from moec.runtime.protocol import StepResult
from moec.runtime.schedule import Schedule, check_rate
from moec.runtime.state import StepState, scale_dtype
from moec.runtime.trace import first_non_finite
from moec.runtime.undo import Before, interrupts_wait


@dataclass(repr=False)
class TrainStep:
    """`step(batch)` or `step(input_ids, labels)`: forward, backward and update over A microbatches, in place.

    batch: input_ids and labels int64 [A, B, T] ([B, T] when A is 1), labels unshifted, -100 ignored; document_ids
    int64 of the same shape when the plan packs (all one document when left out); image_features [A, n, D] when the
    plan has n image tokens per microbatch, one row per placeholder in reading order.
    artifact: fingerprint of the emitted step (moec/artifact.py).
    vocabulary: number of token ids. images: (placeholder token, width of a feature).
    written: paths of the buffers (and weights) that the program writes, beside the optimizer's updates.
    total_steps: length of the run that the learning rate schedule covers; without it a cosine stays at its peak.
    """

    program: ModuleType
    state: StepState
    plan: Plan
    artifact: dict[str, Any]
    vocabulary: int | None = None
    images: tuple[int, int] | None = None
    written: tuple[str, ...] = ()
    total_steps: int = 0

    def __post_init__(self) -> None:
        self._rules = BatchRules(self.plan, self.vocabulary, self.images)
        self._world, self._met = self.plan.mesh.world, False

    def __call__(
        self,
        batch: Mapping[str, Tensor] | Tensor,
        labels: Tensor | None = None,
        *,
        document_ids: Tensor | None = None,
        lr: float | None = None,
    ) -> StepResult:
        """Run one step. lr: its learning rate, at least 0, instead of the schedule's.

        A step that raises leaves weights, moments, buffers, random generators and the count of steps as they were, and
        no sums; an interrupt that comes while the weights are updated waits until they are. Raises BatchError and
        ModelChangedError before anything runs, NonFiniteError and CapacityError before the update, and UpdateError,
        which names the weights that it has changed, when the update itself fails.
        """
        if isinstance(batch, Tensor):
            given = {"input_ids": batch, "labels": labels, "document_ids": document_ids}
            batch = {name: value for name, value in given.items() if value is not None}
        refuse_autocast_around("the step", self.program.DEVICE)
        self._meet()
        checked, valid = self._checked(batch, lr)
        if valid == 0:
            warnings.warn("no label of this batch is valid: the loss is 0 and no gradient flows", stacklevel=2)
        rate = self.learning_rate() if lr is None else lr
        self.state.follow_weights()
        totals, norm = self._run(self._microbatches(checked, valid), rate)
        totals = self._summed(totals | self._dropped())
        loss = totals["lm_loss"]
        metrics: dict[str, float | Tensor] = {
            name: value for name, value in totals.items() if name not in ("lm_loss", "objective")
        }
        metrics["lr"] = rate
        return StepResult(loss, norm, checked["input_ids"].numel() * self._world, metrics)

    def _run(self, microbatches: list[dict[str, Tensor]], rate: float) -> tuple[dict[str, Tensor], Tensor]:
        """One step of the program, counted; an error leaves things as they were."""
        state = self.state
        state.clear_gradients()
        before = Before(state, self.written, self.program.DEVICE)
        with interrupts_wait(lambda: before.weights_written):
            try:
                totals, norm = self.program.step(state, microbatches, rate)
            except BaseException as error:
                half_done = before.half_done(error)
                before.restore()
                if isinstance(error, NonFiniteError) and half_done is None:
                    raise self._located(error, microbatches, before) from error
                if half_done is None:
                    raise
                if self._world == 1 and isinstance(error, Exception):
                    raise half_done from error
                error.add_note(str(half_done))  # its kind tells the other ranks, or the caller, what to do
                raise
            state.step += 1
            state.note_weights()
        return totals, norm

    def _located(self, error: NonFiniteError, microbatches: list[dict[str, Tensor]], before: Before) -> NonFiniteError:
        """The error with the layer that gave the first value which is not finite, in the same forward again."""
        try:
            site = first_non_finite(self.program, self.state, microbatches)
        finally:
            before.restore()
        return NonFiniteError(error.what, where=f"{error.where}: {site}", why=error.why, hint=error.hint)

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
        """Results of the forward alone, summed over the microbatches and ranks; changes nothing at all."""
        totals: dict[str, Tensor] = {}
        microbatches = self._prepared(batch)
        with torch.no_grad(), self._kept():
            for microbatch in microbatches:
                results = self.program.forward(self.state, microbatch)[0]  # what backward needs goes at once
                for name, value in results.items():
                    totals[name] = totals[name] + value if name in totals else value
            self._refuse_overflow()
            return self._summed(totals | self._dropped())

    def gradients(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weight path -> gradient of the objective over the batch; on several ranks this one's rows. No change."""
        microbatches = self._prepared(batch)
        with torch.no_grad(), self._kept():
            for microbatch in microbatches:
                _, saved = self.program.forward(self.state, microbatch)
                self.program.backward(self.state, saved)
                del saved
            self._refuse_overflow()
            return dict(self.state.gradients)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Within the context the program may write buffers and draw random numbers; all is as before on exit."""
        self.state.clear_gradients()
        before = Before(self.state, self.written, self.program.DEVICE)
        try:
            yield
        finally:
            before.restore()

    def _prepared(self, batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        refuse_autocast_around("the step", self.program.DEVICE)
        self._meet()
        self.state.follow_weights()
        return self._microbatches(*self._checked(batch))

    def _meet(self) -> None:
        """Before anything runs on several ranks: they have to be about to run the same."""
        if self._world == 1:
            return
        from moec.runtime.groups import use  # loads torch.distributed, which one rank does not need

        use(self.plan.mesh)
        if self._met:
            return
        text = Path(str(self.program.__file__)).read_text(encoding="utf-8")
        collectives = getattr(self.program, "COLLECTIVES", ())
        shake_hands(agreement(self.plan.to_dict(), text, collectives, self.state), self._world, self.program.DEVICE)
        self._met = True

    def _checked(self, batch: Mapping[str, Tensor], lr: float | None = None) -> tuple[dict[str, Tensor], int]:
        """The batch in its checked form, and the number of valid tokens of all microbatches and ranks.

        A batch or rate that one rank refuses is a BatchError on all, so that none waits for it.
        """
        if self._world == 1:
            check_rate(lr)
            checked = self._rules.checked(batch)
            return checked, _valid_tokens(checked)
        refusal: BatchError | None = None
        try:
            check_rate(lr)
            checked = self._rules.checked(batch)
        except BatchError as error:
            refusal, checked = error, {}
        device = self.program.DEVICE
        own = [0 if refusal else _valid_tokens(checked), int(refusal is not None)]
        valid, refused = summed(torch.tensor(own, dtype=torch.int64, device=device)).tolist()
        if refused:
            whats = gathered_texts(refusal.what if refusal else "", self._world, device)
            if refusal is not None:
                raise refusal
            rank, what = next((rank, what) for rank, what in enumerate(whats) if what)
            raise BatchError(f"rank {rank} refuses its batch: {what}", hint="the error of that rank says more")
        return checked, valid

    def _refuse_overflow(self) -> None:
        if self.plan.mesh.capacity and self.plan.mesh.overflow == "refuse":
            refuse_overflow(self.state)

    def _dropped(self) -> dict[str, Tensor]:
        """The rows of this rank that its plan left out, as a result to be summed."""
        drops = self.plan.mesh.capacity and self.plan.mesh.overflow == "drop"
        return {"dropped_rows": dropped_rows(self.state)} if drops else {}

    def _summed(self, totals: dict[str, Tensor]) -> dict[str, Tensor]:
        """Results summed over ranks, with one collective."""
        if self._world == 1:
            return totals
        sums = summed(torch.stack([value.double() for value in totals.values()]))
        return {name: sums[index].to(value.dtype) for index, (name, value) in enumerate(totals.items())}

    def _microbatches(self, batch: dict[str, Tensor], valid: int) -> list[dict[str, Tensor]]:
        device, dtype = self.program.DEVICE, scale_dtype(self.state.weights.values())
        inverse = torch.tensor(1.0 / valid if valid else 0.0, dtype=dtype, device=device)
        moved = {name: value.to(device) for name, value in batch.items()}
        return [
            {name: value[index] for name, value in moved.items()} | {"inverse_tokens": inverse}
            for index in range(self.plan.accumulation)
        ]


def _valid_tokens(batch: Mapping[str, Tensor]) -> int:
    """Labels that a token before them predicts."""
    return int((batch["labels"][..., 1:] != IGNORED).sum())
