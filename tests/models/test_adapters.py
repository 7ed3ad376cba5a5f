"""Training views: our models, and any module that returns a mean loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moec.compiler.errors import UnsupportedModelError
from moec.compiler.plan import Plan
from moec.models.adapters import training_view
from tests.models.k3_small import assert_close, documents, random_model, small

PLAN = Plan(batch=2, length=8)


class Bigram(nn.Module):
    """A small foreign model; `wrap` makes what its forward returns from the loss."""

    def __init__(self, wrap: Any = None) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 40)
        self.wrap = wrap or (lambda loss: loss)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.table(input_ids)
        return self.wrap(F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))


def _batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[0, 4:] = -100
    return tokens, labels


@pytest.mark.parametrize("kind", ["mla", "dsa"])
def test_k3_view(kind: Any) -> None:
    model = random_model(small(full_attention=kind))
    view = training_view(model, PLAN)
    assert view.module.get_submodule(view.prefix.rstrip(".")) is model
    assert view.packing_refusal == ""
    assert view.vocabulary == 40
    tokens, labels = _batch()
    ids = documents(3, 5).expand(2, -1)
    losses = view.module(tokens, labels, torch.tensor(0.25, dtype=torch.float64), ids)
    wanted = model(tokens, labels, ids)
    scale = 0.25 * int((labels[:, 1:] != -100).sum())
    assert_close(losses["objective"], wanted.loss * scale)
    assert_close(losses["lm_loss"], wanted.lm_loss * scale)
    assert losses["objective"].requires_grad
    assert not losses["lm_loss"].requires_grad
    assert ("indexer_loss" in losses) == (kind == "dsa")
    if kind == "dsa":
        assert_close(losses["objective"].detach(), losses["lm_loss"] + losses["indexer_loss"])


def test_k3_view_names_the_balanced_buffers() -> None:
    model = random_model(small())
    balanced = training_view(model, PLAN).balanced
    buffers = dict(model.named_buffers())
    assert len(balanced) == 4
    for bias, histogram, top_k in balanced:
        assert buffers[bias].shape == (6,)
        assert buffers[histogram].shape == (6, 1000)
        assert top_k == 2
    model.set_balancing(False)
    assert training_view(model, PLAN).balanced == ()


@pytest.mark.parametrize(
    "wrap",
    [None, lambda loss: SimpleNamespace(loss=loss), lambda loss: {"loss": loss}],
    ids=["scalar", "object", "dict"],
)
def test_generic_view(wrap: Any) -> None:
    model = Bigram(wrap)
    view = training_view(model, PLAN)
    tokens, labels = _batch()
    losses = view.module(tokens, labels, torch.tensor(0.125))
    logits = model.table(tokens)[:, :-1].flatten(0, 1)
    wanted = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") * 0.125
    torch.testing.assert_close(losses["objective"], wanted)
    torch.testing.assert_close(losses["lm_loss"], wanted.detach())
    assert "takes no document_ids" in view.packing_refusal


def test_generic_view_without_valid_tokens() -> None:
    model = Bigram()
    tokens, _ = _batch()
    losses = training_view(model, PLAN).module(tokens, torch.full_like(tokens, -100), torch.tensor(0.125))
    losses["objective"].backward()
    assert losses["objective"].item() == 0
    assert model.table.weight.grad is not None
    assert model.table.weight.grad.norm() == 0


def test_generic_view_passes_documents_to_who_takes_them() -> None:
    class Aware(Bigram):
        def forward(self, input_ids: Tensor, labels: Tensor, document_ids: Tensor | None = None) -> Any:
            assert document_ids is not None
            return super().forward(input_ids, labels)

    view = training_view(Aware(), PLAN)
    assert view.packing_refusal == ""
    view.module(*_batch(), torch.tensor(1.0), torch.zeros(2, 8, dtype=torch.int64))


def test_foreign_forwards_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"Linear\.forward takes no input_ids and no labels"):
        training_view(nn.Linear(2, 2), PLAN)
    tokens, labels = _batch()
    view = training_view(Bigram(lambda loss: (loss, None)), PLAN)
    with pytest.raises(UnsupportedModelError, match="returned tuple without a loss"):
        view.module(tokens, labels, torch.tensor(1.0))
