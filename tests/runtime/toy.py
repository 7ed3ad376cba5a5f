"""A training step in plain PyTorch that keeps the protocol of a compiled one, for tests of what runs around it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moec.runtime import PackedText, Schedule, StepResult, StepState, adamw, clip_gradients, parameter_groups


class ToyModel(nn.Module):
    """Bytes -> next byte, with dropout (so that random state matters) and a buffer that every forward changes."""

    def __init__(self, tied: bool = False, size: int = 8, vocabulary: int = 259) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, size)
        self.mix = nn.Linear(size, size)
        self.head = nn.Linear(size, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((size,), 0.5), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        hidden = hidden + F.dropout(torch.tanh(self.mix(hidden)), 0.1, self.training) * self.scale
        self.seen += input_ids.numel()
        return self.head(hidden)


class ToyStep:
    """One call is one AdamW step over all microbatches."""

    def __init__(self, model: ToyModel, total_steps: int = 100, plan: Mapping[str, Any] | None = None) -> None:
        self.model = model
        self.state = StepState.from_module(model)
        self.fingerprint = {"model": "toy", "plan": dict(plan or {"length": 16})}
        self.settings: dict[str, Any] = {"steps": total_steps}
        self._groups = parameter_groups(self.state)
        self._schedule = Schedule(0.01, warmup_steps=3, total_steps=total_steps)

    def __call__(self, batch: Mapping[str, Tensor], /) -> StepResult:
        input_ids, labels = batch["input_ids"], batch["labels"]
        if input_ids.ndim == 2:
            input_ids, labels = input_ids[None], labels[None]
        tokens = (labels[..., 1:] != -100).sum()
        self.state.clear_gradients()
        loss = torch.zeros(())
        trained = {path: self.state.weights[path] for path in self.state.trainable}
        for ids, targets in zip(input_ids, labels, strict=True):
            logits = self.model(ids)[:, :-1].float()
            part = F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), reduction="sum") / tokens
            for path, gradient in zip(trained, torch.autograd.grad(part, list(trained.values())), strict=True):
                self.state.accumulate(path, gradient)
            loss += part.detach()
        norm = clip_gradients(self.state, 1.0)
        lr = self._schedule(self.state.step)
        for name, decay in (("decay", 0.1), ("no_decay", 0.0)):
            adamw(self.state, self._groups[name], lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay)
        self.state.step += 1
        return StepResult(loss, norm, input_ids.numel(), {"lr": lr})


def toy_step(tied: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> ToyStep:
    """A step over a freshly initialised toy model."""
    torch.manual_seed(seed)
    return ToyStep(ToyModel(tied).to(dtype), **options)


def toy_data(folder: Path, **options: Any) -> PackedText:
    """Packed batches over the text files of `folder`."""
    return PackedText([folder], **{"batch": 2, "length": 16, "accumulation": 2, "seed": 3, **options})


def write_corpus(folder: Path, files: int = 5) -> Path:
    """A folder with a few short text files."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(files):
        (folder / f"{index}.txt").write_text(f"file {index}: " + "abc xyz " * (3 + 2 * index) + "\n")
    return folder
