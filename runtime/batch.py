"""The rules for a batch: everything that would otherwise fail late, hang, or pass silently with a wrong result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moec.compiler.errors import BatchError
from moec.compiler.plan import Plan

IGNORED = -100


@dataclass(frozen=True)
class BatchRules:
    """What a batch for a plan looks like.

    vocabulary: number of token ids, None to leave ids unchecked. images: (placeholder token, width of a feature).
    """

    plan: Plan
    vocabulary: int | None = None
    images: tuple[int, int] | None = None

    def checked(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The batch as [A, B, T] tensors (features [A, n, D]); raises BatchError naming the tensor and the rule."""
        names = ["input_ids", "labels", *(["document_ids"] if self.plan.packing else [])]
        unknown = sorted(set(batch) - {"input_ids", "labels", "document_ids", "image_features"})
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
        return shaped | self._features(given, shaped["input_ids"])

    def _features(self, batch: Mapping[str, Tensor], input_ids: Tensor) -> dict[str, Tensor]:
        count, given = self.plan.image_tokens, batch.get("image_features")
        if count == 0 or self.images is None:
            if given is not None:
                raise BatchError(
                    "the batch holds image_features, but the plan has no image tokens",
                    where="plan.image_tokens",
                    hint="compile with image_tokens: N for N placeholder tokens per microbatch",
                )
            return {}
        token, width = self.images
        wanted = [self.plan.accumulation, count, width]
        if given is None:
            raise BatchError("the batch has no image_features", hint=f"give image_features, float {wanted}")
        shaped = given.unsqueeze(0) if given.dim() == 2 and self.plan.accumulation == 1 else given
        if list(shaped.shape) != wanted or not shaped.is_floating_point():
            raise BatchError(
                f"image_features is {given.dtype} {list(given.shape)}", hint=f"image_features is float {wanted}"
            )
        found = (input_ids == token).flatten(1).sum(1)
        if bool((found != count).any()):
            raise BatchError(
                f"microbatches hold {found.tolist()} placeholder tokens ({token}), the plan says {count} each",
                where="plan.image_tokens",
                why="each placeholder in input_ids takes one row of image_features",
            )
        return {"image_features": shaped.to(torch.float32)}

    def _shaped(self, name: str, value: Tensor) -> Tensor:
        plan = self.plan
        wanted = f"[{plan.accumulation}, {plan.batch}, {self._length_text()}]"
        if value.dtype != torch.int64:
            raise BatchError(f"{name} has dtype {value.dtype}", hint=f"{name} is int64 {wanted}")
        shaped = value.unsqueeze(0) if value.dim() == 2 and plan.accumulation == 1 else value
        right = shaped.dim() == 3 and tuple(shaped.shape[:2]) == (plan.accumulation, plan.batch)
        if right and plan.dynamic == "length":
            right = plan.shortest <= shaped.shape[2] <= plan.length
        elif right:
            right = shaped.shape[2] == plan.length
        if not right:
            raise BatchError(
                f"{name} has shape {list(value.shape)}, the step was compiled for {wanted}",
                where="plan.accumulation, plan.batch, plan.length",
                why=self._length_refusal(shaped),
                hint="pad or cut the batch, or compile again with a plan of this shape",
            )
        return shaped

    def _length_refusal(self, shaped: Tensor) -> str:
        """Which lengths the step takes, where the length is what is wrong."""
        plan = self.plan
        if plan.dynamic is None or shaped.dim() != 3 or plan.shortest <= shaped.shape[2] <= plan.length:
            return ""
        found = shaped.shape[2]
        if found < plan.shortest:
            return f"its length is {found}, the shortest that the graph takes is {plan.shortest} (plan.min_length)"
        return f"its length is {found}, the longest that the graph takes is {plan.length} (plan.length)"

    def _length_text(self) -> str:
        plan = self.plan
        return f"{plan.shortest}..{plan.length}" if plan.dynamic == "length" else str(plan.length)

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
