"""C01: experts in a loop over those that were hit, whose trip count is data, become a step, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from torch import Tensor

import moec
from moec.compiler.errors import CaptureError, UnsupportedModelError
from moec.compiler.plan import Plan
from moec.models.huggingface import experts

from ..models.huggingface.support import Case, batch, build
from ..moec.dynamo import Losses, assert_same, compiled, loss_and_gradients
from ..spine import assert_like_eager_step

PLAN = Plan(batch=1, length=3)


def looping() -> Case:
    """Mixtral with its own loop over the experts that were hit."""
    case = build("mixtral", PLAN, num_hidden_layers=1, experts_implementation="eager")
    assert case.model.config._experts_implementation == "eager"
    return case


def assert_built_and_equal(case: Case) -> None:
    """Three tokens with two experts each leave some of eight without a token, whose gradients are zeros."""
    step = moec.compile(case.model, PLAN)
    values = batch(*[PLAN.batch, PLAN.length])
    given = {"input_ids": values["input_ids"], "labels": values["input_ids"]}
    found = assert_like_eager_step(step, case.model, given)
    for name in ("gate_up_proj", "down_proj"):
        assert sum(not expert.any() for expert in found[f"model.layers.0.mlp.experts.{name}"]) >= 2


def test_c01_eager_experts_are_switched_and_noted() -> None:
    """The loop cannot be traced; the view replaces it while the step is built, and leaves the model as it was."""
    case = looping()
    assert any("'eager'" in note and "model.layers.0.mlp.experts" in note for note in case.view.notes)
    assert_built_and_equal(case)
    assert case.model.config._experts_implementation == "eager"


def test_c01_a_loop_of_fixed_length_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As traced with a batch that hits the first two experts alone."""

    def fixed(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return experts.experts_forward(module, hidden, index, weights * (index < 2))

    monkeypatch.setitem(experts.ALL_EXPERTS_FUNCTIONS._global_mapping, experts.NAME, fixed)
    with pytest.raises(AssertionError):
        assert_built_and_equal(looping())


def test_c01_a_loop_that_is_traced_is_an_error_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the switch: module, line and what would work, instead of torch's symbols."""
    monkeypatch.setattr(experts, "NAME", "eager")
    with pytest.raises(CaptureError, match="depends on the data: replace the loop") as caught:
        assert_built_and_equal(looping())
    assert "model.layers.0.mlp.experts" in caught.value.where
    assert ".py:" in caught.value.where


SIZES = {"vocab_size": 64, "hidden_size": 32, "num_layers": 1, "num_attention_heads": 2}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "dbrx": (
        "DbrxExperts",
        {"d_model": 32, "n_heads": 2, "n_layers": 1, "vocab_size": 64, "attn_config": {"rope_theta": 10000.0}},
    ),
    "longcat_flash": (
        "LongcatFlashExperts",
        {
            **SIZES,
            "ffn_hidden_size": 32,
            "expert_ffn_hidden_size": 16,
            "n_routed_experts": 2,
            "zero_expert_num": 1,
            "moe_topk": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
}


def assert_refused_by_name(kind: str) -> None:
    name, config = REFUSED[kind]
    with pytest.raises(UnsupportedModelError) as error:
        build(kind, **config)
    text = str(error.value)
    assert name in text
    assert f"modeling_{kind}.py:" in text
    assert "use_experts_implementation" in text


@pytest.mark.parametrize("kind", REFUSED)
def test_c01_loops_outside_the_interface_are_refused(kind: str) -> None:
    assert_refused_by_name(kind)


def test_c01_a_loop_that_nobody_looks_for_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "check_experts", lambda model: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        assert_refused_by_name("dbrx")


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_c01_experts_that_loop_over_who_was_hit_in_dynamo() -> None:
    """Through torch.compile: breaks that are listed, and an error with its line under fullgraph."""
    case = build("mixtral", num_hidden_layers=1, hidden_size=32, experts_implementation="eager")
    model = Losses(case.model)
    ids = torch.tensor([[3, 3, 3, 5], [3, 5, 3, 3]])
    _, gradients = loss_and_gradients(model, model, ids, ids)
    hit = gradients["model.model.layers.0.mlp.experts.gate_up_proj"]
    assert sum(not expert.any() for expert in hit) >= 2, "experts without a token"
    function, log = compiled(model, fullgraph=False)
    assert_same(function, model, ids, ids)
    assert any("Experts.forward" in found.where for found in log.breaks)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"modeling_mixtral\.py|moe\.py") as caught:
        compiled(model)[0](ids, ids)
    assert "in forward" in str(caught.value)
