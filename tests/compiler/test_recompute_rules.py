"""Recompute rules: what runs again keeps nothing, numbers stay bitwise, and a rule may cover part of a template."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import moec
from moec.compiler.errors import PlanError

from ..spine import PLAN, Language, Layer, batch_for, seeded


def gradients(*rules: str) -> tuple[dict[str, Tensor], dict[str, int], str]:
    """Gradients, kept bytes by template, and the program's text."""
    model = seeded(lambda: Language(Layer(), Layer(), Layer()))
    step = moec.compile(model, dataclasses.replace(PLAN, recompute=rules, check=True))
    kept = {
        unit: sum(placement.bytes for placement in placements if placement.decision == "keep")
        for unit, placements in step.log.placements.items()
    }
    return step.gradients(batch_for(PLAN)), kept, step.source


def test_recomputation_keeps_no_values_and_every_bit() -> None:
    kept_all, bytes_all, _ = gradients()
    again, bytes_again, _ = gradients("*")
    template = next(name for name in bytes_all if name != "model")
    assert bytes_all[template] > 0
    assert bytes_again[template] == 0
    assert all(torch.equal(kept_all[name], again[name]) for name in kept_all)


def test_a_rule_for_one_layer_splits_its_template() -> None:
    kept_all, bytes_all, _ = gradients()
    again, kept, source = gradients("layers.0")
    template = next(name for name in bytes_all if name != "model")
    assert kept[template] == bytes_all[template]
    assert kept[f"{template}_recomputed"] == 0
    assert f'saved["layers.0"] = {template}_recomputed_forward(' in source
    assert f'saved["layers.1"] = {template}_forward(' in source
    assert all(torch.equal(kept_all[name], again[name]) for name in kept_all)


def test_a_rule_that_matches_nothing_names_the_nearest_layers() -> None:
    with pytest.raises(PlanError, match=r"(?s)'layer.0' matches no layer.*layers.0"):
        gradients("layer.0")
