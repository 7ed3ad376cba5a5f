"""Marks of files that ranks compare before they start from them: equal for copies, different for other contents."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moec.models.build import build
from moec.runtime import StepState, save_checkpoint
from moec.weight_marks import checkpoint_marks, different_files, file_marks

from .small_models import SMALL_K3


def tensors(count: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {f"w{index:03}": torch.randn(40, 50) for index in range(count)}


def test_a_copy_has_the_same_marks_and_any_name(tmp_path: Path) -> None:
    save_file(tensors(3), tmp_path / "a.safetensors")
    (tmp_path / "other").mkdir()
    shutil.copy(tmp_path / "a.safetensors", tmp_path / "other" / "b.safetensors")
    assert file_marks(tmp_path / "a.safetensors") == file_marks(tmp_path / "other" / "b.safetensors")


@pytest.mark.parametrize("name", ["w000", "w001", "w002"])
def test_values_of_any_tensor_count(name: str, tmp_path: Path) -> None:
    given = tensors(3)
    save_file(given, tmp_path / "a.safetensors")
    given[name][20, 25] += 1e-4
    save_file(given, tmp_path / "b.safetensors")
    one, two = (file_marks(tmp_path / f"{file}.safetensors")["the file"] for file in "ab")
    assert one != two
    assert (
        one.partition(" with ")[0]
        == two.partition(" with ")[0]
        == f"{(tmp_path / 'a.safetensors').stat().st_size:,} bytes"
    )


def test_names_and_shapes_count(tmp_path: Path) -> None:
    values = tensors(2)
    turned = {"w000": values["w000"].view(50, 40), "w001": values["w001"]}
    swapped = {"w000": values["w000"], "w002": values["w001"]}
    marks = set()
    for index, given in enumerate((values, turned, swapped)):
        save_file(given, tmp_path / f"{index}.safetensors")
        marks.add(file_marks(tmp_path / f"{index}.safetensors")["the file"])
    assert len(marks) == 3


def test_every_tensor_is_looked_at(tmp_path: Path) -> None:
    """Also one of a kind that recurs: no stride between those that are read."""
    given, marks = tensors(193), set()
    for changed in (None, 0, 1, 2, 191, 192):
        copies = {name: value + (index == changed) for index, (name, value) in enumerate(given.items())}
        save_file(copies, tmp_path / "a.safetensors")
        marks.add(file_marks(tmp_path / "a.safetensors")["the file"])
    assert len(marks) == 6


def test_the_files_of_a_folder_have_marks_each(tmp_path: Path) -> None:
    for name in ("x", "y"):
        save_file({name: torch.randn(3)}, tmp_path / f"{name}.safetensors")
    assert list(file_marks(tmp_path)) == ["x.safetensors", "y.safetensors"]


def test_a_checkpoint_is_marked_by_its_manifest(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path / "a", StepState.from_module(build(SMALL_K3)), fingerprint={})
    other = save_checkpoint(tmp_path / "b", StepState.from_module(build(SMALL_K3)), fingerprint={})
    shutil.copytree(saved, tmp_path / "copy" / saved.name)
    assert checkpoint_marks(saved) == checkpoint_marks(tmp_path / "copy" / saved.name)
    assert checkpoint_marks(saved).keys() == checkpoint_marks(other).keys()
    assert checkpoint_marks(saved) != checkpoint_marks(other)


def test_the_error_names_file_and_ranks() -> None:
    same, other = {"a": "5 bytes", "b": "6 bytes"}, {"a": "5 bytes", "b": "7 bytes"}
    error = different_files(Path("weights"), [same, other, same, same, same])
    assert error.what == "the ranks would start from different weights: b differs"
    assert error.why == "6 bytes on ranks 0, 2-4; 7 bytes on rank 1"
    assert error.where == "weights"
    lacking = different_files(Path("weights"), [same, same, {}])
    assert lacking.what == "the ranks would start from different weights: a and 1 more differ"
    assert lacking.why == "5 bytes on ranks 0-1; no such file on rank 2"
