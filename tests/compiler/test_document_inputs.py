"""Only what is the batch's document ids in every call of a layer counts as such in its unit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moec.compiler.capture import capture
from moec.compiler.document_inputs import document_inputs
from moec.compiler.plan import Plan
from moec.compiler.view import TrainingView
from moec.models.adapters import training_view
from moec.models.build import build
from moec.preflight import example_inputs

PLAN = Plan(batch=2, length=16, packing=True)


def documents(view: TrainingView, model: nn.Module, plan: Plan = PLAN) -> dict[str, frozenset[str]]:
    return document_inputs(capture(view, plan, example_inputs(model, plan)).program)


def test_layers_of_our_models_get_the_batchs_ids() -> None:
    model = build("k3-tiny").train()
    found = documents(training_view(model, PLAN), model)
    assert found["attention_kda"] == found["attention_mla"] == found["model"] == {"document_ids"}
    assert found["feed_forward_latent_moe"] == frozenset()


def test_without_packing_there_are_none() -> None:
    plan = Plan(batch=2, length=16)
    model = build("k3-tiny").train()
    assert set(documents(training_view(model, plan), model, plan).values()) == {frozenset()}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 8)

    def forward(self, hidden: Tensor, table: Tensor) -> Tensor:
        return hidden + self.table(table)


class Model(nn.Module):
    """The layers get `first` and `second` of the ids."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.embed = nn.Embedding(64, 8)
        self.which = (first, second)

    def forward(
        self, input_ids: Tensor, labels: Tensor, inverse_tokens: Tensor, document_ids: Tensor
    ) -> dict[str, Tensor]:
        tables = {
            "ids": document_ids,
            "short": document_ids.to(torch.int32),
            "reversed": document_ids.max() - document_ids,
            "tokens": input_ids % 64,
        }
        hidden = self.embed(input_ids % 64)
        for layer, which in zip(self.layers, self.which, strict=True):
            hidden = layer(hidden, tables[which])
        loss = hidden.square().mean() * inverse_tokens
        return {"objective": loss, "lm_loss": loss.detach()}


def found_in(first: str, second: str) -> frozenset[str]:
    model = Model(first, second).train()
    view = TrainingView(module=_Prefixed(model))
    (layer,) = [names for unit, names in documents(view, model).items() if unit != "model"]
    return layer


class _Prefixed(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        return self.model(**inputs)  # type: ignore[no-any-return]


def test_an_input_counts_when_it_is_the_ids_in_every_call() -> None:
    assert found_in("ids", "ids") == {"table"}
    assert found_in("short", "short") == {"table"}
    assert found_in("ids", "tokens") == frozenset()
    assert found_in("tokens", "ids") == frozenset()
    assert found_in("reversed", "reversed") == frozenset()
