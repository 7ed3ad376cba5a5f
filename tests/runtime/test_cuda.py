"""The same state, optimizer and checkpoints with the weights on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from moec.compiler.errors import NonFiniteError
from moec.runtime import StepState, adamw, clip_gradients, load_checkpoint, save_checkpoint

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
SETTINGS = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def _model(dtype: torch.dtype, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(65, 33), nn.Linear(33, 7)).to(DEVICE, dtype)


def _trained(dtype: torch.dtype, steps: int = 3) -> tuple[nn.Module, StepState, nn.Module]:
    """A model after a few steps of ours, its state, and a float32 copy after the same steps of torch."""
    ours, theirs = _model(dtype), _model(dtype).float()
    state = StepState.from_module(ours)
    reference = torch.optim.AdamW(theirs.parameters(), fused=True, **SETTINGS)
    for _ in range(steps):
        state.clear_gradients()
        for path, weight in theirs.named_parameters():
            weight.grad = torch.randn_like(weight).to(dtype).float()
            state.accumulate(path, weight.grad.to(dtype))
        norm = clip_gradients(state, 1.0)
        assert norm.device.type == "cuda"
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0))
        adamw(state, state.trainable, **SETTINGS)
        reference.step()
        state.step += 1
    return ours, state, theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_those_of_torch(dtype: torch.dtype) -> None:
    ours, state, theirs = _trained(dtype)
    for path, weight in theirs.named_parameters():
        torch.testing.assert_close(state.masters.get(path, ours.get_parameter(path)), weight, rtol=1e-6, atol=1e-7)
        if path in state.masters:
            assert torch.equal(ours.get_parameter(path), state.masters[path].to(dtype))


def test_a_checkpoint_gives_back_the_bits_and_the_random_state(tmp_path: Path) -> None:
    _, state, _ = _trained(torch.bfloat16)
    path = save_checkpoint(tmp_path, state, fingerprint={})
    expected = torch.rand(5, device=DEVICE)
    loaded = StepState.from_module(_model(torch.bfloat16, seed=9))
    load_checkpoint(path, loaded, fingerprint={})
    assert torch.equal(torch.rand(5, device=DEVICE), expected)
    found = loaded.tensors()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.tensors().items())
    assert all(tensor.device.type == "cuda" for tensor in found.values())


def test_a_gradient_that_is_not_finite_stops_the_step() -> None:
    _, state, _ = _trained(torch.bfloat16)
    state.gradients["1.weight"][2, 3] = float("inf")
    with pytest.raises(NonFiniteError, match=r"gradients of 1\.weight"):
        clip_gradients(state, 1.0)
