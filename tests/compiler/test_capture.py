"""Capture: the program it yields computes what the model computes, and errors say where and why."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moec.compiler.capture import Capture, capture
from moec.compiler.errors import CaptureError
from moec.compiler.graph import OUTER, module_path
from moec.compiler.plan import Plan
from moec.compiler.region_op import templates_in_scope
from moec.models.adapters import training_view
from moec.preflight import example_inputs

from ..spine import PLAN, WIDTH, Language, Layer, batch_for, distance, mean_loss, seeded

DYNAMIC = Plan(batch=2, length=12, dynamic="length", min_length=4)


def captured(model: nn.Module, plan: Plan = PLAN) -> Capture:
    return capture(training_view(model, plan), plan, example_inputs(model, plan))


def run(found: Capture, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results of the captured program on the model's own weights; buffers that it writes are changed in place."""
    valid = (batch["labels"][:, 1:] != -100).sum()
    inputs = batch | {"inverse_tokens": 1.0 / valid.clamp(min=1)}
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    outer = found.program.outer
    values = [inputs[v.name] if v.kind == "input" else state[v.name] for v in outer.signature.inputs]
    with templates_in_scope(found.templates), torch.no_grad():
        return dict(zip(found.results, outer.module(*values), strict=True))


def assert_same_loss(found: Capture, model: nn.Module, batch: dict[str, Tensor]) -> None:
    wanted = model(**batch)
    assert distance(run(found, model, batch)["lm_loss"], wanted) <= 1e-6


def regions_of(found: Capture) -> list[tuple[Any, Any]]:
    nodes = found.program.outer.graph.find_nodes(op="call_function", target=torch.ops.moec.region.default)
    return [node.args[:2] for node in nodes]


def test_each_program_is_captured_once_and_called_per_layer() -> None:
    model = seeded(Language, Layer(), Layer(2.0), Layer())
    found = captured(model)
    assert list(found.program.units) == ["layer_1", "layer_2", OUTER]
    assert [unit.instances for unit in found.program.units.values()] == [("layers.0", "layers.2"), ("layers.1",), ("",)]
    assert regions_of(found) == [("layer_1", "layers.0"), ("layer_2", "layers.1"), ("layer_1", "layers.2")]
    assert found.results == ("objective", "lm_loss")
    assert_same_loss(found, model, batch_for(PLAN))


def test_signatures_are_flat_and_named_by_path() -> None:
    found = captured(seeded(Language, Layer(), Layer()))
    layer = found.program.units["layer"].signature
    assert layer.names("weight") == ["norm.weight", "norm.bias", "gate.weight", "up.weight", "down.weight"]
    assert [(value.name, value.requires_grad) for value in layer.inputs if value.kind == "input"] == [("hidden", True)]
    outer = found.program.outer.signature
    assert outer.names("input") == ["input_ids", "labels", "inverse_tokens"]
    assert outer.names("weight")[:3] == ["embed.weight", "layers.0.norm.weight", "layers.0.norm.bias"]
    assert [value.name for value in outer.outputs] == ["objective", "lm_loss"]


def test_frozen_weights_are_marked() -> None:
    model = seeded(Language, Layer(), Layer())
    for layer in model.layers:
        layer.gate.requires_grad_(False)
    signature = captured(model).program.units["layer"].signature
    assert [value.name for value in signature.inputs if not value.requires_grad] == ["gate.weight"]


def test_nodes_carry_the_path_of_their_module() -> None:
    found = captured(seeded(Language, Layer(), Layer()))
    paths = {str(node.target): module_path(node) for node in found.program.units["layer"].graph.nodes}
    assert paths["aten.layer_norm.default"] == "norm"
    linears = found.program.units["layer"].graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert [module_path(node) for node in linears] == ["gate", "up", "down"]
    outer = found.program.outer.graph
    (embedding,) = outer.find_nodes(op="call_function", target=torch.ops.aten.embedding.default)
    assert module_path(embedding) == "embed"
    assert [module_path(node) for node in outer.nodes if node.target is torch.ops.moec.region.default] == [
        "layers.0",
        "layers.1",
    ]


def test_a_region_may_take_and_return_anything_of_tensors() -> None:
    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(WIDTH, WIDTH)

        def forward(self, stream: dict[str, Any], factor: float) -> dict[str, Any]:
            hidden = self.proj(stream["hidden"]) * factor
            return {"hidden": hidden, "sources": [*stream["sources"], hidden], "note": "kept"}

    class Model(Language):
        def hidden(self, input_ids: Tensor) -> Tensor:
            stream = {"hidden": self.embed(input_ids), "sources": [], "note": "kept"}
            for layer in self.layers:
                stream = layer(stream, 0.5)
            assert stream["note"] == "kept"
            return torch.stack(stream["sources"]).sum(0)

    model = seeded(Model, Stream(), Stream(), Stream())
    found = captured(model)
    assert len(found.templates) == 3, "each has one source more than the one before"
    assert_same_loss(found, model, batch_for(PLAN))


def test_buffers_that_a_region_writes_are_written_by_the_outer_graph() -> None:
    class Counting(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(WIDTH))

        def forward(self, hidden: Tensor) -> Tensor:
            self.seen.add_(hidden.detach().mean((0, 1)))
            return super().forward(hidden) + self.seen

    model = seeded(Language, Counting(), Counting())
    found = captured(model)
    assert found.templates["layer"].mutated == ("seen",)
    before = [layer.seen.clone() for layer in model.layers]
    run(found, model, batch_for(PLAN))
    after = [layer.seen.clone() for layer in model.layers]
    for layer, value in zip(model.layers, before, strict=True):
        layer.seen.copy_(value)
    model(**batch_for(PLAN))
    for layer, value in zip(model.layers, after, strict=True):
        assert value.abs().sum() > 0
        assert torch.equal(layer.seen, value)


def test_tied_weights_are_one_parameter_with_two_paths() -> None:
    model = seeded(Language, Layer(), Layer(), tied=True)
    found = captured(model)
    assert found.tied == {"head.weight": "embed.weight"}
    assert_same_loss(found, model, batch_for(PLAN))


def test_what_cannot_be_a_template_stays_in_the_outer_graph_with_a_reason() -> None:
    shared = Layer()
    model = seeded(Language, shared, Layer(), shared)
    found = captured(model)
    assert regions_of(found) == [("layer", "layers.1")]
    assert [(m.path, m.reason) for m in found.near_misses] == [
        ("layers.0", "it is called more than once in a forward pass")
    ]
    assert_same_loss(found, model, batch_for(PLAN))


def test_constants_of_a_layer_are_part_of_its_graph() -> None:
    class Constant(Layer):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden) * torch.tensor([1.0, 3.0]).repeat(WIDTH // 2)

    model = seeded(Language, Constant(), Constant())
    found = captured(model)
    assert len(found.templates) == 1
    assert found.program.units["layer"].signature.names("input") == ["hidden"]
    assert_same_loss(found, model, batch_for(PLAN))


def test_a_dynamic_length_is_one_symbol_in_every_unit() -> None:
    model = seeded(Language, Layer(), Layer())
    found = captured(model, DYNAMIC)
    for unit in found.program.units.values():
        sizes = {str(s) for n, v in unit.placeholders() for s in n.meta["val"].shape if isinstance(s, torch.SymInt)}
        assert len(sizes) == 1, unit.name
    for length in (4, 5, 12):
        assert_same_loss(found, model, batch_for(DYNAMIC, length=length))


def test_a_size_that_only_depends_on_the_length_keeps_a_layer_out() -> None:
    class Pooled(Layer):
        def forward(self, hidden: Tensor, pooled: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(hidden) + pooled.mean(1, keepdim=True)

    class Model(Language):
        def hidden(self, input_ids: Tensor) -> Tensor:
            hidden = self.embed(input_ids)
            pooled = torch.cat([hidden, hidden], 1)
            for layer in self.layers:
                hidden = layer(hidden, pooled)
            return hidden

    model = seeded(Model, Pooled(), Pooled())
    found = captured(model, DYNAMIC)
    assert found.templates == {}
    assert found.near_misses[0].reason == "the size of pooled depends on the length but is not the length"
    assert_same_loss(found, model, batch_for(DYNAMIC, length=7))


def test_the_views_preparation_is_active_while_tracing_and_over_afterwards() -> None:
    model = seeded(Language, Layer(), Layer())
    view = training_view(model, PLAN)

    @contextmanager
    def doubled() -> Iterator[None]:
        for layer in model.layers:
            layer.scale = 2.0
        yield
        for layer in model.layers:
            layer.scale = 1.0

    def prepare() -> AbstractContextManager[None]:
        return doubled()

    view.prepare = prepare
    found = capture(view, PLAN, example_inputs(model, PLAN))
    plain = model(**batch_for(PLAN))
    with doubled():
        assert_same_loss(found, model, batch_for(PLAN))
        assert distance(model(**batch_for(PLAN)), plain) > 1e-3


def test_the_model_is_untouched() -> None:
    model = seeded(Language, Layer(), Layer())
    weights = {name: (weight, weight.clone()) for name, weight in model.named_parameters()}
    captured(model)
    assert all(weights[n][0] is p and torch.equal(weights[n][1], p) for n, p in model.named_parameters())
    assert all("forward" not in vars(module) for module in model.modules())


class Looping(Layer):
    """Runs only what the data asks for."""

    def forward(self, hidden: Tensor) -> Tensor:
        for index in hidden.argmax(-1).unique():
            hidden = hidden + self.gate(hidden) * index
        return hidden


class Choosing(Layer):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) if hidden.sum() > 0 else hidden


@pytest.mark.parametrize("layer", [Looping, Choosing])
def test_data_dependent_control_flow_is_refused_with_the_line(layer: type[Layer]) -> None:
    with pytest.raises(CaptureError) as caught:
        captured(seeded(Language, layer(), layer()))
    error = caught.value
    assert error.where.startswith(f"layers.0, {__file__}:")
    assert error.where.endswith("in forward")
    assert "its control flow or a size depends on the data" in error.hint


def test_data_behind_the_back_of_autograd_is_refused() -> None:
    """A trace has no values for what `.data` gives."""

    class Behind(Layer):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden) * self.gate.weight.data.mean()

    with pytest.raises(CaptureError, match=r"uses a tensor that the trace has no values of") as caught:
        captured(seeded(Language, Behind(), Behind()))
    assert caught.value.where.startswith(f"{__file__}:")
    assert "x.detach() instead of x.data" in caught.value.hint


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class WithFunction(Layer):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(Doubled.apply(hidden))


class WithHook(Layer):
    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.gate(hidden)
        hidden.register_hook(lambda grad: 2 * grad)
        return hidden


class WithCheckpoint(Layer):
    def forward(self, hidden: Tensor) -> Tensor:
        return checkpoint(super().forward, hidden, use_reentrant=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (WithFunction, "Doubled is a torch.autograd.Function"),
        (WithHook, "is a hook on a gradient"),
        (WithCheckpoint, "CheckpointFunction is a torch.autograd.Function"),
    ],
)
def test_gradients_written_in_python_are_refused(layer: type[Layer], says: str) -> None:
    """A trace would keep the forward and give a wrong gradient."""
    model = seeded(Language, layer(), layer())
    with pytest.raises(CaptureError) as caught:
        captured(model)
    assert caught.value.where.startswith(f"layers.0, {__file__}:")
    assert says in caught.value.why
    assert "custom_op" in caught.value.hint
    model(**batch_for(PLAN)).backward()
    assert torch.autograd.Function.apply.__func__.__module__ == "torch.autograd.function", "restored"


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_refused(register: str) -> None:
    model = seeded(Language, Layer(), Layer())
    handle = getattr(model.layers[1].up.weight, register)(lambda grad: None)
    with pytest.raises(CaptureError, match=r"the parameter layers.1.up.weight has a hook on its gradient"):
        captured(model)
    handle.remove()
    captured(model)


def test_python_gradients_that_do_not_matter_are_taken() -> None:
    class Quiet(Layer):
        def forward(self, hidden: Tensor) -> Tensor:
            with torch.no_grad():
                scale = Doubled.apply(self.gate(hidden)).sigmoid()
            return super().forward(hidden) * scale

    model = seeded(Language, Quiet(), Quiet())
    assert_same_loss(captured(model), model, batch_for(PLAN))


def test_a_model_that_fails_by_itself_is_said_to() -> None:
    class Broken(Layer):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden @ torch.zeros(3, 3)

    with pytest.raises(CaptureError) as caught:
        captured(seeded(Language, Broken(), Broken()))
    assert "run the model once in eager mode" in caught.value.hint
    assert "RuntimeError" in caught.value.why


def test_mean_loss_of_the_helpers_is_what_a_loop_computes() -> None:
    """The reference of this file and of others."""
    logits, labels = torch.randn(1, 4, 5), torch.tensor([[0, 3, -100, 1]])
    wanted = -(logits.log_softmax(-1)[0, 0, 3] + logits.log_softmax(-1)[0, 2, 1]) / 2
    assert distance(mean_loss(logits, labels), wanted) < 1e-6
