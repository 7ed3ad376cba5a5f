"""What people hit when they compile Hugging Face MoE models, each case with its right value."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from torch import Tensor

from moec.compiler import dialect
from moec.compiler.errors import UnsupportedModelError
from moec.compiler.plan import Plan
from tests.models.huggingface.support import assert_equal, batch, build, differences, gradients


def test_c01_eager_experts_are_switched_and_noted() -> None:
    """The loop over hit experts has a data-dependent trip count; the view replaces it, also for empty experts."""
    case = build("mixtral", experts_implementation="eager")
    assert case.model.config._experts_implementation == "eager"
    assert any("'eager'" in note and "model.layers.0.mlp.experts" in note for note in case.view.notes)
    values = batch(1, 3)
    values["labels"] = values["input_ids"]
    assert_equal(case, values)
    with case.view.prepare():
        torch.export.export(case.view.module, (), values, strict=False)
    # Without the switch it cannot be traced.
    with pytest.raises(Exception, match=r"data-dependent|nonzero|u0"):
        torch.export.export(case.model, (), {"input_ids": values["input_ids"]}, strict=False)


@pytest.mark.parametrize(
    ("kind", "config", "line"),
    [
        (
            "dbrx",
            {"d_model": 32, "n_heads": 2, "n_layers": 1, "vocab_size": 64, "attn_config": {"rope_theta": 10000.0}},
            "DbrxExperts",
        ),
        (
            "longcat_flash",
            {
                "vocab_size": 64,
                "hidden_size": 32,
                "num_layers": 1,
                "num_attention_heads": 2,
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
            "LongcatFlashExperts",
        ),
    ],
)
def test_c01_loops_outside_the_interface_are_refused(kind: str, config: dict[str, Any], line: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        build(kind, **config)
    text = str(error.value)
    assert line in text
    assert f"modeling_{kind}.py:" in text
    assert "use_experts_implementation" in text


ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {
        "head_dim": 16,
        "max_position_embeddings": 24,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    },
    "longrope": {
        "head_dim": 16,
        "max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.5] * 8,
            "long_factor": [4.0] * 8,
            "original_max_position_embeddings": 24,
            "factor": 2.0,
        },
    },
}


@pytest.mark.parametrize("rope", list(ROPES))
def test_c10_length_dependent_rope(rope: str) -> None:
    """Below the threshold the numbers are the model's; above it the setting is refused by name."""
    case = build("mixtral", Plan(batch=2, length=16), **ROPES[rope])
    assert any(repr(rope) in note for note in case.view.notes)
    assert_equal(case, batch(2, 16))
    with case.view.prepare():
        torch.export.export(case.view.module, (), batch(2, 16), strict=False)
    with pytest.raises(UnsupportedModelError, match=r"rope_type.*\n.*rope_parameters.*plan\.length = 32"):
        build("mixtral", Plan(batch=2, length=32), **ROPES[rope])


def test_c10_the_lengths_differ_in_the_model() -> None:
    """At 32 the model rotates by other frequencies than at 16, so the refusal above is not idle."""
    case = build("mixtral", Plan(batch=2, length=16), **ROPES["dynamic"])
    rope = case.model.model.rotary_emb
    hidden = torch.zeros(1, 1, 64)
    short, _ = rope(hidden, torch.arange(16)[None])
    long, _ = rope(hidden, torch.arange(32)[None])
    assert not torch.allclose(short, long[:, :16])
    # A model that has run beyond its threshold carries other frequencies, and is refused.
    with pytest.raises(UnsupportedModelError, match="rope_type"):
        case.view.module.prepare().__enter__()  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_c15_bias_of_experts_is_weighted(top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases far from 0: added once per expert and weighted by the router."""
    case = build("gpt_oss", num_experts_per_tok=top_k)
    with torch.no_grad():
        for layer in case.model.model.layers:
            layer.mlp.experts.gate_up_proj_bias.normal_(0.0, 2.0)
            layer.mlp.experts.down_proj_bias.normal_(3.0, 2.0)
    values = batch(2, 16)
    assert_equal(case, values)
    if top_k == 1:
        return
    _, expected = gradients(case.model, case.eager, values)
    monkeypatch.setattr(dialect, "unpermute", _bias_unweighted(case.model, dialect.unpermute))
    _, grads = gradients(case.model, case.prepared, values)
    assert "model.layers.1.mlp.experts.down_proj_bias" in differences(grads, expected, 1e-5)


def _bias_unweighted(model: Any, unpermute: Any) -> Any:
    """The mistake that the case is about: the mean bias of a token's experts k times instead of weighted."""
    bias = model.model.layers[1].mlp.experts.down_proj_bias

    def wrong(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
        return unpermute(rows, order, weights) + bias.mean(0) * (weights.shape[1] - 1)

    return wrong


def test_c19_near_ties_choose_as_the_models_router() -> None:
    """A bf16 model whose router computes in float32: margins of 1e-3, below bf16's resolution, decide the experts."""
    case = build("deepseek_v3", n_group=1, topk_group=1, num_experts_per_tok=2)
    model = case.model.to(torch.bfloat16)
    block = model.model.layers[1].mlp
    router = block.gate
    router.weight.data = router.weight.data.float()
    direction = torch.full((64,), 0.125)
    steps = 1.0 + 1e-3 * torch.tensor([3.0, 7.0, 1.0, 0.0, 5.0, 2.0, 6.0, 4.0])
    with torch.no_grad():
        router.weight.copy_(direction * steps[:, None])
        router.e_score_correction_bias.zero_()
    hidden = torch.ones(1, 4, 64, dtype=torch.bfloat16)

    def chosen(run: Any) -> Tensor:
        found: list[Tensor] = []
        handle = router.register_forward_hook(lambda *event: found.append(event[-1][2]))
        run(hidden)
        handle.remove()
        return found[0].sort(dim=-1).values

    eager = chosen(block)
    assert eager.tolist() == [[1, 6]] * 4
    with case.view.prepare():
        assert torch.equal(chosen(block), eager)
        graph = torch.export.export(block, (hidden,), strict=False).graph
    topk = [node for node in graph.nodes if node.target is torch.ops.aten.topk.default]
    assert topk
    assert all(node.args[0].meta["val"].dtype == torch.float32 for node in topk)
    # In bf16 these logits are ties, and others are chosen.
    ties = (hidden.view(-1, 64) @ router.weight.bfloat16().T).sigmoid()
    assert ties.topk(2, dim=-1).values.std() == 0


def test_c20_router_scores_near_zero() -> None:
    """All logits at -60: the normaliser's 1e-20 decides; weights and gradients stay finite and as the model's."""
    case = build("deepseek_v3")
    router = case.model.model.layers[1].mlp.gate
    with torch.no_grad():
        router.weight.fill_(-60.0 / 64)
    seen: list[Tensor] = []
    router.register_forward_pre_hook(lambda module, args: (torch.ones_like(args[0]),))
    router.register_forward_hook(lambda module, args, output: seen.append(output[1].detach()))
    values = batch(2, 16)
    assert_equal(case, values)
    assert torch.isfinite(seen[0]).all()
    torch.testing.assert_close(seen[0], seen[1])
    _, grads = gradients(case.model, case.prepared, values)
    assert all(torch.isfinite(grad).all() for grad in grads.values() if grad is not None)
    assert 0.0 < float(seen[0].max()) < 1e-4
