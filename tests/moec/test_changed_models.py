"""A model that its caller changes between steps: the step follows it, or refuses it by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moec
from moec import runtime
from moec.compiler.errors import ArtifactError, ModelChangedError, UnsupportedModelError
from moec.compiler.plan import OptimizerPlan, Plan
from moec.step import CompiledStep

from ..spine import VOCABULARY, WIDTH, Language, Layer, adamw_groups, batch_for, distance, eager, seeded, step_beside

PLAN = Plan(batch=2, length=6, optimizer=OptimizerPlan(lr=1e-2, schedule="constant"))


class Scaled(Layer):
    """Scales by a buffer, and has a dropout that does nothing but have a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.linspace(0.5, 2, WIDTH))
        self.drop = nn.Dropout(0.0)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.drop(super().forward(hidden * self.factor))


def make(tied: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    return seeded(lambda: Language(Scaled(), Scaled(), tied=tied)).to(dtype)


Programs = Callable[..., CompiledStep]


@pytest.fixture(scope="module")
def programs() -> Programs:
    """A step over a model of `make`; each kind of program is compiled once."""
    compiled: dict[tuple[bool, torch.dtype], CompiledStep] = {}

    def over(model: Any) -> CompiledStep:
        kind = model.head.weight is model.embed.weight, model.head.weight.dtype
        if kind not in compiled:
            compiled[kind] = moec.compile(make(*kind), PLAN)
        first = compiled[kind]
        state = runtime.StepState.from_module(model)
        step = CompiledStep.of(first.program, state, first.folder, first.log, PLAN)
        step(batch_for(PLAN, 3))
        return step

    return over


def other_values(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(9)
    return {
        name: (torch.randn(value.shape, generator=generator) * 0.4).to(value.dtype)
        for name, value in model.state_dict().items()
    }


def assign_all(model: Any) -> None:
    model.load_state_dict(other_values(model), assign=True)


def new_parameter(model: Any) -> None:
    model.layers[1].up.weight = nn.Parameter(other_values(model)["layers.1.up.weight"])


def data_elsewhere(model: Any) -> None:
    model.head.weight.data = other_values(model)["head.weight"]


def data_in_another_order(model: Any) -> None:
    model.head.weight.data = other_values(model)["head.weight"].t().contiguous().t()


def every_second_column(model: Any) -> None:
    model.head.weight.data = torch.randn(VOCABULARY, 2 * WIDTH).to(model.head.weight)[:, ::2] * 0.3


def transposed_in_place(model: Any) -> None:
    with torch.no_grad():
        model.layers[0].gate.weight.t_()


def new_buffer(model: Any) -> None:
    model.layers[0].factor = torch.linspace(2, -1, WIDTH).to(model.layers[0].factor)


def buffer_elsewhere(model: Any) -> None:
    model.layers[1].factor.data = torch.linspace(2, -1, WIDTH)


def new_shared_parameter(model: Any) -> None:
    model.head.weight = model.embed.weight = nn.Parameter(other_values(model)["embed.weight"])


FOLLOWED = [
    assign_all,
    new_parameter,
    data_elsewhere,
    data_in_another_order,
    every_second_column,
    transposed_in_place,
    new_buffer,
    buffer_elsewhere,
]


@pytest.mark.parametrize("change", FOLLOWED, ids=lambda change: change.__name__)
def test_tensors_that_the_model_holds_now_are_used_and_trained(programs: Programs, change: Any) -> None:
    model = make()
    step = programs(model)
    change(model)
    follows(step, model)


def test_both_names_of_a_tied_weight_may_get_another(programs: Programs) -> None:
    model = make(tied=True)
    step = programs(model)
    new_shared_parameter(model)
    follows(step, model)


def follows(step: CompiledStep, model: Any) -> None:
    """Loss, gradients and two updates are those of eager with the present tensors and the moments of the run."""
    twin, batch = copy.deepcopy(model), batch_for(PLAN, 4)
    loss, gradients = eager(twin, batch)
    assert distance(step.loss(batch)["lm_loss"], loss) <= 1e-6
    found = step.gradients(batch)
    assert all(distance(found[name], wanted) <= 1e-5 for name, wanted in gradients.items() if name in found)
    moments = {name: step.state.exp_avg[name].clone() for name in step.state.trainable}
    squares = {name: step.state.exp_avg_sq[name].clone() for name in step.state.trainable}
    optimizer = _adamw(twin, moments, squares, updates=1)
    step_beside(step, twin, optimizer, PLAN, (5, 6))
    trained = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        assert distance(parameter, trained[name]) <= 1e-5, name
        assert step.state.weights[name] is parameter


def _adamw(model: nn.Module, moments: Any, squares: Any, updates: int) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(adamw_groups(model), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    for name, parameter in model.named_parameters():
        step = torch.tensor(float(updates))
        optimizer.state[parameter] = {"step": step, "exp_avg": moments[name], "exp_avg_sq": squares[name]}
    return optimizer


def test_only_the_masters_of_weights_that_moved_are_read_again(programs: Programs) -> None:
    """A master holds what the rounding of its weight has lost."""
    model = make(dtype=torch.bfloat16)
    step = programs(model)
    before = {name: master.clone() for name, master in step.state.masters.items()}
    new_buffer(model)
    model.layers[1].up.weight = nn.Parameter(other_values(model)["layers.1.up.weight"])
    step.loss(batch_for(PLAN))
    masters = step.state.masters
    assert torch.equal(masters["layers.1.up.weight"], model.layers[1].up.weight.float())
    assert all(torch.equal(masters[name], value) for name, value in before.items() if name != "layers.1.up.weight")
    assert not torch.equal(masters["head.weight"], model.head.weight.float())


def convert(model: Any) -> None:
    model.to(torch.float64)


def another_shape(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.randn(VOCABULARY + 1, WIDTH))


def data_of_another_shape(model: Any) -> None:
    model.layers[0].factor.data = torch.ones(1)


def rows_of_the_same_memory(model: Any) -> None:
    model.head.weight.data = model.head.weight.data[:5]


def freeze(model: Any) -> None:
    model.layers[1].up.weight.requires_grad_(False)


def tie(model: Any) -> None:
    model.head.weight = model.embed.weight


def tie_memory(model: Any) -> None:
    model.head.weight.data = model.embed.weight.data


def delete(model: Any) -> None:
    del model.layers[0].norm.bias


def set_to_none(model: Any) -> None:
    model.layers[0].norm.bias = None


def add_parameter(model: Any) -> None:
    model.layers[0].drop.extra = nn.Parameter(torch.randn(3))


def add_buffer(model: Any) -> None:
    model.layers[0].drop.register_buffer("extra", torch.randn(3))


def replace_module(model: Any) -> None:
    model.layers[0] = copy.deepcopy(model.layers[0])


def replace_module_without_tensors(model: Any) -> None:
    model.layers[1].drop = nn.Identity()


def append_layer(model: Any) -> None:
    model.layers.append(Scaled())


def evaluate(model: Any) -> None:
    model.eval()


def evaluate_a_part(model: Any) -> None:
    model.layers[1].drop.eval()


def to_meta(model: Any) -> None:
    model.head.weight = nn.Parameter(model.head.weight.to("meta"))


def expand(model: Any) -> None:
    model.head.weight.data = torch.randn(1, WIDTH).expand(VOCABULARY, WIDTH)


REFUSED = [
    (convert, "parameter embed.weight was float32, now it is float64"),
    (another_shape, "parameter head.weight was of shape [16, 8], now it is of shape [17, 8]"),
    (data_of_another_shape, "buffer layers.0.factor was of shape [8], now it is of shape [1]"),
    (rows_of_the_same_memory, "parameter head.weight was of shape [16, 8], now it is of shape [5, 8]"),
    (freeze, "parameter layers.1.up.weight requires no gradient, and did"),
    (tie, "head.weight is tied to embed.weight now, and was not"),
    (delete, "parameter layers.0.norm.bias was removed"),
    (set_to_none, "parameter layers.0.norm.bias was removed"),
    (add_parameter, "parameter layers.0.drop.extra was added"),
    (add_buffer, "buffer layers.0.drop.extra was added"),
    (replace_module, "module layers.0 was replaced"),
    (replace_module_without_tensors, "module layers.1.drop was replaced"),
    (append_layer, "module layers.2 was added"),
    (evaluate, "the model is in evaluation mode"),
    (evaluate_a_part, "module layers.1.drop is in evaluation mode"),
    (to_meta, "parameter head.weight was on cpu, now it is on meta"),
]


@pytest.mark.parametrize(("change", "says"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_the_program_does_not_fit_is_refused(programs: Programs, change: Any, says: str) -> None:
    model = make()
    step, batch = programs(model), batch_for(PLAN)
    before = {name: value.clone() for name, value in step.state.tensors().items()}
    change(model)
    for query in (step, step.loss, step.gradients):
        with pytest.raises(ModelChangedError) as caught:
            query(batch)
        assert caught.value.what == says
        assert "compile the model again" in caught.value.hint
    assert step.state.step == 1
    weights = {name: value for name, value in step.state.tensors().items() if name.startswith("exp_avg")}
    assert all(torch.equal(value, before[name]) for name, value in weights.items())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (tie_memory, "parameter embed.weight and parameter head.weight share memory"),
        (expand, "elements of parameter head.weight share memory with each other"),
    ],
)
def test_memory_that_cannot_be_updated_is_refused(programs: Programs, change: Any, says: str) -> None:
    model = make()
    step = programs(model)
    change(model)
    with pytest.raises(UnsupportedModelError, match=says):
        step(batch_for(PLAN))


def test_untied_weights_are_refused(programs: Programs) -> None:
    """As load_state_dict(assign=True) leaves them, which assigns a tensor to each name."""
    model = make(tied=True)
    step = programs(model)
    assign_all(model)
    assert model.head.weight is not model.embed.weight
    with pytest.raises(ModelChangedError) as caught:
        step(batch_for(PLAN))
    assert caught.value.what == "head.weight was tied to embed.weight, and is a tensor of its own now"
    assert "hold the same object again" in caught.value.hint
    model.head.weight = model.embed.weight
    follows(step, model)


def test_a_frozen_weight_that_is_to_be_trained_is_refused() -> None:
    model = make()
    model.head.weight.requires_grad_(False)
    step = moec.compile(model, PLAN)
    model.head.weight.requires_grad_(True)
    with pytest.raises(ModelChangedError, match=r"parameter head.weight requires a gradient, and did not"):
        step(batch_for(PLAN))
    model.head.weight.requires_grad_(False)
    step(batch_for(PLAN))


def test_a_change_that_is_undone_is_none(programs: Programs) -> None:
    model = make()
    step, batch = programs(model), batch_for(PLAN)
    model.eval()
    with pytest.raises(ModelChangedError):
        step(batch)
    model.train()
    layer = model.layers[0]
    model.layers[0] = copy.deepcopy(layer)
    with pytest.raises(ModelChangedError, match=r"layers\.0 was replaced"):
        step(batch)
    model.layers[0] = layer
    follows(step, model)


def test_an_artefact_is_loaded_for_the_modes_it_was_compiled_for(programs: Programs) -> None:
    model = make()
    folder = programs(model).folder
    model.layers[0].drop.eval()
    with pytest.raises(ArtifactError, match=r"(?s)the mode of layers.0.drop differs.*compiled for 'training'"):
        moec.load(folder, model)
    moec.load(folder, model.train())


def test_a_part_in_evaluation_mode_stays_there() -> None:
    model = make()
    model.layers[1].drop.eval()
    step = moec.compile(model, PLAN)
    moec.load(step.folder, model)
    step(batch_for(PLAN))
    model.train()
    with pytest.raises(ModelChangedError) as caught:
        step(batch_for(PLAN))
    assert caught.value.what == "module layers.1.drop is in training mode"
    assert "call layers.1.drop.eval()" in caught.value.hint
