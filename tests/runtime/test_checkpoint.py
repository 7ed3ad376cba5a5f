"""Checkpoints give back every bit, refuse what does not fit, and are never taken for whole when half-written."""

from __future__ import annotations

import errno
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, safe_open

from moec.compiler.errors import CheckpointError
from moec.runtime import StepState, export_weights, latest_checkpoint, load_checkpoint, save_checkpoint
from moec.runtime.checkpoint import LATEST, MANIFEST
from tests.runtime.toy import ToyStep, toy_data, toy_step, write_corpus


def _trained(tmp_path: Path, steps: int = 2, **options: Any) -> ToyStep:
    step = toy_step(**options)
    data = toy_data(write_corpus(tmp_path / "text"))
    for _ in range(steps):
        step(next(data))
    return step


def _save(folder: Path, step: ToyStep, **options: Any) -> Path:
    return save_checkpoint(folder, step.state, fingerprint=step.fingerprint, **options)


def _equal(left: StepState, right: StepState) -> bool:
    ours, theirs = left.tensors(), right.tensors()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everything_comes_back_into_the_callers_tensors(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    saved = _trained(tmp_path, dtype=dtype, tied=tied)
    path = _save(tmp_path / "out", saved)
    assert path.name == "step-00000002"
    fresh = toy_step(dtype=dtype, tied=tied, seed=1)
    weight = fresh.model.embed.weight
    assert not _equal(saved.state, fresh.state)
    load_checkpoint(path, fresh.state, fingerprint=fresh.fingerprint)
    assert _equal(saved.state, fresh.state)
    assert fresh.state.step == 2
    assert fresh.state.updates == saved.state.updates
    assert fresh.model.embed.weight is weight
    assert torch.equal(weight, saved.model.embed.weight)
    assert (fresh.model.head.weight is fresh.model.embed.weight) == tied


def test_empty_and_scalar_tensors_are_kept(tmp_path: Path) -> None:
    def state(value: float) -> StepState:
        return StepState({}, {"none": torch.zeros(0, 3), "one": torch.tensor(value)}, ())

    loaded = state(0.0)
    load_checkpoint(save_checkpoint(tmp_path, state(2.5), fingerprint={}), loaded, fingerprint={})
    assert loaded.buffers["one"] == 2.5


def test_random_generators_go_on_where_they_were(tmp_path: Path) -> None:
    step = toy_step()
    path = _save(tmp_path, step)
    expected = (random.random(), np.random.rand(), torch.rand(2).tolist())
    load_checkpoint(path, step.state, fingerprint=step.fingerprint)
    assert (random.random(), np.random.rand(), torch.rand(2).tolist()) == expected


def test_the_last_n_stay_and_latest_names_the_newest(tmp_path: Path) -> None:
    step = toy_step()
    for number in (1, 2, 3, 10):
        step.state.step = number
        _save(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [LATEST, "step-00000003", "step-00000010"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000010"
    assert (tmp_path / LATEST).read_text() == "step-00000010\n"
    with pytest.raises(CheckpointError, match="keep is 0"):
        _save(tmp_path, step, keep=0)


def test_latest_falls_back_to_the_newest_whole_one(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "absent") is None
    step = toy_step()
    for number in (1, 2):
        step.state.step = number
        _save(tmp_path, step)
    (tmp_path / "step-00000009").mkdir()
    (tmp_path / LATEST).write_text("step-00000005\n")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000002"


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    step = toy_step()
    _save(tmp_path, step)
    with torch.no_grad():
        step.model.mix.bias.fill_(7)
    path = _save(tmp_path, step)
    fresh = toy_step()
    load_checkpoint(path, fresh.state, fingerprint=fresh.fingerprint)
    assert fresh.model.mix.bias.eq(7).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == [LATEST, "step-00000000"]


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = toy_step()
    good = _save(tmp_path, step)

    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    step.state.step = 1
    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", refuse)
    with pytest.raises(CheckpointError, match=r"step 1 could not be written\n.*\n  why:   .*No space left on device"):
        _save(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == [LATEST, good.name]
    monkeypatch.undo()
    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(CheckpointError, match="No space left on device"):
        _save(tmp_path, step)
    assert latest_checkpoint(tmp_path) == good


def test_an_interrupt_while_saving_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = toy_step()
    good = _save(tmp_path, step)

    def interrupt(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    step.state.step = 1
    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", interrupt)
    with pytest.raises(KeyboardInterrupt):
        _save(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == [LATEST, good.name]


def test_a_tie_that_was_undone_is_an_error(tmp_path: Path) -> None:
    tied, loose = toy_step(tied=True), toy_step(tied=False)
    path = _save(tmp_path, tied)
    with pytest.raises(
        CheckpointError, match=r"missing: exp_avg\.head\.weight, exp_avg_sq\.head\.weight, weights\.head\.weight"
    ):
        load_checkpoint(path, loose.state, fingerprint=loose.fingerprint)


def test_other_shapes_and_dtypes_are_named(tmp_path: Path) -> None:
    def state(*shape: int, dtype: torch.dtype = torch.float32) -> StepState:
        return StepState({"w": torch.zeros(shape, dtype=dtype)}, {}, ())

    path = save_checkpoint(tmp_path, state(2, 3), fingerprint={})
    with pytest.raises(CheckpointError, match=r"weights.w is torch.float32 \[2, 3\] there, here it is .* \[3, 2\]"):
        load_checkpoint(path, state(3, 2), fingerprint={})
    with pytest.raises(CheckpointError, match=r"here it is torch.bfloat16 \[2, 3\]"):
        load_checkpoint(path, state(2, 3, dtype=torch.bfloat16), fingerprint={})


def test_another_plan_is_refused_by_field(tmp_path: Path) -> None:
    saved = toy_step(plan={"length": 16, "optimizer": {"lr": 0.1}})
    path = _save(tmp_path, saved)
    other = toy_step(plan={"length": 16, "optimizer": {"lr": 0.2}})
    with pytest.raises(CheckpointError, match=r"another model or plan: plan\.optimizer\.lr was 0\.1, now it is 0\.2"):
        load_checkpoint(path, other.state, fingerprint=other.fingerprint)
    more = toy_step(plan={"length": 32, "optimizer": {"lr": 0.1}, "packing": True})
    with pytest.raises(CheckpointError, match=r"plan\.length was 16, now it is 32 \(and 1 more: plan\.packing\)"):
        load_checkpoint(path, more.state, fingerprint=more.fingerprint)


def test_settings_may_change_and_are_named(tmp_path: Path) -> None:
    step = _trained(tmp_path)
    before = {"torch": "2.11", "plan": {"optimizer": {"lr": 0.1, "betas": (0.9, 0.95)}}, "steps": 9}
    after = {"torch": "2.11", "plan": {"optimizer": {"lr": 0.2, "betas": (0.9, 0.95)}, "check": True}, "steps": 9}
    path = _save(tmp_path / "out", step, settings=before)
    fresh = toy_step(seed=1)
    changes = load_checkpoint(path, fresh.state, fingerprint=fresh.fingerprint, settings=after)
    assert changes == {"plan.check": ("absent", True), "plan.optimizer.lr": (0.1, 0.2)}
    assert _equal(step.state, fresh.state)
    assert load_checkpoint(path, fresh.state, fingerprint=fresh.fingerprint, settings=before) == {}


def test_a_fingerprint_with_tuples_equals_its_saved_form(tmp_path: Path) -> None:
    step = toy_step(plan={"betas": (0.9, 0.95)})
    load_checkpoint(_save(tmp_path, step), step.state, fingerprint=step.fingerprint)


def test_damage_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    step = _trained(tmp_path)
    path = _save(tmp_path / "out", step)
    file = next(path.glob("*.distcp"))
    whole = file.read_bytes()
    middle = len(whole) // 2
    for content, why in (
        (whole[:-100], f"{file.name} has {len(whole) - 100} bytes instead of {len(whole)}"),
        (whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :], f"{file.name} has another checksum"),
    ):
        file.write_bytes(content)
        fresh, untouched = toy_step(), toy_step()
        with pytest.raises(CheckpointError, match=f"the checkpoint is damaged\n.*\n  why:   {why}"):
            load_checkpoint(path, fresh.state, fingerprint=fresh.fingerprint)
        assert _equal(fresh.state, untouched.state)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{file.name} is missing"):
        load_checkpoint(path, step.state, fingerprint=step.fingerprint)


def test_manifests_that_cannot_be_read(tmp_path: Path) -> None:
    step = toy_step()
    path = _save(tmp_path, step)
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(CheckpointError, match="the checkpoint has format 99, this version reads 3"):
        load_checkpoint(path, step.state, fingerprint=step.fingerprint)
    (path / MANIFEST).write_text("{")
    with pytest.raises(CheckpointError, match=f"{MANIFEST} is no JSON"):
        load_checkpoint(path, step.state, fingerprint=step.fingerprint)
    (path / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=f"no checkpoint in .*\n  why:   there is no {MANIFEST}"):
        load_checkpoint(path, step.state, fingerprint=step.fingerprint)


def test_a_checkpoint_without_data_position_does_not_resume_data(tmp_path: Path) -> None:
    step = toy_step()
    path = _save(tmp_path, step)
    with pytest.raises(CheckpointError, match="the checkpoint holds no data position"):
        load_checkpoint(path, step.state, fingerprint=step.fingerprint, restore_data=lambda position: None)


def test_export_has_the_names_of_the_state_dict_and_ties_once(tmp_path: Path) -> None:
    step = _trained(tmp_path, tied=True, dtype=torch.bfloat16)
    path = export_weights(step.state, tmp_path / "weights" / "model.safetensors")
    found = load_file(path)
    expected = step.model.state_dict()
    assert set(found) == set(expected) - {"head.weight"}
    assert all(torch.equal(found[name], expected[name]) for name in found)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    assert [path.name for path in path.parent.iterdir()] == ["model.safetensors"]
    step.model.load_state_dict({**found, "head.weight": found["embed.weight"]})
