"""What a step does with buffers and with weights that its caller changed, and what its queries leave alone."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moec
from moec.compiler.errors import BatchError, CaptureError, PlanError, UnsupportedModelError
from moec.models.build import build

from ..spine import PLAN, WIDTH, Language, Layer, batch_for, seeded


class Counting(Layer):
    """Counts its calls through a view of the buffer, and scales by a buffer that it then writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(2, 3, dtype=torch.int64))
        self.register_buffer("decay", torch.ones(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls[:, 0].add_(1)
        output = super().forward(hidden * self.decay.clone())
        self.decay.mul_(0.9)
        return output


def eager_gradients(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model(batch["input_ids"], batch["labels"]).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_backward_reads_the_value_a_buffer_had_before_the_layer_wrote_it() -> None:
    model = seeded(lambda: Language(Counting(), Counting()))
    with torch.no_grad():
        for layer in model.layers:
            layer.decay.copy_(torch.linspace(0.5, 2, WIDTH))
    eager, batch = copy.deepcopy(model), batch_for(PLAN)
    step = moec.compile(model, PLAN)
    step(batch, lr=0.0)
    step(batch, lr=0.0)
    for _ in range(2):
        wanted = eager_gradients(eager, batch)
        eager.zero_grad()
    for layer, other in zip(model.layers, eager.layers, strict=True):
        assert torch.equal(step.state.buffers[f"layers.{layer_index(model, layer)}.calls"], other.calls)
        assert torch.allclose(step.state.buffers[f"layers.{layer_index(model, layer)}.decay"], other.decay)
    assert_equal(step.gradients(batch), eager_gradients(eager, batch))
    assert wanted


def layer_index(model: Any, layer: nn.Module) -> int:
    return list(model.layers).index(layer)


def test_a_buffer_that_is_replaced_is_refused() -> None:
    class Replacing(Counting):
        def forward(self, hidden: Tensor) -> Tensor:
            self.decay = self.decay * 0.9
            return hidden * self.decay

    with pytest.raises(CaptureError, match=r"(?s)replaces the buffer layers.0.decay.*self.decay.copy_"):
        moec.compile(seeded(lambda: Language(Replacing(), Replacing())), PLAN)


def test_different_buffers_over_one_memory_are_refused_where_they_are_written() -> None:
    """Fakes do not share memory, so the trace would not see the one change with the other."""
    memory = torch.ones(2, WIDTH)
    model = seeded(lambda: Language(Counting(), Counting()))
    model.layers[0].decay, model.layers[1].decay = memory[0], memory[1]
    moec.compile(model, PLAN)
    model.layers[1].decay = memory.view(-1)[WIDTH - 1 : 2 * WIDTH - 1]
    says = r"layers.0.decay and layers.1.decay are different tensors over the same memory, and the forward writes"
    with pytest.raises(CaptureError, match=says):
        moec.compile(model, PLAN)


def test_a_step_leaves_its_batch_as_it_is() -> None:
    class Writing(Language):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            input_ids.clamp_(max=3)
            return super().forward(input_ids, labels)

    step, batch = moec.compile(seeded(Writing, Layer(), Layer()), PLAN), batch_for(PLAN)
    before = {name: value.clone() for name, value in batch.items()}
    step(batch)
    assert all(torch.equal(value, before[name]) for name, value in batch.items())


def test_queries_change_no_buffer() -> None:
    model = seeded(lambda: Language(Counting(), Counting()))
    step, batch = moec.compile(model, PLAN), batch_for(PLAN)
    before = {path: buffer.clone() for path, buffer in step.state.buffers.items()}
    step.loss(batch)
    step.gradients(batch)
    assert all(torch.equal(buffer, before[path]) for path, buffer in step.state.buffers.items())
    step(batch)
    assert not all(torch.equal(buffer, before[path]) for path, buffer in step.state.buffers.items())


def test_weights_loaded_after_compiling_are_the_ones_that_train() -> None:
    model = seeded(lambda: Language(Layer(), Layer())).to(torch.bfloat16)
    step, batch = moec.compile(model, PLAN), batch_for(PLAN)
    step(batch)
    other = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(other)
    step(batch, lr=0.0)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other[name]), name


def test_weights_that_move_are_followed() -> None:
    model = seeded(lambda: Language(Layer(), Layer()))
    step, batch = moec.compile(model, PLAN), batch_for(PLAN)
    before = float(step.loss(batch)["lm_loss"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.clone() * 0.5
    after = float(step.loss(batch)["lm_loss"])
    assert after == pytest.approx(model(batch["input_ids"], batch["labels"]).item(), rel=1e-5)
    assert after != pytest.approx(before, rel=1e-3)


def test_two_steps_of_one_process_do_not_share_state() -> None:
    one, two = (moec.compile(seeded(lambda: Language(Layer(), Layer())), PLAN) for _ in range(2))
    batch = batch_for(PLAN)
    first = one(batch)
    assert torch.equal(first.loss, two(batch).loss)
    assert one.state.step == two.state.step == 1


def test_a_cosine_needs_its_length() -> None:
    optimizer = dataclasses.replace(PLAN.optimizer, lr=1.0, warmup_steps=2, total_steps=10)
    step = moec.compile(seeded(lambda: Language(Layer())), dataclasses.replace(PLAN, optimizer=optimizer))
    rates = [step(batch_for(PLAN, seed)).metrics["lr"] for seed in range(4)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[3] < 1.0
    with pytest.raises(PlanError, match="total_steps is 2"):
        dataclasses.replace(optimizer, total_steps=2)


def test_image_features_take_the_places_of_placeholders() -> None:
    torch.manual_seed(0)
    model = build("k3-tiny").train()
    eager = copy.deepcopy(model)
    plan = moec.Plan(batch=2, length=32, image_tokens=5)
    step = moec.compile(model, plan)
    ids = torch.randint(0, 256, (2, 32))
    ids[0, 3:6] = ids[1, 9:11] = eager.config.image_token
    labels = ids.masked_fill(ids == eager.config.image_token, -100)
    features = torch.randn(5, eager.config.hidden_size)
    batch = {"input_ids": ids, "labels": labels, "image_features": features}
    assert torch.allclose(step.loss(batch)["lm_loss"], eager(ids, labels, image_features=features).lm_loss)
    with pytest.raises(BatchError, match="no image_features"):
        step.loss({"input_ids": ids, "labels": labels})
    with pytest.raises(BatchError, match=r"(?s)\[0\] placeholder tokens.*the plan says 5"):
        step.loss(batch | {"input_ids": ids.clamp(max=255)})


def test_image_tokens_need_a_model_that_takes_them() -> None:
    with pytest.raises(PlanError, match="image_tokens is 3"):
        moec.compile(seeded(lambda: Language(Layer())), dataclasses.replace(PLAN, image_tokens=3))


def test_a_model_in_evaluation_mode_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="evaluation mode"):
        moec.compile(seeded(lambda: Language(Layer())).eval(), PLAN)


def test_functional_dropout_of_zero_is_no_random_op() -> None:
    class Quiet(Layer):
        def forward(self, hidden: Tensor) -> Tensor:
            return F.dropout(super().forward(hidden), 0.0)

    step = moec.compile(seeded(lambda: Language(Quiet(), Quiet())), PLAN)
    batch = batch_for(PLAN)
    assert torch.equal(step.loss(batch)["lm_loss"], step.loss(batch)["lm_loss"])


def test_compiling_without_gradients_around_it_still_trains() -> None:
    batch = batch_for(PLAN)
    wanted = moec.compile(seeded(lambda: Language(Layer(), Layer())), PLAN).gradients(batch)
    with torch.no_grad():
        step = moec.compile(seeded(lambda: Language(Layer(), Layer())), PLAN)
    assert_equal(step.gradients(batch), wanted)


def test_hooks_of_a_layer_run_once() -> None:
    model = seeded(lambda: Language(Layer(), Layer()))
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, output: output * 2)
    eager, batch = copy.deepcopy(model), batch_for(PLAN)
    assert_equal(moec.compile(model, PLAN).gradients(batch), eager_gradients(eager, batch))


def test_data_assigned_to_half_precision_weights_is_what_trains() -> None:
    model = seeded(lambda: Language(Layer(), Layer())).to(torch.bfloat16)
    step, batch = moec.compile(model, PLAN), batch_for(PLAN)
    step(batch)
    model.head.weight.data = torch.full_like(model.head.weight, 0.25)
    step(batch, lr=0.0)
    assert torch.equal(model.head.weight, torch.full_like(model.head.weight, 0.25))
