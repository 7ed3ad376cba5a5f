"""C33: LoRA of peft on stacked experts: the same weights are trained, as in eager, and the log says which experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
import torch
from torch import Tensor

import moec
from moec.compiler.errors import ArtifactError, PlanError, UnsupportedModelError
from moec.compiler.plan import MeshPlan, OptimizerPlan, Plan
from moec.models.adapters import training_view
from moec.models.huggingface import lora
from moec.models.huggingface.adapter import from_config
from moec.rank_checks import verify_lockstep
from moec.verification import verify

from ..spine import assert_like_eager_step

PLAN = Plan(batch=2, length=8, optimizer=OptimizerPlan(lr=1e-2, schedule="constant"), check=True)
CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "mlp_only_layers": [0],  # gate_proj, up_proj and down_proj are linear layers in the first layer alone
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LINEAR = {"target_modules": ["gate_proj", "up_proj", "down_proj"]}
ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def adapted(dtype: torch.dtype = torch.float32, **targets: Any) -> Any:
    """A frozen model with adapters whose values are all random."""
    torch.manual_seed(0)
    model = from_config(CONFIG, dtype=dtype)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, **targets)).train()


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, 64, (PLAN.batch, PLAN.length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def trained(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def assert_adapters_are_trained_as_in_eager(model: Any) -> None:
    """Gradients of the adapters alone, and a step that moves them and nothing else."""
    wanted = trained(model)
    assert wanted
    assert all("lora_" in name for name in wanted)
    step = moec.compile(model, PLAN)
    assert trained(model) == wanted
    assert set(adapter_notes(model)) <= set(step.log.notes)
    assert set(assert_like_eager_step(step, model, batch())) == wanted
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    step(batch())
    assert {name for name, value in model.named_parameters() if not torch.equal(value, before[name])} == wanted
    assert trained(model) == wanted


@pytest.mark.parametrize(
    "targets",
    [
        ATTENTION | EXPERTS,
        pytest.param(LINEAR | EXPERTS, marks=pytest.mark.slow),
        pytest.param(LINEAR, marks=pytest.mark.slow),
    ],
    ids=["attention and experts", "linear and experts", "linear"],
)
def test_c33_adapters_are_trained_as_in_eager(targets: dict[str, Any]) -> None:
    assert_adapters_are_trained_as_in_eager(adapted(**targets))


def test_c33_adapters_that_a_step_forgets_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts run with their frozen weights."""
    monkeypatch.setattr(lora, "adapted_weight", lambda wrapper: wrapper.get_param())
    with pytest.raises(AssertionError):
        assert_adapters_are_trained_as_in_eager(adapted(**ATTENTION, **EXPERTS))


def test_c33_a_base_that_becomes_trainable_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a weight that is put in place while the model runs is a parameter of the usual kind."""
    plain = lora.adapted_weight

    def thawed(wrapper: Any) -> Tensor:
        wrapper.get_param().requires_grad_(True)
        return plain(wrapper)

    monkeypatch.setattr(lora, "adapted_weight", thawed)
    with pytest.raises(ArtifactError, match=r"experts.*which is not trained"):
        assert_adapters_are_trained_as_in_eager(adapted(**EXPERTS))


def adapter_notes(model: Any) -> list[str]:
    """What the log of its step says of the adapters of a model: of experts, then of other layers."""
    return [note for note in training_view(model, PLAN).notes if note.startswith("LoRA")]


def test_c33_the_log_says_which_experts_are_adapted() -> None:
    where = "in Qwen3MoeExperts (model.layers.1.mlp.experts)"
    reached = f"LoRA: adapters on down_proj, gate_up_proj {where}"
    assert adapter_notes(adapted(**EXPERTS)) == [reached, "LoRA: no other layer has an adapter"]
    only_attention = adapter_notes(adapted(**ATTENTION))
    assert only_attention == [f"LoRA: no adapter {where}", "LoRA: adapters on 4 other layers, q_proj, v_proj"]
    # Whether peft takes these names for those of the stacked experts, of the linear ones, or of both.
    linear = adapted(**LINEAR)
    experts, others = adapter_notes(linear)
    names = trained(linear)
    assert (experts == reached) == any(".experts." in name for name in names)
    assert (others == "LoRA: no other layer has an adapter") == all(".experts." in name for name in names)


@pytest.mark.slow
def test_c33_adapters_in_float32_on_a_base_in_bf16() -> None:
    model = adapted(torch.bfloat16, **ATTENTION, **EXPERTS)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    report = verify(model, replace(PLAN, check=False), steps=2)
    assert report.equal, str(report)


@pytest.mark.slow
def test_c33_adapters_on_two_ranks() -> None:
    report = verify_lockstep(adapted(**ATTENTION, **EXPERTS), replace(PLAN, batch=1, mesh=MeshPlan(fsdp=2)), steps=2)
    assert report.equal, str(report)


def test_c33_adapted_experts_are_not_spread_over_ranks() -> None:
    """Each rank holds them whole: what one has of an adapter is not what its experts need."""
    with pytest.raises(PlanError, match=r"mesh\.ep is 2"):
        moec.compile(adapted(**EXPERTS), replace(PLAN, batch=1, mesh=MeshPlan(fsdp=2, ep=2)))


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "PROMPT_TUNING"),
        (peft.AdaLoraConfig(total_step=10, target_modules=["q_proj"]), "ADALORA"),
        (peft.LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[5], **ATTENTION), "aLoRA"),
    ],
    ids=["prompt", "adalora", "alora"],
)
def test_c33_adapters_that_are_more_than_modules_are_refused(config: Any, kind: str) -> None:
    model = peft.get_peft_model(from_config(CONFIG), config)
    with pytest.raises(UnsupportedModelError, match=rf"of the kind {kind}(.|\n)*use LoRA or IA3"):
        moec.compile(model.train(), PLAN)


def test_c33_mixed_adapters_are_refused() -> None:
    model = peft.get_peft_model(from_config(CONFIG), peft.LoraConfig(**ATTENTION), mixed=True)
    with pytest.raises(UnsupportedModelError, match="of several kinds are mixed"):
        moec.compile(model.train(), PLAN)


def test_c33_merged_adapters_are_refused() -> None:
    model = adapted(**ATTENTION)
    model.merge_adapter()
    with pytest.raises(UnsupportedModelError, match=r"q_proj are merged(.|\n)*unmerge_adapter"):
        moec.compile(model.train(), PLAN)
