"""Templates and the region ops: real calls compute and differentiate the layer, fakes have its shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moec.compiler.capture import Capture, capture
from moec.compiler.differentiate import differentiate
from moec.compiler.errors import PassError
from moec.compiler.plan import Plan
from moec.compiler.region_op import region, region_backward, templates_in_scope
from moec.compiler.template import Template
from moec.models.adapters import training_view
from moec.preflight import example_inputs

from ..spine import PLAN, WIDTH, Language, Layer, distance, seeded


class Counting(Layer):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.up.requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen.add_(hidden.detach().sum((0, 1)))
        return super().forward(hidden)


def captured(plan: Plan = PLAN) -> tuple[Capture, Any]:
    model = seeded(Language, Counting(), Counting())
    return capture(training_view(model, plan), plan, example_inputs(model, plan)), model


@pytest.fixture(scope="module")
def found() -> tuple[Capture, Any]:
    return captured()


def weights_of(template: Template, layer: Any) -> list[Tensor]:
    state = dict(layer.named_parameters()) | dict(layer.named_buffers())
    return [state[name].clone() for name in template.weight_names]


def test_a_real_call_computes_the_layer_and_the_new_buffers(found: tuple[Capture, Any]) -> None:
    template, layer = found[0].templates["layer"], found[1].layers[0]
    hidden, weights = torch.randn(2, 6, WIDTH), weights_of(template, found[1].layers[0])
    with templates_in_scope(found[0].templates):
        result, seen = region("layer", "layers.0", [hidden], weights)
    before = layer.seen.clone()
    assert distance(result, layer(hidden)) <= 1e-6
    assert torch.equal(seen, layer.seen)
    assert torch.equal(weights[template.weight_names.index("seen")], before), "the arguments stay as they were"
    layer.seen.copy_(before)


def test_a_template_runs_differentiably_on_its_own(found: tuple[Capture, Any]) -> None:
    template, layer = found[0].templates["layer"], found[1].layers[1]
    hidden = torch.randn(2, 6, WIDTH, requires_grad=True)
    state = dict(layer.named_parameters()) | dict(layer.named_buffers())
    template.run([hidden], [state[name] for name in template.weight_names])[0].sum().backward()
    again, layer_grads = hidden.detach().requires_grad_(), {n: p.grad for n, p in layer.named_parameters()}
    layer.zero_grad()
    layer(again).sum().backward()
    assert distance(hidden.grad, again.grad) <= 1e-6  # type: ignore[arg-type]
    for name, weight in layer.named_parameters():
        assert (weight.grad is None) == (layer_grads[name] is None) == (name == "up.weight")
        assert weight.grad is None or distance(layer_grads[name], weight.grad) <= 1e-6


def test_fakes_have_the_shapes_of_results_and_gradients() -> None:
    capture_, model = captured()
    template = capture_.templates["layer"]
    template.take_gradients(differentiate(template.unit))
    hidden, weights = torch.randn(2, 6, WIDTH), weights_of(template, model.layers[0])
    outputs = template.fake_forward([hidden], weights)
    assert len(outputs) == template.result_count
    assert outputs[0].shape == (2, 6, WIDTH)
    grads = template.fake_backward([hidden], weights)
    wanted = [hidden, *weights]
    assert [grad.shape for grad in grads] == [wanted[position].shape for position in template.grad_positions]
    names = ["hidden", *template.weight_names]
    assert [names[position] for position in template.grad_positions] == [
        "hidden",
        "norm.weight",
        "norm.bias",
        "gate.weight",
        "down.weight",
    ]


def test_symbolic_sizes_follow_the_caller() -> None:
    plan = Plan(batch=2, length=12, dynamic="length", min_length=4)
    capture_, model = captured(plan)
    template = capture_.templates["layer"]
    template.take_gradients(differentiate(template.unit))
    for length in (4, 7, 12):
        hidden = torch.randn(2, length, WIDTH)
        outputs = template.fake_forward([hidden], weights_of(template, model.layers[0]))
        assert outputs[0].shape == (2, length, WIDTH)
        assert {output.shape[:2] for output in outputs if output.dim() == 3} == {(2, length)}


def test_buffers_that_come_in_another_order_are_an_error() -> None:
    capture_, _ = captured()
    template = capture_.templates["layer"]
    template.mutated = ("seen", "other")
    with pytest.raises(PassError, match=r"writes the buffers \['seen'\], the probe saw \['seen', 'other'\]"):
        template.take_gradients(differentiate(template.unit))


def test_scopes_nest_and_end() -> None:
    capture_, _ = captured()
    template = capture_.templates["layer"]
    with templates_in_scope({"layer": template}):
        with templates_in_scope({"other": template}):
            pass
        with pytest.raises(KeyError):
            region("other", "p", [torch.randn(2, 6, WIDTH)], [])
    with pytest.raises(KeyError):
        region("layer", "p", [torch.randn(2, 6, WIDTH)], [])


def test_the_backward_op_never_runs(found: tuple[Capture, Any]) -> None:
    hidden = torch.randn(2, 6, WIDTH)
    with templates_in_scope(found[0].templates), pytest.raises(AssertionError, match="never runs"):
        region_backward("layer", "layers.0", [hidden], [], [hidden])
