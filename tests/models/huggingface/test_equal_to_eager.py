"""The training view of each model gives the numbers of the model's own eager forward."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch

from moec.compiler import dialect
from moec.compiler.plan import Plan
from moec.models.huggingface import experts
from moec.models.huggingface.tiny import tiny_config
from tests.models.huggingface.support import KINDS, Case, assert_equal, batch, build, differences, gradients

WITH_AUX_LOSS = ["mixtral", "gpt_oss", "qwen3_next"]


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return {kind: build(kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients(cases: dict[str, Case], kind: str) -> None:
    assert_equal(cases[kind], batch(2, 16))


@pytest.mark.parametrize("kind", KINDS)
def test_experts_without_tokens(cases: dict[str, Case], kind: str) -> None:
    """Three tokens leave some of 8 experts without rows; their gradient is exactly zero."""
    case, values = cases[kind], batch(1, 3)
    values["labels"] = values["input_ids"]
    assert_equal(case, values)
    _, grads = gradients(case.model, case.prepared, values)
    down = [grad for name, grad in grads.items() if name.endswith("experts.down_proj")]
    assert any(float(expert.abs().max()) == 0.0 for grad in down for expert in grad)


@pytest.mark.parametrize("kind", KINDS)
def test_reference_is_the_plain_model(cases: dict[str, Case], kind: str) -> None:
    """`reference` equals what a user gets from model(input_ids, labels)."""
    case, values = cases[kind], batch(2, 16)
    own = case.model(input_ids=values["input_ids"], labels=values["labels"]).loss
    torch.testing.assert_close(case.eager(**values)["lm_loss"], own.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_indexers_alone_have_no_gradient(cases: dict[str, Case], kind: str) -> None:
    _, grads = gradients(cases[kind].model, cases[kind].prepared, batch(2, 16))
    missing = {name for name, grad in grads.items() if grad is None}
    assert all(".indexer." in name for name in missing)
    assert bool(missing) == (kind == "glm_moe_dsa")


@pytest.mark.parametrize("kind", KINDS)
def test_no_valid_token_gives_zero(cases: dict[str, Case], kind: str) -> None:
    values = batch(2, 16)
    values["labels"] = torch.full_like(values["labels"], -100)
    losses, grads = gradients(cases[kind].model, cases[kind].prepared, values)
    assert float(losses["objective"]) == 0.0
    assert all(float(grad.abs().max()) == 0.0 for grad in grads.values() if grad is not None)


@pytest.mark.parametrize("kind", WITH_AUX_LOSS)
def test_aux_loss_is_the_models(kind: str) -> None:
    case = build(kind, output_router_logits=True, router_aux_loss_coef=0.5)
    values = batch(2, 16)
    losses, grads = gradients(case.model, case.prepared, values)

    def own(**_: torch.Tensor) -> dict[str, torch.Tensor]:
        output = case.model(input_ids=values["input_ids"], labels=values["labels"])
        return {"objective": output.loss, "aux_loss": output.aux_loss}

    expected, expected_grads = gradients(case.model, own, values)
    assert differences({name: losses[name] for name in expected}, expected, 1e-6) == []
    assert differences(grads, expected_grads, 1e-5) == []
    # The comparison sees the aux loss: without it the routers' gradients are others.
    without = build(kind)
    without.model.load_state_dict(case.model.state_dict())
    _, other_grads = gradients(without.model, without.prepared, values)
    routers = {name for name in grads if name.endswith(("mlp.gate.weight", "mlp.router.weight"))}
    assert routers <= set(differences(other_grads, expected_grads, 1e-5))


def test_aux_loss_is_averaged_over_accumulation() -> None:
    values = batch(2, 16)
    once = build("mixtral", Plan(batch=2, length=16), output_router_logits=True).prepared(**values)
    quarter = build("mixtral", Plan(batch=2, length=16, accumulation=4), output_router_logits=True).prepared(**values)
    torch.testing.assert_close(quarter["aux_loss"] * 4, once["aux_loss"])
    torch.testing.assert_close(quarter["lm_loss"], once["lm_loss"])
    coefficient = 0.02 if "router_aux_loss_coef" in tiny_config("mixtral") else 0.001
    torch.testing.assert_close(quarter["objective"], once["lm_loss"] + coefficient * quarter["aux_loss"])


def test_tied_weights_have_one_gradient_and_are_noted() -> None:
    case = build("mixtral", tie_word_embeddings=True)
    assert any("lm_head.weight" in note and "model.embed_tokens.weight" in note for note in case.view.notes)
    assert_equal(case, batch(2, 16))


def test_a_mutated_expert_is_seen(cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of this file fails when two experts are swapped, or one gradient is doubled."""
    case, values = cases["mixtral"], batch(2, 16)
    _, expected = gradients(case.model, case.eager, values)

    def swapped(module, hidden, index, weights):  # type: ignore[no-untyped-def]
        return experts.experts_forward(module, hidden, torch.where(index < 2, 1 - index, index), weights)

    monkeypatch.setitem(experts.ALL_EXPERTS_FUNCTIONS._global_mapping, "moec", swapped)
    _, grads = gradients(case.model, case.prepared, values)
    assert "model.layers.0.mlp.experts.down_proj" in differences(grads, expected, 1e-5)
    monkeypatch.undo()
    _, grads = gradients(case.model, case.prepared, values)
    grads["lm_head.weight"] = grads["lm_head.weight"] * 2
    assert differences(grads, expected, 1e-5) == ["lm_head.weight"]


def test_a_dropped_sink_is_seen(cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch) -> None:
    case, values = cases["gpt_oss"], batch(2, 16)
    attention = dialect.attention
    monkeypatch.setattr(dialect, "attention", lambda q, k, v, ids, sinks, **kw: attention(q, k, v, ids, None, **kw))
    losses = case.prepared(**values)
    expected = case.eager(**values)
    assert differences(losses, expected, 1e-6) == ["objective", "lm_loss"]
