"""Weights from files: our names, published names, folders of shards; what does not fit is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from moec.compiler.errors import CheckpointError
from moec.models.k3.checkpoint import to_huggingface
from moec.models.k3.model import K3Model
from moec.runtime import StepState, export_weights, save_checkpoint
from moec.weights import load_weights, save_published

from .small_models import SMALL_K3, SmallModel


@pytest.fixture
def model() -> K3Model:
    torch.manual_seed(0)
    return K3Model(SMALL_K3)


@pytest.fixture
def other() -> K3Model:
    torch.manual_seed(1)
    return K3Model(SMALL_K3)


def _equal(one: nn.Module, two: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


def test_own_names_from_one_file(model: K3Model, other: K3Model, tmp_path: Path) -> None:
    assert not _equal(model, other)
    save_file(other.state_dict(), tmp_path / "w.safetensors")
    load_weights(model, tmp_path / "w.safetensors")
    assert _equal(model, other)


def test_published_names_from_a_folder_of_shards(model: K3Model, other: K3Model, tmp_path: Path) -> None:
    tensors = dict(to_huggingface(other.state_dict(), SMALL_K3))
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[::2]}, tmp_path / "model-1.safetensors")
    rest = {name: tensors[name] for name in names[1::2]} | {"vision_tower.x": torch.zeros(1)}
    save_file(rest, tmp_path / "model-2.safetensors")
    load_weights(model, tmp_path)
    assert _equal(model, other)


def test_values_are_cast_and_tied_weights_come_once(tmp_path: Path) -> None:
    tied = SmallModel()
    tied.head.weight = tied.embed.weight
    values = {name: value.double() for name, value in tied.state_dict().items() if name != "head.weight"}
    values["embed.weight"] = values["embed.weight"] + 1.0
    save_file(values, tmp_path / "w.safetensors")
    load_weights(tied, tmp_path / "w.safetensors")
    assert tied.head.weight.dtype == torch.float32
    assert torch.equal(tied.head.weight, values["embed.weight"].float())


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "gpt_oss", "qwen3_next", "kimi_linear", "glm_moe_dsa"])
def test_a_hugging_face_folder_as_transformers_saves_it(kind: str, tmp_path: Path) -> None:
    """The published names: one matrix per expert where transformers has stacked ones."""
    one, two = _tiny(kind, 0), _tiny(kind, 1)
    one.save_pretrained(tmp_path)  # type: ignore[operator]
    assert not _equal(one, two)
    load_weights(two, tmp_path)
    assert _equal(one, two)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "qwen3_next"])
def test_a_run_leaves_what_transformers_reads(kind: str, tmp_path: Path) -> None:
    one, two = _tiny(kind, 0), _tiny(kind, 1)
    save_published(StepState.from_module(one), one, tmp_path)
    one.config.save_pretrained(tmp_path)  # type: ignore[operator, union-attr]
    again = type(two).from_pretrained(tmp_path)  # type: ignore[attr-defined]
    assert _equal(one, again)
    load_weights(two, tmp_path)
    assert _equal(one, two)


def test_own_names_of_a_hugging_face_model(tmp_path: Path) -> None:
    one, two = _tiny("mixtral", 0), _tiny("mixtral", 1)
    load_weights(two, export_weights(StepState.from_module(one), tmp_path / "w.safetensors"))
    assert _equal(one, two)


def test_published_weights_of_a_k3_model(model: K3Model, other: K3Model, tmp_path: Path) -> None:
    save_published(StepState.from_module(other), other, tmp_path)
    published = dict(to_huggingface(other.state_dict(), SMALL_K3))
    found = {n: t for file in tmp_path.glob("*.safetensors") for n, t in load_file(file).items()}
    assert found.keys() == published.keys()
    assert all(torch.equal(found[name], published[name]) for name in found)
    load_weights(model, tmp_path)
    assert _equal(model, other)


def test_a_model_of_ones_own_has_no_published_names(tmp_path: Path) -> None:
    small = SmallModel()
    with pytest.raises(CheckpointError, match="SmallModel has no published names"):
        save_published(StepState.from_module(small), small, tmp_path)


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_of_a_run_into_an_eager_model(tied: bool, tmp_path: Path) -> None:
    def make(seed: int) -> SmallModel:
        torch.manual_seed(seed)
        small = SmallModel()
        if tied:
            small.head.weight = small.embed.weight
        return small

    one = make(0)
    path = save_checkpoint(tmp_path, StepState.from_module(one), fingerprint={})
    for place in (path, tmp_path):
        two = make(1)
        assert not _equal(one, two)
        load_weights(two, place)
        assert _equal(one, two)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, StepState.from_module(nn.Linear(2, 3)), fingerprint={})
    with pytest.raises(CheckpointError, match=r"weights.weight in the checkpoint has shape \[3, 2\]"):
        load_weights(nn.Linear(3, 2), path)
    before = SmallModel()
    with pytest.raises(CheckpointError, match="the checkpoint lacks weights"):
        load_weights(before, path)
    file = next(path.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="damaged"):
        load_weights(nn.Linear(2, 3), path)


def _tiny(kind: str, seed: int) -> nn.Module:
    pytest.importorskip("transformers")
    from moec.models.huggingface.adapter import from_config
    from moec.models.huggingface.tiny import TINY

    torch.manual_seed(seed)
    return from_config({"model_type": kind, **TINY[kind]})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda state: state.pop("head.weight"), "the files lack head.weight"),
        (lambda state: state.update(extra=torch.zeros(1)), "unexpected tensor extra"),
        (lambda state: state.update({"head.weight": torch.zeros(3, 3)}), r"head.weight in .* has shape \[3, 3\]"),
    ],
    ids=["missing", "unexpected", "shape"],
)
def test_what_does_not_fit_is_refused(change: Callable[[dict[str, Tensor]], object], text: str, tmp_path: Path) -> None:
    model = SmallModel()
    state = dict(model.state_dict())
    change(state)
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match=text):
        load_weights(model, tmp_path / "w.safetensors")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_text("no tensors in here")
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        load_weights(SmallModel(), tmp_path / "w.safetensors")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no weights at"):
        load_weights(SmallModel(), tmp_path)
