"""Presets and configurations: what they say, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from moec.compiler.errors import PresetError
from moec.models.k3.config import K3Config
from moec.models.presets import preset, preset_names
from tests.models.k3_small import SMALL, small


def test_names() -> None:
    assert preset_names() == ["k3", "k3-dsa", "k3-dsa-tiny", "k3-mini", "k3-tiny", "kimi-linear-48b"]


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(PresetError, match="unknown preset k3-tyni") as caught:
        preset("k3-tyni")
    assert "did you mean k3-tiny" in str(caught.value)
    with pytest.raises(PresetError, match="presets: k3, k3-dsa"):
        preset("llama")


def test_bases_are_inherited() -> None:
    dsa, k3 = preset("k3-dsa"), preset("k3")
    assert (dsa.full_attention, dsa.indexer_heads, dsa.indexer_dim, dsa.indexer_top_k) == ("dsa", 64, 128, 2048)
    assert {**dsa.to_dict(), "full_attention": "mla"} == k3.to_dict()


def test_mini() -> None:
    mini = preset("k3-mini")
    assert [mini.mixer(layer) for layer in range(4)] == ["kda", "kda", "kda", "mla"]
    assert (mini.hidden_size, mini.layers, mini.kda_heads, mini.heads) == (2048, 16, 16, 16)
    assert (mini.q_rank, mini.kv_rank, mini.nope_dim, mini.rope_dim, mini.value_dim) == (768, 512, 128, 64, 128)
    assert (mini.dense_size, mini.experts, mini.top_k, mini.latent_size) == (6144, 64, 8, 1024)
    assert (mini.expert_size, mini.shared_size, mini.residual_block, mini.vocab_size) == (768, 1536, 4, 163840)


@pytest.mark.parametrize("name", preset_names())
def test_config_survives_plain_values(name: str) -> None:
    config = preset(name)
    assert K3Config.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"layers": -1}, "layers"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"full_attention": "rwkv"}, "full_attention"),
        ({"activation": "relu"}, "activation"),
        ({"full_attention_layers": (3, 6)}, "full_attention_layers"),
        ({"full_attention_layers": (5, 3)}, "full_attention_layers"),
        ({"kda_lower_bound": 1.0}, "kda_lower_bound"),
        ({"full_attention": "gqa", "heads": 3, "kv_heads": 2}, "kv_heads"),
        ({"full_attention": "gqa", "head_dim": 7}, "head_dim"),
        ({"top_k": 6}, "top_k"),
        ({"top_k": 7, "balancing": False}, "top_k"),
        ({"experts": 0}, "experts"),
        ({"dense_layers": 6}, "dense_layers"),
        ({"image_token": 40}, "image_token"),
    ],
)
def test_wrong_values_name_the_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(PresetError, match=rf"model field {field} ") as caught:
        small(**changes)
    assert f"where: model.{field}" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"hidden_sizes": 3}, "unknown model field hidden_sizes"),
        ({"layers": "many"}, "model field layers is 'many'"),
        ({"layers": True}, "model field layers is True"),
        ({"balancing": 1}, "model field balancing is 1"),
        ({"norm_eps": "small"}, "model field norm_eps is 'small'"),
        ({"full_attention_layers": 4}, "model field full_attention_layers is 4"),
        ({"activation": 4}, "model field activation is 4"),
    ],
)
def test_ill_typed_values(values: dict[str, Any], text: str) -> None:
    with pytest.raises(PresetError, match=text):
        K3Config.from_dict(SMALL.to_dict() | values)


def test_missing_field() -> None:
    values = SMALL.to_dict()
    del values["vocab_size"]
    with pytest.raises(PresetError, match="model field vocab_size is missing"):
        K3Config.from_dict(values)


def test_numbers_without_a_dot_are_numbers() -> None:
    assert K3Config.from_dict(SMALL.to_dict() | {"norm_eps": "1e-5"}).norm_eps == 1e-5
