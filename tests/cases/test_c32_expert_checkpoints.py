"""C32: a checkpoint holds every expert in its place, with its own moments; a name that is missing is an error.

Between real ranks, from one mesh to another, this is in tests/runtime/test_sharded_checkpoint.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from moec.compiler.errors import CheckpointError
from moec.runtime import StepState, checkpoint, load_checkpoint, save_checkpoint

EXPERTS = 6
MARKS = {"weights": 0, "exp_avg": 10, "exp_avg_sq": 20}


def marked(factor: float) -> StepState:
    """Expert e has the value e in its weights, and 10 + e and 20 + e in its moments, all times `factor`."""
    values = {
        group: (torch.arange(float(EXPERTS)) + mark).view(EXPERTS, 1, 1).expand(EXPERTS, 3, 2) * factor
        for group, mark in MARKS.items()
    }
    made = StepState.from_module(nn.ParameterDict({"experts": nn.Parameter(values["weights"].clone())}))
    for group in ("exp_avg", "exp_avg_sq"):
        getattr(made, group)["experts"].copy_(values[group])
    return made


def assert_experts_keep_their_places(folder: Path) -> None:
    path = save_checkpoint(folder, marked(1.0), fingerprint={})
    loaded = marked(-1.0)
    load_checkpoint(path, loaded, fingerprint={})
    for group, mark in MARKS.items():
        values = getattr(loaded, group)["experts"]
        assert values.shape == (EXPERTS, 3, 2)
        assert all(bool((values[expert] == expert + mark).all()) for expert in range(EXPERTS)), group


def test_c32_stacked_experts_keep_their_places_and_moments(tmp_path: Path) -> None:
    assert_experts_keep_their_places(tmp_path)


@pytest.mark.parametrize("group", MARKS)
def test_c32_two_experts_that_change_places_are_seen(
    group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = dcp.save

    def swapped(tensors: dict[str, Tensor], **options: Any) -> Any:
        experts = f"{group}.experts"
        return save({**tensors, experts: tensors[experts][[0, 1, 3, 2, 4, 5]]}, **options)

    monkeypatch.setattr(dcp, "save", swapped)
    with pytest.raises(AssertionError, match=group):
        assert_experts_keep_their_places(tmp_path)


def assert_other_names_are_errors(folder: Path) -> None:
    def state(*names: str) -> StepState:
        return StepState({name: torch.full((2,), 3.0) for name in names}, {}, ())

    path = save_checkpoint(folder, state("a", "b", *"stuvwxyz"), fingerprint={})
    with pytest.raises(CheckpointError, match="tensors do not fit the model") as caught:
        load_checkpoint(path, state("a", "c"), fingerprint={})
    assert (
        "why:   missing: weights.c; unexpected: weights.b, weights.s, weights.t, weights.u, weights.v and 4 more"
        in str(caught.value)
    )


def test_c32_missing_and_left_over_names_are_errors(tmp_path: Path) -> None:
    assert_other_names_are_errors(tmp_path)


def test_c32_a_loader_that_takes_what_is_there_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = dcp.load

    def partly(tensors: dict[str, Tensor], **options: Any) -> Any:
        return load(tensors, planner=dcp.DefaultLoadPlanner(allow_partial_load=True), **options)

    monkeypatch.setattr(dcp, "load", partly)
    monkeypatch.setattr(checkpoint, "_check_tensors", lambda path, tensors: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        assert_other_names_are_errors(tmp_path)
