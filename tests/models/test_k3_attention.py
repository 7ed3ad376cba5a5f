"""Gated MLA and grouped-query attention against explicit float64 formulations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moec.models.k3.documents import positions
from moec.models.k3.gqa import GQA
from moec.models.k3.mla import MLA
from tests.models.k3_small import (
    assert_close,
    assert_same_gradients,
    documents,
    kimi_linear_small,
    random_module,
    small,
)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def mla_reference(mla: MLA, x: Tensor, ids: Tensor) -> Tensor:
    """Absorbed form, token by token: all heads attend to the entries (latent | shared)."""
    query, kv = mla.query, mla.key_value
    if hasattr(query, "proj"):
        q_all = x @ query.proj.weight.T
    else:
        q_all = norm(x @ query.down_proj.weight.T, query.norm.weight, 1e-6) @ query.up_proj.weight.T
    down = x @ kv.down_proj.weight.T
    latent, shared = norm(down[..., : kv.rank], kv.norm.weight, 1e-6), down[..., kv.rank :]
    up = kv.up_proj.weight.view(mla.heads, kv.nope_dim + kv.value_dim, kv.rank)
    out = []
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            keys = [s for s in range(t + 1) if ids[b, s] == ids[b, t]]
            heads = []
            for h in range(mla.heads):
                q = q_all[b, t].view(mla.heads, -1)[h]
                absorbed = up[h, : kv.nope_dim].T @ q[: kv.nope_dim]
                logits = torch.stack([absorbed @ latent[b, s] + q[kv.nope_dim :] @ shared[b, s] for s in keys])
                p = torch.softmax(logits / math.sqrt(mla.query_dim), 0)
                heads.append(up[h, kv.nope_dim :] @ sum(w * latent[b, s] for w, s in zip(p, keys, strict=True)))
            o = torch.cat(heads)
            if mla.output_gate is not None:
                o = o / (1 + torch.exp(-(mla.output_gate.weight @ x[b, t])))
            out.append(mla.o_proj.weight @ o)
    return torch.stack(out).view(x.shape[0], x.shape[1], -1)


@pytest.mark.parametrize("gated", [True, False], ids=["q_lora and gate", "direct, no gate"])
@pytest.mark.parametrize("lengths", [(7,), (3, 4)], ids=["one document", "packed"])
def test_mla_equals_absorbed_form(gated: bool, lengths: tuple[int, ...]) -> None:
    mla = random_module(MLA(small() if gated else kimi_linear_small()))
    x = torch.randn(1, 7, 24, dtype=torch.float64, requires_grad=True)
    ids = documents(*lengths)
    got, wanted = mla(x, ids if len(lengths) > 1 else None), mla_reference(mla, x, ids)
    assert_close(got, wanted)
    assert_same_gradients(got, wanted, [x, *mla.parameters()])


def test_mla_knows_no_positions() -> None:
    mla = random_module(MLA(small()))
    x = torch.randn(1, 9, 24, dtype=torch.float64)
    shuffled = torch.cat([x[:, torch.randperm(8)], x[:, 8:]], dim=1)
    assert_close(mla(shuffled)[:, -1], mla(x)[:, -1])
    assert (mla(shuffled)[:, 3] - mla(x)[:, 3]).norm() > 1e-3


def test_closed_half_gate() -> None:
    mla = random_module(MLA(small()))
    x = torch.randn(1, 5, 24, dtype=torch.float64)
    torch.nn.init.zeros_(mla.output_gate.weight)
    halved = mla(x)
    mla.output_gate = None
    assert_close(2 * halved, mla(x))


def gqa_reference(gqa: GQA, x: Tensor, ids: Tensor) -> Tensor:
    """Rotation by complex numbers, then attention token by token."""
    half, (batch, length) = gqa.head_dim // 2, x.shape[:2]
    position = [[t - ids[b].tolist().index(int(ids[b, t])) for t in range(length)] for b in range(batch)]

    def turned(vector: Tensor, where: int) -> Tensor:
        angle = torch.tensor([where * gqa.theta ** (-2 * i / gqa.head_dim) for i in range(half)], dtype=x.dtype)
        z = torch.complex(vector[:half], vector[half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([z.real, z.imag])

    out = []
    for b in range(batch):
        k = [(gqa.k_proj.weight @ x[b, t]).view(gqa.kv_heads, -1) for t in range(length)]
        v = [(gqa.v_proj.weight @ x[b, t]).view(gqa.kv_heads, -1) for t in range(length)]
        for t in range(length):
            keys = [s for s in range(t + 1) if ids[b, s] == ids[b, t]]
            q, heads = (gqa.q_proj.weight @ x[b, t]).view(gqa.heads, -1), []
            for h in range(gqa.heads):
                group = h // (gqa.heads // gqa.kv_heads)
                mine = turned(q[h], position[b][t])
                logits = torch.stack([mine @ turned(k[s][group], position[b][s]) for s in keys])
                p = torch.softmax(logits / math.sqrt(gqa.head_dim), 0)
                heads.append(sum(w * v[s][group] for w, s in zip(p, keys, strict=True)))
            out.append(gqa.o_proj.weight @ torch.cat(heads))
    return torch.stack(out).view(batch, length, -1)


@pytest.mark.parametrize("lengths", [(6,), (2, 1, 3)], ids=["one document", "packed"])
def test_gqa_equals_reference(lengths: tuple[int, ...]) -> None:
    gqa = random_module(GQA(small(full_attention="gqa", heads=4, kv_heads=2)))
    x = torch.randn(1, 6, 24, dtype=torch.float64, requires_grad=True)
    ids = documents(*lengths)
    got, wanted = gqa(x, ids if len(lengths) > 1 else None), gqa_reference(gqa, x, ids)
    assert_close(got, wanted)
    assert_same_gradients(got, wanted, [x, *gqa.parameters()])


def test_positions_restart_at_each_document() -> None:
    ids = torch.cat([documents(2, 1, 3), documents(6)])
    assert positions(ids, 6, ids.device).tolist() == [[0, 1, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5]]
    assert positions(None, 3, ids.device).tolist() == [[0, 1, 2]]
