"""Published checkpoint names and shapes, both ways."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moec.compiler.errors import CheckpointError
from moec.compiler.pieces import by_weight
from moec.models.build import build
from moec.models.k3.checkpoint import published_pieces, to_huggingface
from moec.models.k3.config import K3Config
from moec.models.presets import preset
from tests.models.k3_small import kimi_linear_small, random_model, small

CONFIGS = {
    "mla": small(),
    "dsa": small(full_attention="dsa"),
    "dsa direct queries": small(full_attention="dsa", q_rank=0, shared_size=0),
    "gqa": small(full_attention="gqa", heads=4, kv_heads=2),
    "kimi-linear": kimi_linear_small(),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_every_element_has_one_place(config: K3Config) -> None:
    state = random_model(config).state_dict()
    published = dict(to_huggingface(state, config))
    back = {path: torch.full_like(value, float("nan")).view(-1) for path, value in state.items()}
    pieces = published_pieces(config)
    assert len({piece.name for piece in pieces}) == len(pieces) == len(published)
    for piece in pieces:
        place = back[piece.path][piece.start : piece.start + piece.numel]
        assert place.isnan().all()
        place.copy_(published[piece.name].reshape(-1)[: place.numel()])
    assert all(torch.equal(back[path].view(value.shape), value) for path, value in state.items())


@pytest.mark.parametrize("name", ["k3", "k3-dsa", "kimi-linear-48b", "k3-mini", "k3-tiny", "k3-dsa-tiny"])
def test_table_covers_the_presets(name: str) -> None:
    state = build(name, device="meta").state_dict()
    found = by_weight(published_pieces(preset(name)))
    assert found.keys() == state.keys()
    assert all(sum(piece.numel for piece in found[path]) >= value.numel() for path, value in state.items())


def test_published_names_and_shapes() -> None:
    config = small()
    published = dict(to_huggingface(random_model(config).state_dict(), config))
    start = "language_model.model.layers"
    wanted = {
        "language_model.lm_head.weight": (40, 24),
        "language_model.model.embed_tokens.weight": (40, 24),
        "language_model.model.output_attn_res_proj.weight": (1, 24),
        f"{start}.0.self_attention_res_norm.weight": (24,),
        f"{start}.0.self_attn.q_conv1d.weight": (16, 1, 4),
        f"{start}.0.self_attn.A_log": (128,),
        f"{start}.0.self_attn.f_b_proj.weight": (16, 6),
        f"{start}.0.mlp.gate_proj.weight": (20, 24),
        f"{start}.2.self_attn.kv_a_proj_with_mqa.weight": (16, 24),
        f"{start}.2.block_sparse_moe.gate.e_score_correction_bias": (6,),
        f"{start}.2.block_sparse_moe.experts.5.w1.weight": (9, 10),
        f"{start}.2.block_sparse_moe.experts.5.w2.weight": (10, 9),
        f"{start}.2.block_sparse_moe.shared_experts.up_proj.weight": (7, 24),
    }
    assert {name: tuple(published[name].shape) for name in wanted} == wanted
    assert published[f"{start}.0.self_attn.A_log"][2:].abs().max() == 0


def test_gate_and_up_are_not_swapped() -> None:
    config = small()
    state = random_model(config).state_dict()
    published = dict(to_huggingface(state, config))
    stacked = state["layers.1.feed_forward.mlp.experts.gate_up"]
    experts = "language_model.model.layers.1.block_sparse_moe.experts"
    assert torch.equal(published[f"{experts}.3.w1.weight"], stacked[3, :9])
    assert torch.equal(published[f"{experts}.3.w3.weight"], stacked[3, 9:])


def test_a_tensor_that_is_lacking_is_an_error() -> None:
    config = small()
    state = random_model(config).state_dict()
    del state["norm.weight"]
    with pytest.raises(CheckpointError, match=r"the state dict lacks norm\.weight"):
        list(to_huggingface(state, config))


def test_kimi_linear_equals_transformers(tmp_path: Path) -> None:
    """Our weights under published names, read by the transformers implementation: the same logits."""
    transformers = pytest.importorskip("transformers")
    save_file = pytest.importorskip("safetensors.torch").save_file
    config = kimi_linear_small(init_std=0.1, decay_rank=8, shared_size=9)
    model = random_model(config, torch.float32).eval()
    save_file(dict(to_huggingface(model.state_dict(), config)), tmp_path / "model.safetensors", {"format": "pt"})
    transformers.KimiLinearConfig(
        vocab_size=40,
        hidden_size=24,
        intermediate_size=20,
        moe_intermediate_size=9,
        num_hidden_layers=5,
        num_attention_heads=3,
        num_key_value_heads=3,
        n_shared_experts=1,
        kv_lora_rank=12,
        qk_rope_head_dim=4,
        qk_nope_head_dim=6,
        v_head_dim=5,
        num_experts_per_tok=2,
        num_local_experts=6,
        linear_head_dim=8,
        linear_num_heads=2,
        pad_token_id=39,
        bos_token_id=0,
        eos_token_id=1,
        layer_types=["linear_attention" if i + 1 not in (3, 5) else "full_attention" for i in range(5)],
    ).save_pretrained(tmp_path)
    theirs = transformers.KimiLinearForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")
    tokens = torch.randint(0, 40, (2, 70))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, theirs(tokens).logits, rtol=2e-4, atol=2e-4)
