"""Weights and buffers that lie in memory in any way: numbers as in eager, or an error at compile by name.

The step is compiled once over contiguous weights and runs over each layout, or is compiled for it where that shows in
the graphs. Values survive checkpoints, export and loading.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moec
from moec.compiler.default_dtype import default_dtype
from moec.compiler.errors import CaptureError, CheckpointError, UnsupportedModelError
from moec.compiler.overlap import overlaps_itself, write_overlapping
from moec.compiler.plan import OptimizerPlan, Plan
from moec.runtime import load_checkpoint, save_checkpoint

from ..spine import WIDTH, Language, Layer, adamw_groups, batch_for, distance, eager, seeded, step_beside

PLAN = Plan(batch=2, length=6, optimizer=OptimizerPlan(lr=1e-2, schedule="constant"))


class Mixed(Layer):
    """With a convolution over tokens, a scalar, a parameter of no elements, and buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, (3, 1), padding=(1, 0))
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, WIDTH))
        self.register_buffer("turned", torch.randn(WIDTH, WIDTH).t() * 0.3)
        self.register_buffer("spread", torch.randn(1).expand(WIDTH))
        self.register_buffer("none", torch.randn(3, 0))
        self.register_buffer("written", torch.zeros(WIDTH, 2).t())

    def forward(self, hidden: Tensor) -> Tensor:
        self.written[0].add_(0.1)
        mixed = self.conv(hidden.transpose(1, 2)[..., None])[..., 0].transpose(1, 2)
        hidden = super().forward(hidden @ self.turned + self.gain * mixed * (1 + self.written.clone()[0]))
        return hidden * (1 + self.spread) + hidden @ self.empty.t() @ self.empty + self.none.sum()


def transposed(weight: Tensor) -> Tensor:
    return weight.t().contiguous().t()


def with_gaps(weight: Tensor) -> Tensor:
    memory = torch.full((*weight.shape[:-1], 2 * weight.shape[-1]), 7.0)
    memory[..., ::2] = weight
    return memory[..., ::2]


def lay(module: Any, order: Callable[[Tensor], Tensor]) -> None:
    module.weight = nn.Parameter(order(module.weight.detach()))


def all_transposed(model: Any) -> None:
    for module in (model.head, model.embed, *(layer.gate for layer in model.layers)):
        lay(module, transposed)


def one_layer_transposed(model: Any) -> None:
    lay(model.layers[0].gate, transposed)


def gaps(model: Any) -> None:
    for module in (model.head, model.embed, model.layers[0].up, model.layers[1].norm):
        lay(module, with_gaps)


def channels_last(model: Any) -> None:
    model.to(memory_format=torch.channels_last)


def rows_of_one_memory(model: Any) -> None:
    memory = torch.randn(2, WIDTH, WIDTH) * 0.4
    for module, part in zip((model.layers[0].gate, model.layers[0].up), memory, strict=True):
        module.weight = nn.Parameter(part)


def columns_of_one_memory(model: Any) -> None:
    memory = torch.randn(WIDTH, 2 * WIDTH) * 0.4
    model.layers[1].gate.weight = nn.Parameter(memory[:, :WIDTH])
    model.layers[1].up.weight = nn.Parameter(memory[:, WIDTH:])


def as_they_come(model: Any) -> None:
    """Nothing but what `Mixed` has."""


@pytest.mark.parametrize(
    "arrange",
    [
        as_they_come,
        all_transposed,
        one_layer_transposed,
        gaps,
        channels_last,
        rows_of_one_memory,
        columns_of_one_memory,
    ],
    ids=lambda arrange: arrange.__name__,
)
def test_numbers_are_those_of_eager(arrange: Callable[[Any], None], tmp_path: Path) -> None:
    # In float32 the gradient of a gain mostly cancels: where its terms happen to lie in memory moves it by 1e-5.
    with default_dtype(torch.float64):
        model = seeded(lambda: Language(Mixed(), Mixed()))
        arrange(model)
    twin, batch = copy.deepcopy(model), batch_for(PLAN)
    step = moec.compile(model, PLAN)
    probe = copy.deepcopy(model)
    loss, gradients = eager(probe, batch)
    assert distance(step.loss(batch)["lm_loss"], loss) <= 1e-6
    found = step.gradients(batch)
    assert all(distance(found[name], wanted) <= 1e-5 for name, wanted in gradients.items())  # type: ignore[arg-type]
    _three_steps(step, twin)
    for name, parameter in model.named_parameters():
        assert distance(parameter, dict(twin.named_parameters())[name]) <= 1e-5, name
    for name, buffer in model.named_buffers():
        assert distance(buffer, dict(twin.named_buffers())[name]) <= 1e-6, name
    _survives(step, model, tmp_path)


def _three_steps(step: moec.CompiledStep, twin: nn.Module) -> None:
    groups = adamw_groups(twin)
    for name, parameter in twin.named_parameters():
        if "conv" in name and parameter.dim() > 1:  # which moec does not decay
            groups[0]["params"] = [p for p in groups[0]["params"] if p is not parameter]
            groups[1]["params"].append(parameter)
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    step_beside(step, twin, optimizer, PLAN, range(3))


def _survives(step: moec.CompiledStep, model: nn.Module, folder: Path) -> None:
    batch = batch_for(PLAN, 7)
    loss = step.loss(batch)["lm_loss"]
    checkpoint = save_checkpoint(folder / "run", step.state, fingerprint={})
    loaded = moec.load(step.save(folder / "artefact", weights=True))
    assert distance(loaded.loss(batch)["lm_loss"], loss) <= 1e-6  # contiguous there, so rounded in another order
    values = {name: value.clone() for name, value in model.state_dict().items()}
    step(batch)
    load_checkpoint(checkpoint, step.state, fingerprint={})
    assert torch.equal(step.loss(batch)["lm_loss"], loss)
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


def expanded(model: Any) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach()[:1].expand(16, WIDTH))


def windows(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.randn(16 + WIDTH).as_strided((16, WIDTH), (1, 1)))


def shifted(model: Any) -> None:
    memory = torch.randn(WIDTH + 1, WIDTH)
    model.layers[0].gate.weight, model.layers[0].up.weight = nn.Parameter(memory[:-1]), nn.Parameter(memory[1:])


def shifted_and_frozen(model: Any) -> None:
    shifted(model)
    model.layers[0].gate.weight.requires_grad_(False)


def buffer_over_a_weight(model: Any) -> None:
    model.layers[1].register_buffer("same", model.layers[1].gate.weight.data[0])


@pytest.mark.parametrize(
    ("arrange", "what", "why"),
    [
        (expanded, "elements of parameter head.weight share memory with each other", "several times"),
        (windows, "elements of parameter head.weight share memory with each other", "several times"),
        (
            shifted,
            "parameter layers.0.gate.weight and parameter layers.0.up.weight share memory but are different tensors",
            "two updates",
        ),
        (
            shifted_and_frozen,
            "parameter layers.0.up.weight and parameter layers.0.gate.weight share memory but are different tensors",
            "every update of it would change layers.0.gate.weight too",
        ),
        (
            buffer_over_a_weight,
            "parameter layers.1.gate.weight and buffer layers.1.same share memory but are different tensors",
            "every update of it would change layers.1.same too",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_memory_that_an_update_would_write_wrongly_is_refused(
    arrange: Callable[[Any], None], what: str, why: str
) -> None:
    model = seeded(lambda: Language(Layer(), Layer()))
    arrange(model)
    with pytest.raises(UnsupportedModelError) as caught:
        moec.compile(model, PLAN)
    assert caught.value.what == what
    assert why in caught.value.why


def test_a_frozen_expanded_weight_is_like_any_other() -> None:
    model = seeded(lambda: Language(Layer(), Layer()))
    model.embed.weight = nn.Parameter(model.embed.weight.detach()[:, :1].expand(16, WIDTH), requires_grad=False)
    step, batch = moec.compile(model, PLAN), batch_for(PLAN)
    loss, gradients = eager(copy.deepcopy(model), batch)
    assert distance(step.loss(batch)["lm_loss"], loss) <= 1e-6
    found = step.gradients(batch)
    assert {name for name, wanted in gradients.items() if wanted is not None} == set(found)


def test_a_written_buffer_that_overlaps_itself_is_refused_by_name() -> None:
    class Counting(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1).expand(WIDTH))

        def forward(self, hidden: Tensor) -> Tensor:
            self.seen.add_(1)
            return super().forward(hidden)

    with pytest.raises(
        CaptureError, match=r"elements share memory, as those of layers\.0\.seen, layers\.1\.seen do"
    ) as caught:
        moec.compile(seeded(lambda: Language(Counting(), Counting())), PLAN)
    assert "contiguous()" in caught.value.hint


def test_a_checkpoint_with_more_values_than_a_buffer_can_hold_is_refused(tmp_path: Path) -> None:
    model = seeded(lambda: Language(Mixed(), Mixed()))
    model.layers[0].spread = model.layers[0].spread.clone()
    step = moec.compile(model, PLAN)
    model.layers[0].spread[3] = 5
    path = save_checkpoint(tmp_path, step.state, fingerprint={})
    model.layers[0].spread = torch.ones(1).expand(WIDTH)
    step.loss(batch_for(PLAN))
    with pytest.raises(CheckpointError, match=r"layers\.0\.spread of the checkpoint has different values"):
        load_checkpoint(path, step.state, fingerprint={})


@pytest.mark.parametrize(
    ("size", "stride", "overlaps"),
    [
        ((3, 4), (4, 1), False),
        ((3, 4), (1, 3), False),
        ((3, 4), (9, 2), False),
        ((3, 4), (0, 1), True),
        ((1, 4), (0, 1), False),
        ((3, 4), (1, 1), True),
        ((2, 3), (3, 2), False),
        ((3, 3), (2, 3), False),
        ((4, 3), (2, 3), True),
        ((0, 4), (0, 0), False),
        ((), (), False),
    ],
)
def test_overlap_of_a_tensor_with_itself(size: tuple[int, ...], stride: tuple[int, ...], overlaps: bool) -> None:
    tensor = torch.arange(64.0).as_strided(size, stride)
    assert overlaps_itself(tensor) == overlaps
    assert (len(tensor.flatten().unique()) < tensor.numel()) == overlaps


def test_values_are_written_into_overlapping_memory_where_they_fit() -> None:
    memory = torch.arange(64.0)
    tensor = memory.as_strided((3, 4), (1, 1))
    wanted = torch.arange(10.0, 16).as_strided((3, 4), (1, 1))
    assert write_overlapping(tensor, wanted.clone())
    assert torch.equal(tensor, wanted)
    assert not write_overlapping(tensor, torch.randn(3, 4))
    assert torch.equal(tensor, wanted)
    assert memory[6:].tolist() == list(range(6, 64))
