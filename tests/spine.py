"""Small language models with one trait each, eager references, and comparisons, for the tests of the compiler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moec
from moec.compiler.plan import CachePlan, CacheRule, Plan
from moec.eager import EagerStep
from moec.models.build import build
from moec.models.k3.config import K3Config

VOCABULARY = 16
WIDTH = 8
PLAN = Plan(batch=2, length=6, check=True)

SMALL = K3Config(
    vocab_size=VOCABULARY,
    hidden_size=16,
    layers=2,
    full_attention_layers=(2,),
    residual_block=1,
    kda_heads=2,
    kda_head_dim=8,
    decay_rank=4,
    heads=2,
    q_rank=8,
    kv_rank=8,
    nope_dim=4,
    rope_dim=4,
    value_dim=8,
    indexer_heads=2,
    indexer_dim=8,
    indexer_top_k=4,
    experts=4,
    top_k=2,
    expert_size=8,
    latent_size=8,
    shared_size=8,
    init_std=0.2,
)


class Layer(nn.Module):
    """Norm, gated MLP and a residual; `scale` is a constant of the layer that no parameter shows."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = scale

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        return hidden + self.scale * self.down(F.silu(self.gate(normed)) * self.up(normed))


class Language(nn.Module):
    """Embedding, the given layers, a head; forward(input_ids, labels) -> mean loss over valid tokens."""

    def __init__(self, *layers: nn.Module, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def hidden(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return mean_loss(self.head(self.hidden(input_ids)), labels)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of position t predicting label t + 1, over labels that are not -100."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def recomputed(*paths: str) -> CachePlan:
    """Recompute what lies below these module path patterns."""
    return CachePlan(policy=tuple(CacheRule("recompute", path) for path in paths))


def seeded(make: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> Any:
    """A model whose every parameter is random, the same each time, in training mode."""
    model = make(*args, **kwargs)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return model.train()


def small_k3(**changes: Any) -> Any:
    """A Kimi K3 model of 2 layers, one KDA and one full attention, both with experts."""
    torch.manual_seed(0)
    return build(dataclasses.replace(SMALL, **changes)).train()


def batch_for(plan: Plan, seed: int = 0, length: int | None = None) -> dict[str, Tensor]:
    """Random tokens [A, B, T] ([B, T] when A is 1); each is its own label, and a few are ignored."""
    generator = torch.Generator().manual_seed(seed)
    shape = (plan.accumulation, plan.batch, length or plan.length)
    ids = torch.randint(VOCABULARY, shape, generator=generator)
    labels = ids.masked_fill(torch.rand(shape, generator=generator) < 0.2, -100)
    labels[..., 0] = -100
    return (
        {"input_ids": ids[0], "labels": labels[0]} if plan.accumulation == 1 else {"input_ids": ids, "labels": labels}
    )


def eager(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients of a model that returns its mean loss: over all microbatches, weighted by valid tokens."""
    ids, labels = (batch[name] if batch[name].dim() == 3 else batch[name][None] for name in ("input_ids", "labels"))
    counts = (labels[..., 1:] != -100).sum((1, 2))
    model.zero_grad(set_to_none=True)
    total = torch.zeros(())
    for one, targets, count in zip(ids, labels, counts, strict=True):
        if count:
            loss = model(one, targets) * (count / counts.sum())
            loss.backward()
            total = total + loss.detach()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return total, found


def distance(got: Tensor, wanted: Tensor) -> float:
    """|got - wanted| / |wanted|; infinite where wanted is zero and got is not."""
    got, wanted = got.detach().double(), wanted.detach().double()
    error, size = float((got - wanted).norm()), float(wanted.norm())
    return error / size if size else (0.0 if error == 0 else float("inf"))


def assert_equal_gradients(
    got: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor | None], bound: float = 1e-5
) -> None:
    """Within `bound` per tensor, and the same ones missing (a compiled step has no entry where eager has None)."""
    present = {name for name, grad in wanted.items() if grad is not None}
    assert {name for name, grad in got.items() if grad is not None} == present
    for name in present:
        error = distance(got[name], wanted[name])  # type: ignore[arg-type]
        assert error <= bound, f"{name}: relative error {error:.1e}"


def assert_like_eager_step(
    step: moec.CompiledStep, model: nn.Module, batch: Mapping[str, Tensor], bound: float = 1e-5
) -> dict[str, Tensor]:
    """Losses within 1e-6, and gradients within `bound`, of the model's training view in eager; returns the latter."""
    losses, wanted = EagerStep(model, step.plan).gradients(batch)
    own = step.loss(batch)
    assert own.keys() == losses.keys()
    for name, loss in losses.items():
        assert distance(own[name], loss) <= 1e-6, name
    found = step.gradients(batch)
    assert_equal_gradients(found, wanted, bound)
    return found


def adamw_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameters of a model without convolutions for torch's AdamW, decayed where moec decays them."""
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]


def step_beside(
    step: moec.CompiledStep, twin: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, seeds: Iterable[int]
) -> None:
    """A step of both on each batch, the twin's in eager PyTorch."""
    for seed in seeds:
        batch = batch_for(plan, seed)
        step(batch)
        optimizer.zero_grad()
        twin(batch["input_ids"], batch["labels"]).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()


def assert_like_eager(model: nn.Module, plan: Plan = PLAN, **batch_options: Any) -> moec.CompiledStep:
    """Compile, and compare loss and gradients of one batch with eager; returns the step."""
    step = moec.compile(model, plan)
    batch = batch_for(plan, **batch_options)
    loss, gradients = eager(model, batch)
    assert distance(step.loss(batch)["lm_loss"], loss) <= 1e-6
    assert_equal_gradients(step.gradients(batch), gradients)
    return step
