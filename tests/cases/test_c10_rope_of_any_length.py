"""C10: rotary embeddings that change with the length: eager's numbers where they are fixed, else refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

import moec
from moec.compiler.errors import UnsupportedModelError
from moec.compiler.plan import Plan
from moec.models.huggingface import plain

from ..models.huggingface.support import Case, batch, build
from ..spine import assert_like_eager_step

# Both change their frequencies above 24 tokens.
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
REFUSAL = r"rope_type.*\n.*rope_parameters.*plan\.length = 32"


def case_of(rope: str, length: int) -> Case:
    return build("mixtral", Plan(batch=2, length=length), num_hidden_layers=1, **ROPES[rope])


def assert_step_is_eagers(rope: str, length: int) -> None:
    case = case_of(rope, length)
    assert any(repr(rope) in note for note in case.view.notes)
    eager = copy.deepcopy(case.model)  # its frequencies change when it runs
    step = moec.compile(case.model, Plan(batch=2, length=length))
    values = batch(2, length)
    assert_like_eager_step(step, eager, {name: values[name] for name in ("input_ids", "labels")})


@pytest.mark.parametrize("rope", ROPES)
def test_c10_both_sides_of_the_threshold(rope: str) -> None:
    assert_step_is_eagers(rope, 16)
    with pytest.raises(UnsupportedModelError, match=REFUSAL):
        assert_step_is_eagers(rope, 32)


@pytest.mark.parametrize("rope", ROPES)
def test_c10_frequencies_of_another_length_are_seen(rope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that nobody minds: the step has the frequencies of short batches, the model those of long ones."""
    monkeypatch.setattr(plain, "_rope_limit", lambda module, types: 1 << 20)
    with pytest.raises(AssertionError):
        assert_step_is_eagers(rope, 32)


def test_c10_a_model_that_has_run_beyond_its_threshold_is_refused() -> None:
    """It carries other frequencies from then on."""
    case = case_of("dynamic", 16)
    rope = case.model.model.rotary_emb
    hidden = torch.zeros(1, 1, 64)
    short, _ = rope(hidden, torch.arange(16)[None])
    long, _ = rope(hidden, torch.arange(32)[None])
    assert not torch.allclose(short, long[:, :16])
    with pytest.raises(UnsupportedModelError, match="rope_type"):
        moec.compile(case.model, Plan(batch=2, length=16))
