"""Heads of Hugging Face models: soft cap, logit scale, bias, tied weights; their loss in chunks equals eager's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moec
from moec.backend import BackendLog
from moec.compiler.plan import LossPlan, Plan
from tests.spine import assert_equal_gradients, batch_for, distance, eager

transformers = pytest.importorskip("transformers")

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS: dict[str, tuple[str, dict[str, Any], str]] = {
    "gemma2": ("Gemma2", {"head_dim": 16, "num_key_value_heads": 1, "final_logit_softcapping": 5.0}, ", soft cap 5"),
    "cohere": ("Cohere", {"logit_scale": 0.25}, ", scaled by 0.25"),
    "granite": ("Granite", {"logits_scaling": 4.0}, ", scaled by 0.25"),
    "phi": ("Phi", {}, ""),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}, ""),
}
PLAN = Plan(batch=2, length=8, loss=LossPlan(rows=6, columns=40))


def make(name: str) -> nn.Module:
    family, options, _ = HEADS[name]
    config = getattr(transformers, f"{family}Config")(**COMMON, **options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batch() -> dict[str, Tensor]:
    found = batch_for(PLAN)
    return {"input_ids": found["input_ids"] + 3, "labels": found["labels"] + 3 * (found["labels"] != -100)}


class MeanLoss(nn.Module):
    """The loss that the model itself returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor, **options: Any) -> Tensor:
        return self.model(input_ids=input_ids, labels=labels, use_cache=False, **options).loss


@pytest.mark.parametrize("name", HEADS)
def test_a_compiled_step_has_eagers_loss_and_gradients(name: str) -> None:
    model = make(name)
    values = batch()
    loss, gradients = eager(MeanLoss(model), values)
    step = moec.compile(model, PLAN)
    ((_, match),) = step.log.matches("chunk_loss")
    assert match.what == f"linear_cross_entropy over 97 classes, sum{HEADS[name][2]}, 6 x 40 logits at a time"
    assert distance(step.loss(values)["lm_loss"], loss) <= 1e-6
    wanted = {
        path.removeprefix(
            "model.",
        ): grad
        for path, grad in gradients.items()
    }
    assert_equal_gradients(step.gradients(values), wanted, 2e-5)


@pytest.mark.parametrize("items", [None, 11])
@pytest.mark.parametrize("name", ["gemma2", "llama, tied"])
def test_the_loss_of_the_model_itself_through_the_backend(name: str, items: int | None) -> None:
    """A mean, or a sum over the number of items in the batch that a trainer counts."""
    loss_of, values = MeanLoss(make(name)), batch()
    options = {} if items is None else {"num_items_in_batch": torch.tensor(items)}
    expected = loss_of(**values, **options)
    wanted = torch.autograd.grad(expected, list(loss_of.parameters()))
    log = BackendLog()
    found = torch.compile(loss_of, backend="moec", options={"log": log})(**values, **options)
    grads = torch.autograd.grad(found, list(loss_of.parameters()))
    kind = "mean" if items is None else "sum"
    assert {change.what for _, change in log.passes.matches("chunk_loss")} == {
        f"linear_cross_entropy over 97 classes, {kind}{HEADS[name][2]}, 16 x 97 logits at a time"
    }
    assert distance(found, expected) <= 1e-6
    for grad, one in zip(grads, wanted, strict=True):
        assert distance(grad, one) <= 2e-5
