"""Clipping, AdamW and parameter groups against torch's own, and what stays untouched when a gradient is not finite."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from moec.compiler.errors import NonFiniteError
from moec.runtime import StepState, adamw, clip_gradients, parameter_groups

SETTINGS = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def _gradients(model: nn.Module, step: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    torch.manual_seed(100 + step)
    return {path: torch.randn(weight.shape) * scale for path, weight in model.named_parameters()}


def _same(left: nn.Module, right: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_five_steps_are_those_of_torch(dtype: torch.dtype) -> None:
    ours, theirs = _model(dtype), _model(dtype)
    state = StepState.from_module(ours)
    reference = torch.optim.AdamW(theirs.parameters(), fused=True, **SETTINGS)
    for step in range(5):
        state.clear_gradients()
        for path, gradient in _gradients(ours, step).items():
            state.accumulate(path, gradient.to(dtype))
            theirs.get_parameter(path).grad = gradient.to(dtype)
        adamw(state, state.trainable, **SETTINGS)
        reference.step()
    assert _same(ours, theirs)
    slot = reference.state[theirs.get_parameter("0.weight")]
    assert torch.equal(state.exp_avg["0.weight"], slot["exp_avg"])
    assert torch.equal(state.exp_avg_sq["0.weight"], slot["exp_avg_sq"])
    assert state.updates["0.weight"] == 5


def test_bfloat16_weights_are_the_rounded_copies_of_their_masters() -> None:
    ours, theirs = _model(torch.bfloat16), _model(torch.bfloat16).float()
    state = StepState.from_module(ours)
    reference = torch.optim.AdamW(theirs.parameters(), fused=True, **{**SETTINGS, "lr": 1e-4})
    start = copy.deepcopy(ours)
    for step in range(20):
        state.clear_gradients()
        for path, gradient in _gradients(ours, step).items():
            state.accumulate(path, gradient.bfloat16())
            theirs.get_parameter(path).grad = gradient.bfloat16().float()
        adamw(state, state.trainable, **{**SETTINGS, "lr": 1e-4})
        reference.step()
    for path, weight in theirs.named_parameters():
        assert torch.equal(state.masters[path], weight)
        assert torch.equal(ours.get_parameter(path), weight.bfloat16())
    assert not _same(start, ours)


def test_a_parameter_without_gradient_is_not_even_decayed_and_counts_its_own_steps() -> None:
    ours, theirs = _model(), _model()
    state = StepState.from_module(ours)
    reference = torch.optim.AdamW(theirs.parameters(), fused=True, **SETTINGS)
    untouched = ours.get_parameter("2.weight").clone()
    for step in range(4):
        state.clear_gradients()
        reference.zero_grad()
        for path, gradient in _gradients(ours, step).items():
            if path != "2.weight" or step == 3:
                state.accumulate(path, gradient)
                theirs.get_parameter(path).grad = gradient
        adamw(state, state.trainable, **SETTINGS)
        reference.step()
        if step == 2:
            assert torch.equal(ours.get_parameter("2.weight"), untouched)
    assert _same(ours, theirs)
    assert state.updates == {"0.weight": 4, "0.bias": 4, "2.weight": 1, "2.bias": 4}


def test_accumulated_microbatches_equal_one_batch() -> None:
    """Microbatches with 3, 11, 0 and 16 valid rows against all 30 at once (cases.md: token counts per microbatch)."""
    torch.manual_seed(0)
    rows, targets = torch.randn(30, 5), torch.randn(30, 3)
    states = []
    for parts in ([30], [3, 11, 0, 16]):
        model = _model()
        state = StepState.from_module(model)
        for inputs, wanted in zip(rows.split(parts), targets.split(parts), strict=True):
            loss = (model(inputs) - wanted).pow(2).sum() / 30
            grads = torch.autograd.grad(loss, list(model.parameters()))
            for path, gradient in zip(state.trainable, grads, strict=True):
                state.accumulate(path, gradient)
        states.append(state)
    whole, split = states
    for path in whole.trainable:
        torch.testing.assert_close(split.gradients[path], whole.gradients[path], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_clipping_is_that_of_torch_below_and_above_the_limit(scale: float) -> None:
    model = _model()
    state = StepState.from_module(model)
    for path, gradient in _gradients(model, 0, scale).items():
        state.accumulate(path, gradient)
        model.get_parameter(path).grad = gradient.clone()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    norm = clip_gradients(state, 1.0)
    assert torch.equal(norm, expected)
    for path, gradient in state.gradients.items():
        assert torch.equal(gradient, model.get_parameter(path).grad)
    after = clip_gradients(state, None)
    assert after == (norm if scale == 1e-3 else pytest.approx(1.0, abs=1e-4))


def test_no_limit_measures_only_and_no_gradient_has_norm_zero() -> None:
    state = StepState.from_module(_model())
    assert clip_gradients(state, 1.0) == 0
    state.accumulate("2.bias", torch.tensor([3.0, 0.0, 4.0]))
    assert clip_gradients(state, None) == 5
    assert state.gradients["2.bias"].tolist() == [3, 0, 4]


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_stops_the_step_before_any_change(poison: float) -> None:
    model = _model(torch.bfloat16)
    state = StepState.from_module(model)
    state.step = 6
    for path, gradient in _gradients(model, 0).items():
        state.accumulate(path, gradient)
    state.gradients["2.weight"][1, 2] = poison
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    with pytest.raises(NonFiniteError) as caught:
        clip_gradients(state, 1.0)
    assert "step 7: the global gradient norm is" in str(caught.value)
    assert "where: gradients of 2.weight" in str(caught.value)
    assert "no weight was changed" in str(caught.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in state.tensors().items())


def test_many_bad_gradients_are_counted_and_an_overflow_is_told_apart() -> None:
    state = StepState.from_module(_model())
    for path in state.trainable:
        state.accumulate(path, torch.full_like(state.weights[path], float("nan")))
    with pytest.raises(NonFiniteError, match=r"gradients of 0\.weight, 0\.bias, 2\.weight and 1 more"):
        clip_gradients(state, 1.0)
    state.clear_gradients()
    state.accumulate("2.bias", torch.full((3,), 1e30))
    with pytest.raises(NonFiniteError, match="every gradient is finite"):
        clip_gradients(state, 1.0)


def test_groups_by_shape_and_name() -> None:
    shapes = {
        "embed.weight": (9, 4),
        "layers.0.q_proj.weight": (4, 4),
        "layers.0.conv.in_proj.weight": (4, 4),
        "layers.0.experts.gate_up_proj": (2, 4, 4),
        "layers.0.router.weight": (2, 4),
        "layers.0.norm.weight": (4,),
        "layers.0.q_proj.bias": (4,),
        "layers.0.experts.gate_up_proj_bias": (2, 4),
        "layers.0.A_log": (1, 1, 4, 1),
        "layers.0.dt_bias": (2, 2),
        "layers.0.q_conv1d.weight": (4, 1, 4),
        "layers.0.q_conv.weight": (4, 4),
        "layers.0.conv.conv.weight": (4, 1, 3),
        "layers.0.self_attention_res_proj.weight": (1, 4),
        "layers.0.mlp_res_norm.weight": (4,),
        "output_attn_res_proj.weight": (1, 4),
    }
    weights = {path: nn.Parameter(torch.zeros(shape)) for path, shape in shapes.items()}
    groups = parameter_groups(StepState(dict(weights), {}, tuple(weights)))
    assert groups["decay"] == list(shapes)[:5]
    assert groups["no_decay"] == list(shapes)[5:]
