"""Models that compile in a second or two, for tests of everything around a compiled step."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moec.models.k3.config import K3Config

VOCABULARY = 260
WIDTH = 16


class Block(nn.Module):
    """A gated MLP over the token and a running mean of its document."""

    moec_region: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor, document_ids: Tensor) -> Tensor:
        same = (document_ids[:, :, None] == document_ids[:, None, :]).tril().to(hidden.dtype)
        mean = (same @ hidden) / same.sum(-1, keepdim=True)
        return hidden + self.down(F.silu(self.up(hidden + mean)))


class SmallModel(nn.Module):
    """forward(input_ids, labels, document_ids) -> mean loss; keeps packed documents apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor, document_ids: Tensor | None = None) -> Tensor:
        documents = torch.zeros_like(input_ids) if document_ids is None else document_ids
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden, documents)
        targets = F.pad(labels[:, 1:], (0, 1), value=-100)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


class Unpackable(SmallModel):
    """The same without document ids."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids, labels)


class WithoutLoss(SmallModel):
    """Returns logits, whatever the labels."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return self.head(self.embed(input_ids))


def make_without_loss() -> nn.Module:
    return WithoutLoss()


def make() -> nn.Module:
    return SmallModel()


def make_unpackable() -> nn.Module:
    return Unpackable()


def make_overwritten() -> nn.Module:
    """A model with a weight that has values before random ones are written to it."""
    model = SmallModel()
    embedding = torch.tensor([[float(row + column) for column in range(WIDTH)] for row in range(VOCABULARY)])
    model.embed.weight = nn.Parameter(embedding.normal_())
    return model


def make_nothing() -> str:
    return "not a module"


def make_with(size: int) -> nn.Module:
    return nn.Linear(size, size)


SMALL_K3 = K3Config(
    vocab_size=260,
    hidden_size=32,
    layers=2,
    full_attention_layers=(2,),
    full_attention="mla",
    residual_block=1,
    kda_heads=2,
    kda_head_dim=16,
    decay_rank=8,
    heads=2,
    q_rank=16,
    kv_rank=16,
    nope_dim=8,
    rope_dim=8,
    value_dim=16,
    dense_layers=0,
    dense_size=32,
    experts=4,
    top_k=2,
    expert_size=16,
    latent_size=16,
    shared_size=16,
    init_std=0.06,
)
