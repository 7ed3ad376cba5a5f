"""What TARGET may be, and what is said when it is nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from moec.compiler._torch_compat import FakeTensor
from moec.compiler.errors import CheckpointError, PresetError, UnsupportedModelError
from moec.compiler.plan import Plan
from moec.driver import build as compile_stages
from moec.models.k3.model import K3Model
from moec.targets import build_target, fake_target

SMALL = "tests.moec.small_models"


def test_a_preset_is_built_from_the_seed() -> None:
    one, two, other = (build_target("k3-tiny", seed=seed) for seed in (3, 3, 4))
    assert isinstance(one, K3Model)
    assert one.training
    assert torch.equal(one.lm_head.weight, two.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


def test_the_dtype_is_that_of_the_matrices() -> None:
    model = build_target("k3-tiny", dtype=torch.bfloat16)
    assert isinstance(model, K3Model)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert build_target(f"{SMALL}:make", dtype=torch.float64).head.weight.dtype == torch.float64


def test_a_factory_is_found_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_model_here.py").write_text("from torch import nn\ndef make(): return nn.Linear(2, 3)\n")
    monkeypatch.chdir(tmp_path)
    assert isinstance(build_target("my_model_here:make"), nn.Linear)


@pytest.mark.parametrize("given", ["config.json", ""])
def test_a_hugging_face_config_is_built(tmp_path: Path, given: str) -> None:
    pytest.importorskip("transformers")
    from moec.models.huggingface.tiny import TINY

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", **TINY["mixtral"]}))
    model = build_target(str(tmp_path / given))
    assert type(model).__name__ == "MixtralForCausalLM"
    assert model.training


@pytest.mark.parametrize(
    ("target", "error", "text"),
    [
        ("k3-tinny", PresetError, "unknown preset k3-tinny\n  do:    did you mean k3-tiny"),
        ("zzz", PresetError, "presets: k3, "),
        ("no/such/config.json", UnsupportedModelError, "no config at no/such/config.json"),
        ("no/such/file.yaml", PresetError, "no/such/file.yaml is no target"),
        ("no_such_module:make", UnsupportedModelError, "cannot import 'no_such_module'"),
        (f"{SMALL}:mak", UnsupportedModelError, "did you mean make"),
        (f"{SMALL}:VOCABULARY", UnsupportedModelError, "is a int, not a function"),
        (f"{SMALL}:make_nothing", UnsupportedModelError, "returned str, not an nn.Module"),
        (f"{SMALL}:make_with", UnsupportedModelError, "cannot be called without arguments"),
        (":make", UnsupportedModelError, "cannot import ''"),
    ],
)
def test_what_is_no_target(target: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        build_target(target)
    assert text in str(caught.value)


def test_an_error_inside_a_factory_is_shown_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_model_here.py").write_text("def make():\n    return len(5)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match="has no len"):
        build_target("broken_model_here:make")


def test_a_fake_model_has_no_weights_but_its_buffers() -> None:
    model = fake_target("k3-tiny")
    assert isinstance(model, K3Model)
    assert isinstance(model.lm_head.weight, FakeTensor)
    real = build_target("k3-tiny")
    assert {n: (p.shape, p.dtype, p.device) for n, p in model.named_parameters()} == {
        n: (p.shape, p.dtype, p.device) for n, p in real.named_parameters()
    }
    for (name, fake), value in zip(model.named_buffers(), real.buffers(), strict=True):
        assert torch.equal(fake, value), name


def test_a_fake_model_of_any_size_is_built_in_seconds() -> None:
    model = fake_target("k3", dtype=torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) > 2.7e12


def test_a_fake_model_compiles_to_the_program_of_the_real_one() -> None:
    plan = Plan(batch=2, length=16, dtype="bfloat16")
    models = [make(f"{SMALL}:make", dtype=torch.bfloat16) for make in (fake_target, build_target)]
    fake, real = (compile_stages(model, plan).program for model in models)
    assert fake is not None
    assert real is not None
    assert fake.text == real.text


def test_a_model_that_cannot_be_initialised_later_has_its_weights_at_once() -> None:
    found, built = (make(f"{SMALL}:make_overwritten", seed=3) for make in (fake_target, build_target))
    for path, weight in built.named_parameters():
        assert torch.equal(found.get_parameter(path), weight), path


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no weights at"):
        build_target("k3-tiny", weights=tmp_path / "none.safetensors")
