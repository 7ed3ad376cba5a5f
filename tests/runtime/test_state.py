"""The state shares the caller's tensors, sums gradients in float32 and knows tied, frozen and left-out parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moec.compiler.errors import ArtifactError, UnsupportedModelError
from moec.runtime import StepState
from tests.runtime.toy import ToyModel


def test_weights_and_buffers_are_the_callers_own() -> None:
    model = ToyModel()
    state = StepState.from_module(model)
    assert state.weights["mix.weight"] is model.mix.weight
    assert state.buffers["seen"] is model.seen
    assert state.derived_buffers == {"scale"}
    assert state.trainable == ("embed.weight", "mix.weight", "mix.bias", "head.weight")


def test_a_low_precision_weight_has_a_float32_master_and_others_have_none() -> None:
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False, dtype=dtype) for dtype in dtypes))
    state = StepState.from_module(model)
    assert set(state.masters) == {"0.weight", "1.weight"}
    assert state.masters["0.weight"].dtype == torch.float32
    assert torch.equal(state.masters["0.weight"].bfloat16(), model[0].weight)
    assert [state.exp_avg[f"{i}.weight"].dtype for i in range(4)] == [torch.float32] * 3 + [torch.float64]


def test_masters_follow_weights_that_were_loaded_later() -> None:
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    state = StepState.from_module(model)
    with torch.no_grad():
        model.weight.fill_(3)
    assert not torch.equal(state.masters["weight"], torch.full((2, 2), 3.0))
    state.refresh_masters()
    assert torch.equal(state.masters["weight"], torch.full((2, 2), 3.0))


def test_a_tied_weight_has_one_owner_one_sum_and_one_state() -> None:
    model = ToyModel(tied=True)
    state = StepState.from_module(model)
    assert state.aliases == {"head.weight": "embed.weight"}
    assert state.weights["head.weight"] is state.weights["embed.weight"]
    assert "head.weight" not in state.trainable
    assert "head.weight" not in state.exp_avg
    ones = torch.ones_like(model.embed.weight)
    state.accumulate("head.weight", ones)
    state.accumulate("embed.weight", ones)
    assert list(state.gradients) == ["embed.weight"]
    assert torch.equal(state.gradients["embed.weight"], 2 * ones)
    assert not any(name.endswith("head.weight") for name in state.tensors())


def test_gradients_of_bfloat16_weights_are_summed_in_float32() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    state = StepState.from_module(model)
    state.accumulate("weight", torch.ones(1, 1, dtype=torch.bfloat16))
    for _ in range(100):
        state.accumulate("weight", torch.full((1, 1), 2.0**-9, dtype=torch.bfloat16))
    assert state.gradients["weight"].item() == 1 + 100 * 2.0**-9  # a bfloat16 sum would have stayed at 1


def test_the_first_gradient_is_copied() -> None:
    state = StepState.from_module(nn.Linear(3, 3))
    shared = torch.ones(3, 3)
    state.accumulate("weight", shared)
    state.accumulate("weight", shared)
    assert torch.equal(shared, torch.ones(3, 3))
    expanded = torch.ones(1).expand(3)
    state.accumulate("bias", expanded)
    state.accumulate("bias", torch.tensor([0.0, 1.0, 2.0]))
    assert state.gradients["bias"].tolist() == [1, 2, 3]


def test_frozen_and_left_out_parameters_are_not_trained() -> None:
    model = ToyModel()
    model.mix.weight.requires_grad_(False)
    state = StepState.from_module(model, without_gradient=["mix.bias"])
    assert state.trainable == ("embed.weight", "head.weight")
    for path in ("mix.weight", "mix.bias", "nothing"):
        with pytest.raises(ArtifactError, match=f"a gradient arrived for {path}, which is not trained"):
            state.accumulate(path, torch.zeros(8))


def test_a_gradient_of_the_wrong_shape_names_the_weight() -> None:
    state = StepState.from_module(nn.Linear(3, 2))
    with pytest.raises(ArtifactError, match=r"the gradient of weight has shape \[3, 2\], the weight has \[2, 3\]"):
        state.accumulate("weight", torch.zeros(3, 2))


def test_a_left_out_path_must_exist() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"indexer\.weight is listed as without gradient, but is no parameter"
    ):
        StepState.from_module(nn.Linear(2, 2), without_gradient=["indexer.weight"])


def test_parameters_on_the_meta_device_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="parameter weight has no data"):
        StepState.from_module(nn.Linear(2, 2, device="meta"))


def test_different_parameters_over_one_memory_are_refused() -> None:
    model = ToyModel()
    model.head.weight.data = model.embed.weight.data
    with pytest.raises(
        UnsupportedModelError, match=r"parameter (embed|head).weight and parameter (embed|head).weight share memory"
    ):
        StepState.from_module(model)


def test_neighbours_in_one_memory_are_no_ties() -> None:
    base = torch.randn(2, 4)
    model = nn.ParameterDict({"first": nn.Parameter(base[0]), "second": nn.Parameter(base[1])})
    assert StepState.from_module(model).trainable == ("first", "second")
