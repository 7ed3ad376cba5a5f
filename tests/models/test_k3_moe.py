"""Stable LatentMoE: the layer against an explicit loop, its invariants, and quantile balancing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moec.models.k3.config import K3Config
from moec.models.k3.mlp import GatedActivation
from moec.models.k3.moe import LatentMoE
from moec.models.k3.router import BINS, Router
from tests.models.k3_small import assert_close, assert_same_gradients, kimi_linear_small, random_module, small


def situ(g: Tensor, u: Tensor) -> Tensor:
    return 4 * torch.tanh(g / 4) / (1 + torch.exp(-g)) * 25 * torch.tanh(u / 25)


def silu(g: Tensor, u: Tensor) -> Tensor:
    return g / (1 + torch.exp(-g)) * u


def reference(moe: LatentMoE, x: Tensor, config: K3Config) -> Tensor:
    """Token by token and expert by expert; x [N, D]."""
    act, router, size = situ if config.activation == "situ" else silu, moe.router, config.expert_size
    out = []
    for token in x:
        s = torch.sigmoid(router.weight @ token)
        chosen = sorted(range(config.experts), key=lambda e, s=s: -(s[e] + router.correction_bias[e]).item())
        chosen = chosen[: config.top_k]
        total = sum(s[e] for e in chosen)
        z = moe.latent_down_proj.weight @ token if config.latent_size else token
        u = torch.zeros_like(z)
        for e in chosen:
            gate, up = moe.experts.gate_up[e, :size] @ z, moe.experts.gate_up[e, size:] @ z
            u = u + config.routed_scale * s[e] / total * (moe.experts.down[e] @ act(gate, up))
        if config.latent_size:
            normed = u / torch.sqrt((u * u).mean() + 1e-5) * moe.latent_norm.weight
            u = moe.latent_up_proj.weight @ normed
        shared = moe.shared
        out.append(u + shared.down_proj.weight @ act(shared.gate_proj.weight @ token, shared.up_proj.weight @ token))
    return torch.stack(out)


def _moe(config: K3Config, seed: int = 0) -> Any:
    moe = random_module(LatentMoE(config), seed)
    moe.router.correction_bias.normal_(std=0.2)
    return moe


@pytest.mark.parametrize("config", [small(), kimi_linear_small()], ids=["latent situ", "plain silu"])
def test_equals_loop(config: K3Config) -> None:
    moe = _moe(config)
    x = torch.randn(2, 8, 24, dtype=torch.float64, requires_grad=True)
    got, wanted = moe(x), reference(moe, x.flatten(0, 1), config).view_as(x)
    assert_close(got, wanted)
    assert_same_gradients(got, wanted, [x, *moe.parameters()])


def test_unchosen_experts_get_no_gradient() -> None:
    moe = _moe(small())
    moe.router.correction_bias[:2] = 100.0
    moe(torch.randn(1, 8, 24, dtype=torch.float64)).sum().backward()
    assert moe.experts.gate_up.grad[:2].abs().sum(dim=(1, 2)).min() > 0
    assert moe.experts.gate_up.grad[2:].abs().max() == 0


def test_equal_experts_make_weights_irrelevant() -> None:
    config = small(top_k=6, balancing=False)
    moe = _moe(config)
    with torch.no_grad():
        moe.experts.gate_up.copy_(moe.experts.gate_up[:1].clone().expand_as(moe.experts.gate_up))
        moe.experts.down.copy_(moe.experts.down[:1].clone().expand_as(moe.experts.down))
    x = torch.randn(1, 8, 24, dtype=torch.float64)
    before = moe(x)
    torch.nn.init.normal_(moe.router.weight)
    assert_close(moe(x), before)


def test_bias_shift_changes_nothing() -> None:
    moe = _moe(small())
    x = torch.randn(1, 16, 24, dtype=torch.float64)
    before = moe(x)
    moe.router.correction_bias += 3.0
    assert torch.equal(moe(x), before)


def test_norm_comes_after_the_sum() -> None:
    """Scaling all down matrices changes the routed branch only through eps."""
    moe = _moe(small(norm_eps=1e-12))
    moe.shared = None
    x = torch.randn(1, 8, 24, dtype=torch.float64)
    before = moe(x)
    with torch.no_grad():
        moe.experts.down.mul_(3.0)
    assert_close(moe(x), before, 1e-9)


def test_situ_is_bounded_and_tends_to_swiglu() -> None:
    g, u = torch.randn(2, 1000, dtype=torch.float64).mul(50).unbind()
    assert GatedActivation(small())(g, u).abs().max() <= 100
    loose = GatedActivation(small(situ_beta=1e7, situ_linear_beta=1e7))
    assert_close(loose(g, u), F.silu(g) * u, 1e-9)


def test_half_precision_rounds_expert_outputs_then_sums_in_float32() -> None:
    """Each expert's output is rounded to bf16, weighted by float32 probabilities, summed in float32, rounded once."""
    torch.manual_seed(0)
    config = small(hidden_size=32, expert_size=32, latent_size=0, experts=4, top_k=3)
    moe: Any = LatentMoE(config).to(torch.bfloat16)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(64, 32).to(torch.bfloat16)
    weights, experts = moe.router(x)
    assert weights.dtype == torch.float32
    got = moe.experts(x, weights, experts)

    def output(e: Tensor, token: Tensor) -> Tensor:
        gate, up = F.linear(token, moe.experts.gate_up[e]).chunk(2, -1)
        return F.linear(moe.experts.activation(gate, up), moe.experts.down[e])

    rounded = torch.stack([torch.stack([output(e, t) for e in row]) for t, row in zip(x, experts, strict=True)])
    right = (rounded.float() * weights.unsqueeze(-1)).sum(1).to(torch.bfloat16)
    wrong = (rounded * weights.unsqueeze(-1).to(torch.bfloat16)).sum(1)
    assert (got == right).float().mean() > 0.98
    assert (got == wrong).float().mean() < 0.9


def _skewed(tokens: int, experts: int) -> tuple[Router, Tensor]:
    """A router whose experts' mean scores differ, so that a few of them would get most tokens."""
    torch.manual_seed(0)
    router = Router(small(hidden_size=16, experts=experts, top_k=2))
    with torch.no_grad():
        router.weight.normal_(std=0.3)
        router.weight[:, 0] = torch.linspace(-1.5, 1.5, experts)
    x = torch.randn(tokens, 16)
    x[:, 0] = 1.0
    return router, x


def _load(router: Router, x: Tensor) -> Tensor:
    return torch.bincount(router(x)[1].flatten(), minlength=router.weight.shape[0]).float()


def test_balancing_evens_out_the_load() -> None:
    router, x = _skewed(8192, 12)
    assert _load(router, x).max() / _load(router, x).mean() > 2
    for _ in range(6):
        router.histogram.zero_()
        router(x)
        router.update_balance()
    load = _load(router.eval(), x)
    assert load.max() / load.mean() <= 1.05
    assert router.correction_bias.mean().abs() < 1e-6


def test_balanced_bias_is_the_quantile() -> None:
    """Within one bin of the exact quantile k/E over tokens of alpha - s, centred."""
    router, x = _skewed(4096, 12)
    router.correction_bias.normal_(std=0.1)
    s = torch.sigmoid(x @ router.weight.T)
    ranked = (s + router.correction_bias).sort(-1, descending=True).values
    gaps = (ranked[:, router.top_k : router.top_k + 1] - s).detach()
    exact = torch.quantile(gaps.double(), router.top_k / 12, dim=0)
    width = float(router.correction_bias.max() - router.correction_bias.min() + 2) / BINS
    router(x)
    router.update_balance()
    assert (router.correction_bias - (exact - exact.mean())).abs().max() <= 2 * width
    assert router.histogram.sum() == 0


def test_counts_do_not_depend_on_microbatches() -> None:
    router, x = _skewed(512, 12)
    router(x)
    whole = router.histogram.clone()
    router.histogram.zero_()
    for part in x.split([100, 412]):
        router(part)
    assert torch.equal(router.histogram, whole)
    assert whole.sum() == 512 * 12


def test_no_counting_outside_training() -> None:
    router, x = _skewed(64, 12)
    router.eval()(x)
    router.train().balancing = False
    router(x)
    assert router.histogram.sum() == 0
