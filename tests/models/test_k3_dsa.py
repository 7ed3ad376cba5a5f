"""Gated DSA against masked dense attention with an explicit selection, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moec.models.k3.dsa import DSA
from moec.models.k3.indexer import LightningIndexer, indexer_divergence
from moec.models.k3.mla import MLA
from moec.models.k3.norms import RMSNorm
from tests.models.k3_small import assert_close, assert_same_gradients, documents, random_module, small

LENGTHS = [(9,), (6, 3), (1, 8)]


def index_scores(indexer: LightningIndexer, x: Tensor, latent: Tensor) -> Tensor:
    """I[t][s] = sum_h w_th relu(q_th . k_s), one product at a time; x [T, D]."""
    q = (latent @ indexer.q_proj.weight.T).view(-1, indexer.heads, indexer.head_dim)
    k = x @ indexer.k_proj.weight.T
    k = (k - k.mean(-1, keepdim=True)) / torch.sqrt(k.var(-1, keepdim=True, unbiased=False) + 1e-6)
    k = k * indexer.k_norm.weight + indexer.k_norm.bias
    w = x @ indexer.weight_proj.weight.T / math.sqrt(indexer.heads) / math.sqrt(indexer.head_dim)
    rows = [
        [sum(w[t, h] * torch.relu(q[t, h] @ k[s]) for h in range(indexer.heads)) for s in range(len(x))]
        for t in range(len(x))
    ]
    return torch.stack([torch.stack(row) for row in rows])


def reference(dsa: DSA, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Expanded heads, dense logits, a mask that holds the selection; one row [T, D]."""
    latent = _norm(dsa.query.norm, x @ dsa.query.down_proj.weight.T)
    q = (latent @ dsa.query.up_proj.weight.T).view(len(x), dsa.heads, -1)
    down, kv = x @ dsa.key_value.down_proj.weight.T, dsa.key_value
    expanded = (_norm(kv.norm, down[:, : kv.rank]) @ kv.up_proj.weight.T).view(len(x), dsa.heads, -1)
    shared = down[:, kv.rank :].unsqueeze(1).expand(-1, dsa.heads, -1)
    k, v = torch.cat([expanded[..., : kv.nope_dim], shared], -1), expanded[..., kv.nope_dim :]
    scores = index_scores(dsa.indexer, x.detach(), latent.detach())
    mask = torch.zeros(len(x), len(x), dtype=torch.bool)
    for t in range(len(x)):
        allowed = [s for s in range(t + 1) if ids[s] == ids[t]]
        best = sorted(allowed, key=lambda s, t=t: -scores[t, s].item())[: dsa.top_k]
        mask[t, best] = True
    logits = torch.einsum("thd,shd->hts", q, k) / math.sqrt(dsa.nope_dim + dsa.rope_dim)
    p = logits.masked_fill(~mask, -torch.inf).softmax(-1)
    gate = torch.sigmoid(x @ dsa.output_gate.weight.T)
    y = (torch.einsum("hts,shv->thv", p, v).flatten(1) * gate) @ dsa.o_proj.weight.T
    target = p.detach().mean(0)
    kept = [(target[t][mask[t]], scores[t][mask[t]]) for t in range(len(x))]
    divergence = torch.stack([(a * (a.log() - i.log_softmax(0))).sum() for a, i in kept])
    return y, divergence


def _norm(norm: RMSNorm, x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * norm.weight


def _dsa(**changes: object) -> DSA:
    return random_module(DSA(small(full_attention="dsa", **changes)))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_equals_masked_dense_attention(lengths: tuple[int, ...]) -> None:
    dsa, ids = _dsa(), documents(*lengths)
    x = torch.randn(1, 9, 24, dtype=torch.float64, requires_grad=True)
    y, divergence = dsa(x, ids if len(lengths) > 1 else None)
    wanted_y, wanted_divergence = reference(dsa, x[0], ids[0])
    assert_close(y[0], wanted_y)
    assert_close(divergence[0], wanted_divergence)
    main = [p for name, p in dsa.named_parameters() if not name.startswith("indexer")]
    assert_same_gradients(y[0], wanted_y, [x, *main])
    assert_same_gradients(divergence[0], wanted_divergence, list(dsa.indexer.parameters()))


def test_short_rows_equal_mla() -> None:
    """At most top_k tokens: everything is selected, and DSA is MLA with the same weights."""
    dsa, mla = _dsa(indexer_top_k=9), random_module(MLA(small()))
    mla.load_state_dict({n: t for n, t in dsa.state_dict().items() if not n.startswith("indexer")})
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    ids = documents(4, 5).expand(2, -1)
    assert_close(dsa(x)[0], mla(x))
    assert_close(dsa(x, ids)[0], mla(x, ids))
    assert (_dsa(indexer_top_k=3)(x)[0] - mla(x)).norm() > 1e-3


def test_gradients_do_not_mix() -> None:
    """The divergence moves only the indexer, the output everything else; not even the layer's input gets any."""
    dsa = _dsa()
    x = torch.randn(1, 9, 24, dtype=torch.float64, requires_grad=True)
    y, divergence = dsa(x)
    names, parameters = zip(*dsa.named_parameters(), strict=True)
    from_loss = torch.autograd.grad(divergence.sum(), [x, *parameters], allow_unused=True, retain_graph=True)
    from_output = torch.autograd.grad(y.sum(), [x, *parameters], allow_unused=True)
    for name, one, two in zip(("x", *names), from_loss, from_output, strict=True):
        of_indexer = name.startswith("indexer")
        assert (one is not None and one.count_nonzero() > 0) == of_indexer, name
        assert (two is not None and two.count_nonzero() > 0) == (not of_indexer), name


def test_divergence_gradient_is_exact() -> None:
    """d KL / d I = softmax(I) - p on the chosen keys, 0 elsewhere."""
    torch.manual_seed(0)
    scores = torch.randn(1, 3, 5, dtype=torch.float64)
    chosen = torch.tensor([[[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]], dtype=torch.bool)
    scores = scores.masked_fill(~chosen, -torch.inf).requires_grad_()
    logits = torch.randn(1, 3, 2, 5, dtype=torch.float64)
    probabilities = logits.masked_fill(~chosen.unsqueeze(2), -torch.inf).softmax(-1).requires_grad_()
    (gradient,) = torch.autograd.grad(indexer_divergence(scores, chosen, probabilities).sum(), scores)
    assert_close(gradient, (scores.softmax(-1) - probabilities.mean(2)).detach())


def test_divergence_of_an_underflowing_target() -> None:
    """A main attention that is certain leaves probabilities of exactly 0; the loss and its gradient stay finite."""
    scores = torch.zeros(1, 1, 3, requires_grad=True)
    probabilities = torch.tensor([[[[1.0, 0.0, 0.0]]]])
    divergence = indexer_divergence(scores, torch.ones(1, 1, 3, dtype=torch.bool), probabilities)
    assert divergence.item() == pytest.approx(math.log(3))
    divergence.sum().backward()
    assert scores.grad is not None
    assert torch.isfinite(scores.grad).all()
