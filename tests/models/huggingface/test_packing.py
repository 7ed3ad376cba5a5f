"""Packed documents in Hugging Face models: as if run one by one, or refused by name (C34)."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from torch import Tensor

from moec.compiler.ambient import ambient_scope
from moec.models.huggingface import documents
from tests.models.huggingface.support import KINDS, Case, assert_equal, batch, build

LENGTHS = (7, 1, 9)
# Weights large enough that a leak is far above rounding.
WIDE = {"initializer_range": 0.1}

CONVOLUTIONS: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_dense_layers": 1,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["conv", "full_attention", "conv"],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    found = {kind: build(kind, **WIDE) for kind in KINDS}
    return found | {"lfm2_moe": build("lfm2_moe", **CONVOLUTIONS, **WIDE)}


def token_losses(case: Case, values: dict[str, Tensor], *, ids: Tensor | None) -> Tensor:
    """[B, T-1] cross entropy of each token, by the prepared model; `ids` are the document ids it is told."""
    positions = None if ids is None else documents.position_ids(ids)
    with torch.no_grad(), case.view.prepare(), ambient_scope(document_ids=ids):
        logits = case.model(input_ids=values["input_ids"], position_ids=positions, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].mT, values["input_ids"][:, 1:], reduction="none")


@pytest.mark.parametrize("kind", [*KINDS, "lfm2_moe"])
def test_c34_packed_equals_separate(cases: dict[str, Case], kind: str) -> None:
    case, values = cases[kind], batch(2, sum(LENGTHS), lengths=LENGTHS)
    assert case.view.packing_refusal == ""
    packed = token_losses(case, values, ids=values["document_ids"])
    start = 0
    for length in LENGTHS:
        alone = {name: value[:, start : start + length] for name, value in values.items() if value.dim() == 2}
        torch.testing.assert_close(
            packed[:, start : start + length - 1], token_losses(case, alone, ids=None), rtol=1e-5, atol=1e-5
        )
        start += length
    # The model sees across documents when it is not told of them, so the comparison above can fail.
    mixed = token_losses(case, values, ids=None)
    assert float((mixed - packed)[:, sum(LENGTHS[:2]) :].abs().max()) > 1e-4


@pytest.mark.parametrize("kind", [*KINDS, "lfm2_moe"])
def test_c34_other_documents_do_not_matter(cases: dict[str, Case], kind: str) -> None:
    case, values = cases[kind], batch(2, sum(LENGTHS), lengths=LENGTHS)
    changed = values["input_ids"].clone()
    changed[:, : LENGTHS[0]] = changed[:, : LENGTHS[0]].flip(1) + 1
    ids = values["document_ids"] + 5
    one = token_losses(case, values, ids=ids)[:, LENGTHS[0] :]
    other = token_losses(case, values | {"input_ids": changed}, ids=ids)[:, LENGTHS[0] :]
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_c34_gradients_of_packed_rows(kind: str) -> None:
    assert_equal(build(kind), batch(2, sum(LENGTHS), lengths=LENGTHS))


def test_position_ids_restart_with_each_document() -> None:
    ids = torch.tensor([[0, 0, 0, 1, 2, 2], [4, 4, 4, 4, 4, 9]])
    assert documents.position_ids(ids).tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 0]]


@pytest.mark.parametrize(
    ("kind", "layer"),
    [("granitemoehybrid", "mamba"), ("jamba", "mamba"), ("minimax", "lightning")],
)
def test_c34_layers_that_cannot_are_named(kind: str, layer: str) -> None:
    case = build(kind, **_HYBRID[kind])
    assert layer in case.view.packing_refusal
    assert "model.layers." in case.view.packing_refusal


_SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "pad_token_id": 0,
}
_HYBRID: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        **_SMALL,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
    },
    "jamba": {**_SMALL, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_dt_rank": 4},
    "minimax": {**_SMALL, "layer_types": ["linear_attention", "full_attention"], "head_dim": 16},
}
