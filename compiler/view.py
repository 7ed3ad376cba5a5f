"""The training view: the module that capture traces around a user's model.

An adapter of `models/` makes one per model. Its module's forward has the signature

    forward(input_ids, labels, inverse_tokens, document_ids=None, image_features=None) -> dict[str, Tensor]

input_ids, labels: int64 [B, T], labels unshifted, -100 ignored. inverse_tokens: scalar, one over the number of valid
tokens of the whole step. document_ids: int64 [B, T], non-decreasing along T. The result holds "objective" (scalar,
what backward starts from), "lm_loss" (scalar), and further scalars that are only reported. Scalars are float32, and
float64 for a model in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch import nn


@dataclass
class TrainingView:
    """A module to capture, and what capture must know about it.

    module: has the user's model as a submodule at `prefix` (so "model." + path is a path of the module).
    prepare: context active while tracing, e.g. one that swaps in exportable implementations; restores on exit.
    notes: what was swapped and why, for the log.
    packing_refusal: why packed documents cannot be kept apart ('' when they can); compile refuses a packing plan then.
    max_length: the longest sequence the model supports, None for no limit.
    vocabulary: number of token ids, for the check of batches; None when unknown.
    images: (placeholder token, width of a feature) of a model that takes image features, None for text alone.
    balanced: (bias buffer, histogram buffer, top-k) of each router that balances itself, by path in the user's model.
    """

    module: nn.Module
    prefix: str = "model."
    prepare: Callable[[], AbstractContextManager[None]] = nullcontext
    notes: list[str] = field(default_factory=list)
    packing_refusal: str = ""
    max_length: int | None = None
    vocabulary: int | None = None
    images: tuple[int, int] | None = None
    balanced: tuple[tuple[str, str, int], ...] = ()
