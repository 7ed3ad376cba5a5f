"""Small configurations and comparisons shared by the tests of the Kimi K3 family."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from moec.models.build import build
from moec.models.k3.config import K3Config
from moec.models.k3.model import K3Model

SMALL = K3Config(
    vocab_size=40,
    hidden_size=24,
    layers=5,
    full_attention_layers=(3, 5),
    residual_block=2,
    kda_heads=2,
    kda_head_dim=8,
    decay_rank=6,
    heads=3,
    q_rank=10,
    kv_rank=12,
    nope_dim=6,
    rope_dim=4,
    value_dim=5,
    indexer_heads=12,  # with few heads, relu often gives scores of exactly 0, and ties may be broken either way
    indexer_dim=6,
    indexer_top_k=4,
    kv_heads=1,
    head_dim=8,
    dense_layers=1,
    dense_size=20,
    experts=6,
    top_k=2,
    expert_size=9,
    latent_size=10,
    shared_size=7,
    image_token=39,
    init_std=0.3,
)


def small(**changes: Any) -> K3Config:
    return dataclasses.replace(SMALL, **changes)


def kimi_linear_small(**changes: Any) -> K3Config:
    return small(
        residual_block=0,
        kda_decay="softplus",
        kda_output_gate="low_rank",
        q_rank=0,
        attention_gate=False,
        activation="silu",
        latent_size=0,
        routed_scale=2.446,
        checkpoint_names="kimi_linear",
        **changes,
    )


def random_model(config: K3Config, dtype: torch.dtype = torch.float64, seed: int = 0) -> K3Model:
    """A model whose every parameter and bias is random: nothing hides behind a zero or a one of initialisation."""
    torch.manual_seed(seed)
    model = build(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.4)
        for router in model.routers().values():
            router.correction_bias.normal_(std=0.1)
    return model


def random_module(module: torch.nn.Module, seed: int = 0, std: float = 0.4) -> Any:
    """The module in float64 with random parameters."""
    torch.manual_seed(seed)
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=std)
    return module


def documents(*lengths: int) -> Tensor:
    """document_ids [1, T] of one row."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).unsqueeze(0)


def assert_close(got: Tensor, wanted: Tensor, tolerance: float = 1e-10) -> None:
    """Relative error of the whole tensor; exact where the wanted one is zero."""
    assert got.shape == wanted.shape
    scale = wanted.norm().item()
    error = (got - wanted).norm().item()
    assert error <= tolerance * scale, f"relative error {error / scale if scale else error:.2e}"


def assert_same_gradients(got: Tensor, wanted: Tensor, tensors: list[Tensor], tolerance: float = 1e-9) -> None:
    """Both outputs have the same gradient with respect to each tensor, for one random cotangent."""
    torch.manual_seed(7)
    cotangent = torch.randn_like(got)
    first = torch.autograd.grad(got, tensors, cotangent, retain_graph=True)
    second = torch.autograd.grad(wanted, tensors, cotangent, retain_graph=True)
    for one, two in zip(first, second, strict=True):
        assert_close(one, two, tolerance)
