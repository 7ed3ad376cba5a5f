"""Random batches with all a step has to handle: ragged documents, ignored labels, uneven microbatches, images."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from moec.compiler.plan import Plan
from moec.runtime.step import IGNORED

_BYTES = 256


def random_batches(
    plan: Plan, vocabulary: int | None, seed: int, images: tuple[int, int] | None = None, ranks: int = 1
) -> Iterator[dict[str, Tensor]]:
    """Endless batches on the CPU for a plan, the same for the same seed.

    Tokens follow a skewed distribution in which each token depends on the one before, so that there is something to
    learn. A tenth of the labels and one whole stretch per microbatch are ignored. A packing plan gets documents of
    uneven lengths, single tokens among them. A dynamic length is drawn anew for each batch.

    images: (placeholder token, width of a feature) of a model that takes them. A plan with image tokens gets that many
    placeholders per microbatch, anywhere, without labels, and a normally distributed feature for each. ranks: that
    share the rows later, each with as many placeholders.
    """
    generator = torch.Generator().manual_seed(seed)
    size = vocabulary or _BYTES
    weights = 1.0 / torch.arange(1, size + 1)
    order = torch.randperm(size, generator=generator)
    while True:
        shape = plan.accumulation, plan.batch, _length(plan, generator)
        fresh = torch.multinomial(weights, shape[0] * shape[1] * shape[2], True, generator=generator).view(shape)
        follows = torch.rand(shape, generator=generator) < 0.5
        tokens = fresh.clone()
        for position in range(1, shape[2]):
            tokens[..., position] = torch.where(
                follows[..., position], (tokens[..., position - 1] + 1) % size, fresh[..., position]
            )
        tokens = order[tokens]
        labels = torch.where(torch.rand(shape, generator=generator) < 0.1, IGNORED, tokens)
        start = int(torch.randint(shape[2], (), generator=generator))
        labels[..., 0, start : start + shape[2] // 8] = IGNORED
        batch = {"input_ids": tokens, "labels": labels}
        if plan.image_tokens and images is not None:
            ids, targets = (value.view(shape[0] * ranks, -1, shape[2]) for value in (tokens, labels))
            features = _place_images(ids, targets, plan.image_tokens // ranks, images, size, generator)
            batch["image_features"] = features.view(shape[0], -1, images[1])
        starts = torch.zeros(shape, dtype=torch.bool)
        if plan.packing:
            # Boundaries come in bursts: documents of one or two tokens beside long ones.
            starts = torch.rand(shape, generator=generator) < 0.02
            starts |= starts.roll(1, -1) & (torch.rand(shape, generator=generator) < 0.5)
        starts[..., 0] = True
        labels[starts] = IGNORED
        if plan.packing:
            batch["document_ids"] = starts.cumsum(-1) - 1
        yield {name: value[0] if plan.accumulation == 1 else value for name, value in batch.items()}


def vocabulary_of(model: nn.Module) -> int | None:
    """Rows of the model's first embedding, which takes the token ids; None when it has none."""
    return next((child.num_embeddings for child in model.modules() if isinstance(child, nn.Embedding)), None)


def _place_images(
    tokens: Tensor, labels: Tensor, count: int, images: tuple[int, int], vocabulary: int, generator: torch.Generator
) -> Tensor:
    """Write `count` placeholders into each microbatch of tokens and labels, [A, B, T]; returns features [A, n, D]."""
    placeholder, width = images
    other = (placeholder + 1) % vocabulary
    for value in (tokens, labels):
        value[value == placeholder] = other
    for ids, targets in zip(tokens, labels, strict=True):
        places = torch.randperm(ids.numel(), generator=generator)[:count]
        ids.view(-1)[places] = placeholder
        targets.view(-1)[places] = IGNORED
    return torch.randn(len(tokens), count, width, generator=generator)


def _length(plan: Plan, generator: torch.Generator) -> int:
    if plan.dynamic is None:
        return plan.length
    shortest = max(plan.shortest, -(-plan.image_tokens // plan.batch))
    return int(torch.randint(shortest, plan.length + 1, (), generator=generator))
