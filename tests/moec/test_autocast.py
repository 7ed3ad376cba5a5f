"""Autocast is refused around a step and inside of a model: neither changes numbers without a word."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import moec
from moec.compiler.errors import CaptureError, UnsupportedModelError

from ..spine import PLAN, Language, Layer, batch_for, seeded


def model() -> Language:
    return seeded(Language, Layer(), Layer())


def test_autocast_around_the_compilation_is_refused() -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UnsupportedModelError) as caught:
        moec.compile(model(), PLAN)
    assert caught.value.what == "moec.compile runs under torch.autocast for cpu"
    assert "model.to(torch.bfloat16)" in caught.value.hint


def test_autocast_around_a_step_is_refused_before_anything_changes() -> None:
    step = moec.compile(model(), PLAN)
    batch = batch_for(PLAN)
    wanted = step.loss(batch)["lm_loss"]
    for call in (step, step.loss, step.gradients):
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(UnsupportedModelError, match="the step runs under"):
            call(batch)
    assert torch.equal(step(batch).loss, wanted)


class Casting(Layer):
    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(hidden).float()


class CastingModel(Language):
    @torch.autocast("cpu", torch.bfloat16)
    def hidden(self, input_ids: Tensor) -> Tensor:
        return super().hidden(input_ids).float()


@pytest.mark.parametrize(
    ("make", "where"),
    [(lambda: Language(Casting(), Casting()), "layers.0, "), (lambda: CastingModel(Layer(), Layer()), "")],
    ids=["in a layer", "around the layers"],
)
def test_autocast_inside_of_a_model_is_refused_with_its_place(make: type[Language], where: str) -> None:
    enter = torch.autocast.__enter__
    with pytest.raises(CaptureError, match=r"AutocastInModel: the model enters torch.autocast for cpu") as caught:
        moec.compile(seeded(make), PLAN)
    assert caught.value.where.startswith(where)
    assert torch.autocast.__enter__ is enter
