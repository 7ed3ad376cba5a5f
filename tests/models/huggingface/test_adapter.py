"""Recognising, building and refusing Hugging Face models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
from torch import nn

from moec.compiler.ambient import ambient, ambient_scope, current
from moec.compiler.errors import UnsupportedModelError
from moec.compiler.plan import Plan
from moec.models.huggingface.adapter import from_config, huggingface_view, is_huggingface
from moec.models.huggingface.attention import CausalMask
from moec.models.huggingface.plain import symbolic_min
from moec.models.huggingface.tiny import tiny_config
from tests.models.huggingface.support import assert_equal, batch, build


def test_transformers_models_are_recognised() -> None:
    assert is_huggingface(from_config(tiny_config("mixtral"), device="meta"))
    assert not is_huggingface(nn.Linear(2, 2))


def test_recognising_does_not_import_transformers() -> None:
    code = (
        "import sys, torch; from moec.models.huggingface.adapter import is_huggingface; "
        "assert not is_huggingface(torch.nn.Linear(2, 2)); assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_from_config_reads_files_and_folders(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_config("gpt_oss", dtype="bfloat16")))
    for source in (path, tmp_path, str(path)):
        model = from_config(source, device="meta")
        assert type(model).__name__ == "GptOssForCausalLM"
        assert model.training
        assert model.get_parameter("lm_head.weight").dtype == torch.bfloat16
    assert from_config(path, torch.float32, "meta").get_parameter("lm_head.weight").dtype == torch.float32


def test_from_config_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="no config at"):
        from_config(tmp_path / "missing.json")
    with pytest.raises(UnsupportedModelError, match="model_type 'nothing_like_it'"):
        from_config({"model_type": "nothing_like_it"})
    with pytest.raises(UnsupportedModelError, match="no model_type"):
        from_config({"hidden_size": 64})


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [("mixtral", "attention_dropout", 0.1), ("qwen3_next", "attention_dropout", 0.2)],
)
def test_random_ops_are_refused_in_training(kind: str, field: str, value: float) -> None:
    model = from_config(tiny_config(kind, **{field: value}))
    with pytest.raises(UnsupportedModelError, match=rf"config\.{field} = {value}"):
        huggingface_view(model, Plan())
    huggingface_view(model.eval(), Plan())


def test_router_jitter_is_refused() -> None:
    model = from_config(tiny_config("mixtral", router_jitter_noise=0.01))
    with pytest.raises(UnsupportedModelError, match=r"config\.router_jitter_noise"):
        huggingface_view(model, Plan())


def test_models_without_a_language_model_loss_are_refused() -> None:
    model = from_config(tiny_config("mixtral"), device="meta")
    with pytest.raises(UnsupportedModelError, match="MixtralModel has no causal language modelling loss"):
        huggingface_view(model.get_submodule("model"), Plan())


def test_image_features_are_refused() -> None:
    case = build("mixtral")
    with pytest.raises(UnsupportedModelError, match="image features"):
        case.view.module(**batch(2, 16), image_features=torch.zeros(1, 64))


def test_gradient_checkpointing_is_left_to_the_plan() -> None:
    case = build("mixtral")
    case.model.model.layers[0].gradient_checkpointing = True
    view = huggingface_view(case.model, Plan(batch=2, length=16))
    assert any("gradient checkpointing" in note for note in view.notes)
    with view.prepare():
        assert not case.model.model.layers[0].gradient_checkpointing
    assert case.model.model.layers[0].gradient_checkpointing


def test_attention_that_the_op_cannot_express_runs_its_own_form() -> None:
    """An unknown option runs the eager attention of the model on a mask built from the document ids, and is noted."""
    case = build("mixtral", sliding_window=4, attn_implementation="eager")
    attention = case.model.model.layers[0].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: forward(*args, **kwargs, softcap=20.0)
    assert_equal(case, batch(2, 16, lengths=(9, 7)))
    note = next(note for note in case.view.notes if "own eager form" in note)
    assert "model.layers.0.self_attn" in note
    assert "'softcap'" in note


def test_a_mask_read_as_a_tensor_is_an_error() -> None:
    mask = CausalMask(5)
    assert mask == "causal, window 5"
    with pytest.raises(UnsupportedModelError, match="its dtype"):
        mask.dtype  # noqa: B018
    with pytest.raises(UnsupportedModelError, match="a part of it"):
        mask[:, 0]


def test_lengths_beyond_the_trained_ones_are_noted() -> None:
    case = build("mixtral", Plan(batch=1, length=1024))
    assert any("plan.length = 1024" in note for note in case.view.notes)


def test_ambient_scopes_nest_and_restore() -> None:
    outer, inner = torch.zeros(1), torch.ones(1)
    with ambient_scope(document_ids=outer, other=inner):
        with ambient_scope(document_ids=inner):
            assert ambient("document_ids") is inner
            assert list(current()) == ["document_ids", "other"]
        with ambient_scope(document_ids=None):
            assert ambient("document_ids") is None
            assert ambient("other") is inner
        assert ambient("document_ids") is outer
    assert current() == {}


def test_symbolic_min_is_min_for_numbers() -> None:
    assert symbolic_min(3, 2) == 2
    assert symbolic_min([4, 1]) == 1
    assert symbolic_min([], default=7) == 7
