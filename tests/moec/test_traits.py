"""Models with one odd trait each: the compiled step has the loss and the gradients of eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import moec
from moec.compiler.plan import Plan

from ..spine import (
    PLAN,
    VOCABULARY,
    WIDTH,
    Language,
    Layer,
    assert_equal_gradients,
    batch_for,
    distance,
    eager,
    recomputed,
    seeded,
)


@dataclass
class Trait:
    """A model, the plan and length to try it with, bounds of loss and gradients, and how many templates it has."""

    model: Any
    templates: int = 1
    plan: Plan = PLAN
    length: int | None = None
    loss_bound: float = 1e-6
    gradient_bound: float = 1e-5


TRAITS: list[Callable[[], Trait]] = []


def trait(make: Callable[[], Trait]) -> Callable[[], Trait]:
    TRAITS.append(make)
    return make


@pytest.mark.parametrize("make", TRAITS, ids=lambda make: make.__name__)
def test_the_step_is_eagers(make: Callable[[], Trait]) -> None:
    given = make()
    step = moec.compile(given.model, given.plan)
    names = {name for name in vars(step.program) if name.endswith("_forward")}
    assert len(names) == given.templates, names
    batch = batch_for(given.plan, length=given.length)
    state = copy.deepcopy(given.model.state_dict())
    loss, gradients = eager(given.model, copy.deepcopy(batch))
    buffers = {name: buffer.clone() for name, buffer in given.model.named_buffers()}
    given.model.load_state_dict(state)
    assert_equal_gradients(step.gradients(batch), gradients, given.gradient_bound)
    assert distance(step.loss(batch)["lm_loss"], loss) <= given.loss_bound
    assert distance(step(batch).loss, loss) <= given.loss_bound
    for name, buffer in given.model.named_buffers():
        assert distance(buffer, buffers[name]) <= 1e-6, name


def two(layer: Callable[[], nn.Module] = Layer, model: type[Language] = Language, **options: Any) -> Any:
    return seeded(model, layer(), layer(), **options)


@trait
def plain_layers() -> Trait:
    return Trait(two())


@trait
def no_repeated_layers() -> Trait:
    return Trait(seeded(Language, Layer()), templates=0)


@trait
def layers_that_differ_in_a_constant() -> Trait:
    return Trait(seeded(Language, Layer(), Layer(2.0), Layer()), templates=2)


@trait
def layers_without_weights() -> Trait:
    class Plain(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return torch.tanh(hidden) * 2

    return Trait(two(Plain))


@trait
def layers_frozen() -> Trait:
    model = two()
    model.layers.requires_grad_(False)
    return Trait(model)


@trait
def all_frozen_but_the_head() -> Trait:
    model = two()
    model.layers.requires_grad_(False)
    model.embed.requires_grad_(False)
    return Trait(model)


@trait
def tied_embedding_and_head() -> Trait:
    return Trait(two(tied=True))


@trait
def tied_inside_a_layer() -> Trait:
    model = two()
    for layer in model.layers:
        layer.up.weight = layer.gate.weight
    return Trait(model)


@trait
def tied_across_layers() -> Trait:
    model = two()
    model.layers[1].gate.weight = model.layers[0].gate.weight
    return Trait(model)


@trait
def a_layers_weight_used_outside_too() -> Trait:
    class Model(Language):
        def hidden(self, input_ids: Tensor) -> Tensor:
            return super().hidden(input_ids) @ self.layers[0].gate.weight

    return Trait(two(model=Model))


@trait
def a_layer_used_twice() -> Trait:
    shared = Layer()
    return Trait(seeded(Language, shared, Layer(), shared))


@trait
def accumulated_microbatches() -> Trait:
    return Trait(two(), plan=Plan(batch=2, length=6, accumulation=3))


@trait
def a_dynamic_length() -> Trait:
    return Trait(two(), plan=Plan(batch=2, length=9, dynamic="length", min_length=3), length=5)


@trait
def recomputed_layers() -> Trait:
    return Trait(two(), plan=Plan(batch=2, length=6, cache=recomputed("layers.*")))


@trait
def a_running_mean() -> Trait:
    class Running(Layer):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, hidden: Tensor) -> Tensor:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(hidden.mean((0, 1)))
            return super().forward(hidden - self.mean)

    return Trait(two(Running))


@trait
def writes_that_nothing_reads() -> Trait:
    """Counts under no_grad: neither results nor gradients depend on them."""

    class Counted(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.register_buffer("signs", torch.zeros(2, dtype=torch.int32))
            self.register_buffer("seen", torch.zeros(WIDTH))

        def forward(self, hidden: Tensor) -> Tensor:
            positive = (hidden[..., 0] > 0).flatten().long()
            with torch.no_grad():
                self.calls.add_(1)
                self.signs.index_add_(0, positive, torch.ones_like(positive, dtype=torch.int32))
                self.seen[:3].copy_(hidden.mean((0, 1))[:3])
            return super().forward(hidden)

    return Trait(two(Counted))


class Centred(Layer):
    """Subtracts a running mean that it writes; a buffer given to several layers is one to all of them."""

    mean: Tensor

    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(hidden.mean((0, 1)), alpha=0.1)
        return super().forward(hidden - self.mean)


class Scaled(Layer):
    """Reads a buffer that others write, in forward and in backward."""

    mean: Tensor

    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden * (self.mean.clone() * 3).exp())


@trait
def one_buffer_written_by_every_layer() -> Trait:
    mean = torch.ones(WIDTH)
    return Trait(seeded(Language, Centred(mean), Centred(mean), Centred(mean)))


@trait
def one_buffer_written_in_every_microbatch() -> Trait:
    mean = torch.ones(WIDTH)
    return Trait(seeded(Language, Centred(mean), Centred(mean)), plan=Plan(batch=2, length=6, accumulation=3))


@trait
def a_buffer_that_other_layers_read() -> Trait:
    mean = torch.ones(WIDTH)
    return Trait(seeded(Language, Centred(mean), Scaled(mean), Centred(mean), Scaled(mean)), templates=2)


@trait
def a_buffer_that_other_layers_read_and_run_again() -> Trait:
    """The second run reads what the first one did, not what was written in between."""
    mean = torch.ones(WIDTH)
    model = seeded(Language, Centred(mean), Scaled(mean), Centred(mean), Scaled(mean))
    return Trait(model, templates=2, plan=Plan(batch=2, length=6, cache=recomputed("*")))


@trait
def a_layers_buffer_written_outside_of_it() -> Trait:
    class Model(Language):
        def hidden(self, input_ids: Tensor) -> Tensor:
            hidden = self.embed(input_ids)
            for layer in self.layers:
                hidden = layer(hidden)
                with torch.no_grad():
                    self.layers[1].mean.add_(0.5)
            return hidden * self.layers[0].mean

    return Trait(seeded(Model, Centred(torch.ones(WIDTH)), Centred(torch.ones(WIDTH))))


@trait
def a_buffer_given_to_layers_as_an_argument() -> Trait:
    class Told(Layer):
        def forward(self, hidden: Tensor, mean: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(hidden * mean.exp())

    class Model(Language):
        mean: Tensor

        def __init__(self, *layers: nn.Module) -> None:
            super().__init__(*layers)
            self.register_buffer("mean", torch.full((WIDTH,), 0.1))

        def hidden(self, input_ids: Tensor) -> Tensor:
            hidden = self.embed(input_ids)
            first = self.mean.view(2, 4).t().reshape(-1)  # a copy of the value of now
            for layer in self.layers:
                with torch.no_grad():
                    self.mean.mul_(0.9).add_(hidden.mean((0, 1)), alpha=0.1)
                hidden = layer(hidden, self.mean)
            return hidden + first

    return Trait(two(Told, Model), plan=Plan(batch=2, length=6, cache=recomputed("*")))


@trait
def a_buffer_with_two_names_in_a_layer() -> Trait:
    class Named(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("one", torch.ones(WIDTH))
            self.register_buffer("two", self.one)

        def forward(self, hidden: Tensor) -> Tensor:
            with torch.no_grad():
                self.one.mul_(0.5)
            shifted = hidden - self.two
            with torch.no_grad():
                self.two.add_(hidden.mean((0, 1)))
            return super().forward(shifted - self.one)

    return Trait(two(Named))


@trait
def a_batch_norm_outside_that_layers_read() -> Trait:
    class Shifted(Layer):
        def __init__(self, norm: nn.BatchNorm1d) -> None:
            super().__init__()
            self.batch_norm = norm

        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden - self.batch_norm.running_mean)

    class Model(Language):
        def hidden(self, input_ids: Tensor) -> Tensor:
            hidden = self.embed(input_ids)
            for layer in self.layers:
                hidden = layer(self.layers[0].batch_norm(hidden.transpose(1, 2)).transpose(1, 2))
            return hidden

    norm = nn.BatchNorm1d(WIDTH)
    return Trait(seeded(Model, Shifted(norm), Shifted(norm)))


@trait
def a_forward_that_writes_into_its_batch() -> Trait:
    class Model(Language):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            labels[labels == 3] = -100
            input_ids.clamp_(max=VOCABULARY // 2)
            return super().forward(input_ids, labels)

    return Trait(two(model=Model))


@trait
def gradients_on_inside_of_no_grad() -> Trait:
    class Nested(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(WIDTH))

        def forward(self, hidden: Tensor) -> Tensor:
            with torch.no_grad():
                gate = self.gate(hidden).sigmoid()
                with torch.enable_grad():
                    hidden = super().forward(hidden * gate)
                self.seen.lerp_(hidden.mean((0, 1)), 0.5)
            return hidden + self.seen

    return Trait(two(Nested))


@trait
def autocast_switched_off() -> Trait:
    """Nothing to switch off; a `no_grad` inside of it is kept."""

    class Precise(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(WIDTH))

        def forward(self, hidden: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                hidden = super().forward(hidden)
                with torch.no_grad():
                    self.seen.add_(hidden.mean((0, 1)))
                    scale = hidden.square().mean()
            return hidden * scale + self.seen

    return Trait(two(Precise))


@trait
def buffers_written_in_another_order_than_declared() -> Trait:
    class Two(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("first", torch.zeros(WIDTH))
            self.register_buffer("second", torch.zeros(WIDTH))

        def forward(self, hidden: Tensor) -> Tensor:
            self.second.add_(hidden.detach().mean((0, 1)))
            self.first.add_(1.0)
            return super().forward(hidden)

    return Trait(two(Two))


@trait
def batch_norm() -> Trait:
    """It writes its running statistics without a word in its op's schema."""

    class Normed(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.batch_norm = nn.BatchNorm1d(WIDTH)

        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(self.batch_norm(hidden.transpose(1, 2)).transpose(1, 2))

    return Trait(two(Normed))


@trait
def a_counter_outside_the_layers() -> Trait:
    class Counting(Language):
        steps: Tensor

        def __init__(self, *layers: nn.Module) -> None:
            super().__init__(*layers)
            self.register_buffer("steps", torch.zeros(()))

        def hidden(self, input_ids: Tensor) -> Tensor:
            self.steps += 1
            return super().hidden(input_ids) * (1 + 0.1 * self.steps)

    return Trait(two(model=Counting))


@trait
def a_frozen_tower_under_no_grad() -> Trait:
    class Towered(Language):
        def __init__(self, *layers: nn.Module) -> None:
            super().__init__(*layers)
            self.tower = nn.ModuleList([Layer(), Layer()])

        def hidden(self, input_ids: Tensor) -> Tensor:
            with torch.no_grad():
                side = self.embed(input_ids)
                for layer in self.tower:
                    side = layer(side)
            return super().hidden(input_ids) + side

    return Trait(two(model=Towered), templates=2)


@trait
def layers_of_torch() -> Trait:
    class Encoder(nn.TransformerEncoderLayer):
        def __init__(self) -> None:
            super().__init__(WIDTH, 2, 16, dropout=0.0, batch_first=True)

    return Trait(two(Encoder), gradient_bound=3e-5)


@trait
def tensors_shared_by_all_layers_at_any_length() -> Trait:
    class Rotated(Layer):
        def forward(self, hidden: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:  # type: ignore[override]
            cos, sin = rope
            hidden = hidden * cos + hidden.roll(1, -1) * sin
            attended = nn.functional.scaled_dot_product_attention(self.gate(hidden), self.up(hidden), hidden, mask)
            return super().forward(attended)

    class Model(Language):
        def hidden(self, input_ids: Tensor) -> Tensor:
            hidden, length = self.embed(input_ids), input_ids.shape[1]
            angles = torch.arange(length)[:, None] * torch.arange(WIDTH) * 0.1
            mask = torch.ones(length, length, dtype=torch.bool).tril()
            for layer in self.layers:
                hidden = layer(hidden, (angles.cos(), angles.sin()), mask)
            return hidden

    return Trait(two(Rotated, Model), plan=Plan(batch=2, length=9, dynamic="length", min_length=3), length=7)


@trait
def two_tokens() -> Trait:
    return Trait(two(), plan=Plan(batch=3, length=2))


@trait
def a_path_without_gradient() -> Trait:
    class Gated(Layer):
        def forward(self, hidden: Tensor) -> Tensor:
            with torch.no_grad():
                gate = self.gate(hidden).sigmoid()
            return hidden + self.down(gate * self.up(hidden))

    return Trait(two(Gated))


@trait
def in_place_arithmetic() -> Trait:
    class InPlace(Layer):
        def forward(self, hidden: Tensor) -> Tensor:
            hidden = super().forward(hidden)
            hidden += 1
            hidden.mul_(0.5)
            hidden[:, :1] = 0
            return hidden

    return Trait(two(InPlace))


@trait
def layers_that_return_their_inputs() -> Trait:
    """Results that share memory with an input: the gradient must pass through them."""

    class Through(Layer):
        def forward(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
            return super().forward(hidden), hidden, residual[:, :, :4]

    class Model(Language):
        def hidden(self, input_ids: Tensor) -> Tensor:
            hidden = self.embed(input_ids)
            residual, total = hidden * 0.5, torch.zeros(())
            for layer in self.layers:
                output, residual, part = layer(hidden, residual)
                hidden, total = output + residual, total + part.sum(-1, keepdim=True)
            return hidden + total

    return Trait(two(Through, Model))


@trait
def results_that_nobody_uses() -> Trait:
    """What only an unused result needs has no gradient, not a zero one; and layers differ in what is used."""

    class Branching(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.aux, self.lost = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

        def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            return super().forward(hidden), self.aux(hidden), self.lost(hidden), hidden.argmax(-1), hidden.detach()

    class Model(Language):
        def hidden(self, input_ids: Tensor) -> Tensor:
            hidden = self.embed(input_ids)
            for index, layer in enumerate(self.layers):
                hidden, aux, _, choice, copy_ = layer(hidden)
                hidden = hidden + choice.unsqueeze(-1) * 0.01 + copy_
                hidden = hidden + aux.sum(-1, keepdim=True) if index == 1 else hidden + aux.detach().mean()
            return hidden

    return Trait(seeded(Model, Branching(), Branching(), Branching()), templates=2)


@trait
def integer_and_plain_arguments() -> Trait:
    class Shifted(Layer):
        def forward(self, hidden: Tensor, ids: Tensor, factor: int) -> Tensor:  # type: ignore[override]
            return super().forward(hidden) + (ids.unsqueeze(-1) * 0.1).to(hidden.dtype) * factor

    class Model(Language):
        def hidden(self, input_ids: Tensor) -> Tensor:
            hidden = self.embed(input_ids)
            for layer in self.layers:
                hidden = layer(hidden, input_ids, 3)
            return hidden

    return Trait(two(Shifted, Model))


@trait
def argument_names_that_the_program_uses_itself() -> Trait:
    """The first layer gets one tensor twice, so it is a program of its own."""

    class Named(Layer):
        def forward(self, w: Tensor, saved: Tensor, X: Tensor, x: Tensor, torch: Tensor, d_output: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(w) + saved * 0.5 + X - x * 2 + torch * d_output

    class Model(Language):
        def hidden(self, input_ids: Tensor) -> Tensor:
            hidden = first = self.embed(input_ids)
            for layer in self.layers:
                hidden = layer(hidden, first, hidden * 2, first * 0.3, torch=first, d_output=hidden * 0.1)
            return hidden

    return Trait(two(Named, Model), templates=2)


@trait
def a_layer_called_model() -> Trait:
    class Inner(Layer):
        moec_region: ClassVar[bool] = True

    class Model(Language):
        def __init__(self) -> None:
            super().__init__()
            self.model = Inner()

        def hidden(self, input_ids: Tensor) -> Tensor:
            return self.model(self.embed(input_ids))

    return Trait(seeded(Model))


@trait
def constants_with_infinity_and_without_elements() -> Trait:
    class Constants(Layer):
        def forward(self, hidden: Tensor) -> Tensor:
            scale = torch.tensor([0.0, -float("inf")]).exp().repeat(WIDTH // 2)
            return super().forward(hidden) + scale + torch.zeros(0, WIDTH).sum(0) + torch.tensor(2.0)

    return Trait(two(Constants))


@trait
def large_constants_of_several_templates() -> Trait:
    class Table(Layer):
        def forward(self, hidden: Tensor) -> Tensor:
            table = torch.tensor([[self.scale * (i + j) for i in range(WIDTH)] for j in range(6)])
            return super().forward(hidden) * table

    return Trait(seeded(Language, Table(0.1), Table(0.2), Table(0.1)), templates=2)


@trait
def parameters_that_nothing_reaches() -> Trait:
    class Idle(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.zeros(0, WIDTH))
            self.idle = nn.Parameter(torch.ones(3))

        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden) + self.empty.sum(0)

    return Trait(two(Idle))


@trait
def checkpointed_layers() -> Trait:
    """The user's own checkpointing is traced through; the plan decides what runs again."""

    class Model(Language):
        def hidden(self, input_ids: Tensor) -> Tensor:
            hidden = self.embed(input_ids)
            for layer in self.layers:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            return hidden

    return Trait(two(model=Model))


@trait
def double_precision() -> Trait:
    """One over the number of valid tokens stays float32."""
    return Trait(two().double(), loss_bound=1e-7, gradient_bound=1e-7)


@trait
def bfloat16() -> Trait:
    return Trait(two().to(torch.bfloat16), loss_bound=1e-2, gradient_bound=3e-2)
