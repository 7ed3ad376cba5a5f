"""KDA against a token-by-token recurrence in float64, with each stage written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from moec.models.k3.kda import KDA
from tests.models.k3_small import (
    assert_close,
    assert_same_gradients,
    documents,
    kimi_linear_small,
    random_module,
    small,
)


def reference(kda: KDA, x: Tensor, document_ids: Tensor, bounded: bool) -> Tensor:
    """One row, one token, one head at a time."""
    rows = []
    for b in range(x.shape[0]):
        starts = [t == 0 or bool(document_ids[b, t] != document_ids[b, t - 1]) for t in range(x.shape[1])]
        tokens: list[Tensor] = []
        for t in range(x.shape[1]):
            if starts[t]:
                history: list[Tensor] = []
                state = [torch.zeros(kda.head_dim, kda.head_dim, dtype=x.dtype) for _ in range(kda.heads)]
            history.append(x[b, t])
            streams = [_convolved(kda, name, history) for name in "qkv"]
            heads = [_head(kda, streams, state, h, x[b, t], bounded) for h in range(kda.heads)]
            tokens.append(kda.o_proj.weight @ torch.cat(heads))
        rows.append(torch.stack(tokens))
    return torch.stack(rows)


def _convolved(kda: KDA, name: str, history: list[Tensor]) -> Tensor:
    taps = getattr(kda, f"{name}_conv").weight
    width, projection = taps.shape[1], getattr(kda, f"{name}_proj").weight
    total = sum(taps[:, width - 1 - back] * (projection @ u) for back, u in enumerate(reversed(history[-width:])))
    return total * torch.sigmoid(total)


def _head(kda: KDA, streams: list[Tensor], state: list[Tensor], h: int, x: Tensor, bounded: bool) -> Tensor:
    part = slice(h * kda.head_dim, (h + 1) * kda.head_dim)
    q, k, v = (stream[part] for stream in streams)
    q, k = q / torch.sqrt((q * q).sum() + 1e-6), k / torch.sqrt((k * k).sum() + 1e-6)
    decay = kda.decay
    z = (decay.up_proj.weight @ (decay.down_proj.weight @ x))[part] + decay.dt_bias[part]
    rate = decay.A_log[h].exp()
    g = -5 / (1 + torch.exp(-rate * z)) if bounded else -rate * torch.log1p(torch.exp(z))
    beta = torch.sigmoid(kda.beta_proj.weight[h] @ x)
    kept = g.exp().unsqueeze(1) * state[h]
    state[h] = kept + beta * torch.outer(k, v - kept.T @ k)
    o = state[h].T @ q / math.sqrt(kda.head_dim)
    gate = (
        kda.output_gate.weight @ x
        if bounded
        else kda.output_gate.up_proj.weight @ (kda.output_gate.down_proj.weight @ x)
    )
    return kda.output_norm.weight * o / torch.sqrt((o * o).mean() + 1e-5) * torch.sigmoid(gate[part])


@pytest.mark.parametrize("bounded", [True, False], ids=["bounded", "softplus"])
@pytest.mark.parametrize("lengths", [(11,), (4, 1, 6)], ids=["one document", "packed"])
def test_equals_recurrence(bounded: bool, lengths: tuple[int, ...]) -> None:
    kda = random_module(KDA(small() if bounded else kimi_linear_small()))
    x = torch.randn(1, 11, 24, dtype=torch.float64, requires_grad=True)
    ids = documents(*lengths)
    got = kda(x, ids if len(lengths) > 1 else None)
    wanted = reference(kda, x, ids, bounded)
    assert_close(got, wanted)
    assert_same_gradients(got, wanted, [x, *kda.parameters()])


def test_longer_than_a_chunk() -> None:
    kda = random_module(KDA(small()), std=0.2)
    x = torch.randn(2, 150, 24, dtype=torch.float64)
    ids = torch.stack([documents(70, 80)[0], documents(128, 22)[0]])
    with torch.no_grad():
        assert_close(kda(x, ids), reference(kda, x, ids, bounded=True))


def test_decay_stays_in_its_bound() -> None:
    kda = random_module(KDA(small()), std=3.0)
    g = kda.decay(torch.randn(1, 50, 24, dtype=torch.float64))
    assert g.min() >= -5
    assert g.max() <= 0
    assert g.dtype == torch.float64


def test_initial_decay() -> None:
    """A = 0, and softplus(dt_bias) log-uniform in [1e-3, 1e-1]: mean log of about log 1e-2."""
    torch.manual_seed(0)
    decay = KDA(small(kda_heads=32, kda_head_dim=64)).decay
    dt = torch.nn.functional.softplus(decay.dt_bias.detach())
    assert decay.A_log.abs().max() == 0
    assert 0.99e-3 < dt.min() < 1.2e-3
    assert 0.8e-1 < dt.max() < 1.01e-1
    assert abs(dt.log().mean() - math.log(1e-2)) < 0.1


def test_half_precision_is_close() -> None:
    """bf16 matrices; norms, gates and the state in float32: within 2 % of float64."""
    torch.manual_seed(0)
    kda: Any = KDA(small(hidden_size=64, kda_head_dim=32))
    x = torch.randn(2, 40, 64)
    wanted = kda.double()(x.double()).detach()
    got = kda.to(torch.bfloat16)(x.to(torch.bfloat16)).detach()
    assert got.dtype == torch.bfloat16
    assert_close(got.double(), wanted, 2e-2)
