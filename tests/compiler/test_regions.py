"""Regions: which modules become templates, which of them share one, and why others are left alone."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moec.compiler.ambient import ambient, ambient_scope
from moec.compiler.fake import fake_like, fake_mode_of, fake_weights
from moec.compiler.regions import Probe, find_regions, probe

from ..spine import VOCABULARY, WIDTH, Language, Layer


def probed(model: nn.Module, **scope: Tensor) -> Probe:
    """The probe of a model's regions, on fake weights and a fake batch of 2 x 6 tokens."""
    mode = fake_mode_of(model)
    with fake_weights(model, mode), mode:
        ids = fake_like(torch.zeros(2, 6, dtype=torch.int64), mode)
        around = {name: fake_like(value, mode) for name, value in scope.items()}
        with ambient_scope(**around):
            return probe(model, find_regions(model), lambda: model(ids, ids))


def groups(model: nn.Module, **scope: Tensor) -> list[list[str]]:
    """Paths of the regions that share a program."""
    return [[call.path for call in group] for group in probed(model, **scope).groups()]


def reasons(model: nn.Module, **scope: Tensor) -> dict[str, str]:
    return {miss.path: miss.reason for miss in probed(model, **scope).near_misses}


class Marked(Layer):
    moec_region: ClassVar[bool] = True


class Holder(nn.Module):
    """A layer around a marked one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Marked()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden)


def test_entries_of_a_repeated_list_are_regions() -> None:
    assert list(find_regions(Language(Layer(), Layer()))) == ["layers.0", "layers.1"]


def test_a_list_without_repetition_is_no_region() -> None:
    assert find_regions(Language(Layer())) == {}
    assert find_regions(Language(Layer(), nn.Linear(WIDTH, WIDTH))) == {}


def test_marks_win_over_lists() -> None:
    assert list(find_regions(Language(Holder(), Holder()))) == ["layers.0.inner", "layers.1.inner"]


def test_a_region_inside_a_region_is_not_one() -> None:
    class Outer(Holder):
        moec_region: ClassVar[bool] = True

    assert list(find_regions(Language(Outer(), Holder()))) == ["layers.0", "layers.1.inner"]


def test_equal_layers_share_a_program() -> None:
    assert groups(Language(Layer(), Layer(), Layer())) == [["layers.0", "layers.1", "layers.2"]]


@pytest.mark.parametrize("change", ["scale", "eps", "width", "frozen", "dtype", "bias", "extra", "branch"])
def test_layers_that_compute_something_else_do_not_share(change: str) -> None:
    """Same class, same signature; the difference lies in a constant, a flag, a shape or the code path."""

    class Branching(Layer):
        normed = True

        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden) if self.normed else hidden + self.down(self.gate(hidden) * self.up(hidden))

    odd = Branching()
    match change:
        case "scale":
            odd.scale = 2.0
        case "eps":
            odd.norm.eps = 1e-3
        case "width":
            odd.gate, odd.up, odd.down = nn.Linear(8, 4, False), nn.Linear(8, 4, False), nn.Linear(4, 8, False)
        case "frozen":
            odd.gate.weight.requires_grad_(False)
        case "dtype":
            odd.gate.weight.data = odd.gate.weight.data.double()
            odd.gate.forward = lambda x: F.linear(x, odd.gate.weight.to(x.dtype))  # type: ignore[method-assign]
        case "bias":
            odd.down = nn.Linear(WIDTH, WIDTH)
        case "extra":
            odd.register_buffer("unused", torch.zeros(3))
        case "branch":
            odd.normed = False
    assert groups(Language(Branching(), odd, Branching())) == [["layers.0", "layers.2"], ["layers.1"]]


def test_a_constant_tensor_of_the_layer_tells_layers_apart() -> None:
    class Constant(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.value = value

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden * torch.tensor([self.value, 1.0]).repeat(WIDTH // 2)

    assert groups(Language(Constant(1.0), Constant(2.0), Constant(1.0))) == [["layers.0", "layers.2"], ["layers.1"]]


def test_the_way_values_flow_tells_layers_apart() -> None:
    class Crossed(nn.Module):
        def __init__(self, crossed: bool) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
            self.crossed = crossed

        def forward(self, hidden: Tensor) -> Tensor:
            a, b = self.a(hidden), self.b(hidden)
            return a - b if not self.crossed else b - a

    model = Language(Crossed(False), Crossed(True), Crossed(False))
    assert groups(model) == [["layers.0", "layers.2"], ["layers.1"]]


def test_arguments_tell_layers_apart() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(WIDTH, WIDTH)

        def forward(self, hidden: Tensor, *, factor: float, mask: Tensor | None = None) -> Tensor:
            hidden = self.proj(hidden) * factor
            return hidden if mask is None else hidden * mask

    class Model(Language):
        def hidden(self, input_ids: Tensor) -> Tensor:
            hidden, mask = self.embed(input_ids), (input_ids > 2).unsqueeze(-1)
            for index, layer in enumerate(self.layers):
                hidden = layer(hidden, factor=float(index // 2), mask=mask if index == 3 else None)
            return hidden

    found = probed(Model(Scaled(), Scaled(), Scaled(), Scaled()))
    assert [[c.path[-1] for c in group] for group in found.groups()] == [["0", "1"], ["2"], ["3"]]
    assert found.calls["layers.3"].names == ("hidden", "mask")


def test_frozen_input_of_the_first_layer_tells_it_apart() -> None:
    """Frozen embedding: the first layer's input needs no gradient, the others' do (pytorch#141039)."""
    model = Language(Layer(), Layer(), Layer())
    model.embed.weight.requires_grad_(False)
    assert groups(model) == [["layers.0"], ["layers.1", "layers.2"]]


def test_nested_tensors_and_constants_come_back_as_they_were() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(WIDTH, WIDTH)

        def forward(self, hidden: Tensor, sources: list[Tensor], pair: dict[str, Tensor]) -> dict[str, Any]:
            return {
                "hidden": self.proj(hidden) + pair["a"],
                "sources": [*sources, hidden],
                "kind": "pair",
                "none": None,
            }

    class Model(Language):
        def hidden(self, input_ids: Tensor) -> Tensor:
            hidden = self.embed(input_ids)
            first = self.layers[0](hidden, [hidden], {"a": hidden})
            assert first["kind"] == "pair"
            assert first["none"] is None
            return self.layers[1](first["hidden"], first["sources"], {"a": hidden})["hidden"]

    found = probed(Model(Pair(), Pair()))
    call = found.calls["layers.1"]
    assert call.names == ("hidden", "sources_0", "sources_1", "pair")
    args, kwargs, around = call.arguments(call.inputs)
    assert (len(args), len(args[1]), list(args[2]), kwargs, around) == (3, 2, ["a"], {}, {})
    rebuilt = call.result(list(call.outputs))
    assert rebuilt["kind"] == "pair"
    assert rebuilt["sources"][2] is call.outputs[3]


def test_a_module_called_twice_is_left_alone() -> None:
    shared = Layer()
    assert reasons(Language(shared, Layer(), shared))["layers.0"] == "it is called more than once in a forward pass"
    assert groups(Language(shared, Layer(), shared)) == [["layers.1"]]


def test_a_tensor_from_outside_is_a_reason() -> None:
    class Peeking(Layer):
        outside: list[Tensor]

        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden) + self.outside[0]

    class Model(Language):
        def hidden(self, input_ids: Tensor) -> Tensor:
            Peeking.outside = [self.embed.weight[0]]
            return super().hidden(input_ids)

    found = reasons(Model(Peeking(), Peeking()))
    assert set(found) == {"layers.0", "layers.1"}
    assert "uses a tensor of shape (8,) from outside the layer" in found["layers.0"]


def test_writing_into_an_input_is_a_reason() -> None:
    class Writing(Layer):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden.add_(1.0))

    assert "writes into an input of the layer" in reasons(Language(Writing(), Writing()))["layers.1"]


def test_results_that_are_no_tensors_are_reasons() -> None:
    class Odd(Layer):
        def __init__(self, result: Any) -> None:
            super().__init__()
            self.result = result

        def forward(self, hidden: Tensor) -> Any:
            return self.result

    class Model(Language):
        def hidden(self, input_ids: Tensor) -> Tensor:
            for layer in self.layers:
                layer(self.embed(input_ids))
            return self.embed(input_ids)

    found = reasons(Model(Odd(object()), Odd(None)))
    assert found["layers.0"] == "it takes or returns a object, which is not a tensor or a plain constant"
    assert found["layers.1"] == "it returns no tensor"


def test_written_buffers_are_noted() -> None:
    class Counting(Layer):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
            self.register_buffer("fixed", torch.ones(WIDTH))

        def forward(self, hidden: Tensor) -> Tensor:
            self.seen.add_(hidden.shape[0])
            return super().forward(hidden * self.fixed)

    found = probed(Language(Counting(), Counting()))
    assert [call.mutated for call in found.calls.values()] == [("seen",), ("seen",)]


def test_ambient_tensors_become_inputs_of_the_layers_that_read_them() -> None:
    class Reading(Layer):
        def __init__(self, reads: bool) -> None:
            super().__init__()
            self.reads = reads

        def forward(self, hidden: Tensor) -> Tensor:
            documents = ambient("document_ids") if self.reads else None
            return super().forward(hidden) if documents is None else super().forward(hidden) * documents.unsqueeze(-1)

    model = Language(Reading(True), Reading(False), Reading(True))
    found = probed(model, document_ids=torch.ones(2, 6, dtype=torch.int64), other=torch.ones(1))
    assert [call.names for call in found.calls.values()] == [
        ("hidden", "document_ids"),
        ("hidden",),
        ("hidden", "document_ids"),
    ]
    assert [call.ambient for call in found.calls.values()] == [("document_ids",), (), ("document_ids",)]
    assert groups(model, document_ids=torch.ones(2, 6)) == [["layers.0", "layers.2"], ["layers.1"]]
    _, _, around = found.calls["layers.0"].arguments(found.calls["layers.0"].inputs)
    assert list(around) == ["document_ids"]


def test_weights_tied_inside_a_layer_tell_it_apart() -> None:
    tied = Layer()
    tied.up.weight = tied.gate.weight
    assert groups(Language(Layer(), tied, Layer())) == [["layers.0", "layers.2"], ["layers.1"]]


def test_weights_and_inputs_shared_between_layers_do_not_tell_them_apart() -> None:
    class Masked(Layer):
        def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(hidden) * mask

    class Model(Language):
        def hidden(self, input_ids: Tensor) -> Tensor:
            hidden, mask = self.embed(input_ids), (input_ids > 2).unsqueeze(-1)
            for layer in self.layers:
                hidden = layer(hidden, mask)
            return hidden

    model = Model(Masked(), Masked(), Masked())
    model.layers[2].gate.weight = model.layers[0].gate.weight
    assert groups(model) == [["layers.0", "layers.1", "layers.2"]]


def test_probing_changes_nothing() -> None:
    class Counting(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, hidden: Tensor) -> Tensor:
            self.seen.add_(1)
            return super().forward(hidden)

    model = Language(Counting(), Counting())
    before = copy.deepcopy(model.state_dict())
    weight = model.layers[0].gate.weight
    own_forward = model.layers[1].forward = model.layers[1].forward  # type: ignore[method-assign]
    probed(model)
    assert model.layers[0].gate.weight is weight
    assert "forward" not in vars(model.layers[0])
    assert model.layers[1].forward is own_forward
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.embed.num_embeddings == VOCABULARY
