"""fuse_dsa: our sparse attention becomes index_topk, sparse_attention and indexer_loss, all together or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moec.models.k3 import dsa
from moec.models.k3.config import K3Config
from moec.models.k3.documents import visible
from moec.passes.fuse_attention_gate import FuseAttentionGate
from moec.passes.fuse_dsa import FuseDsa
from moec.passes.normalize import Normalize
from moec.passes.recognize_attention import RecognizeAttention

from .support import apply, assert_golden, check, counts, graph_text, reasons, unit_of, what

B, T, D = 2, 6, 16
IDS = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
CONFIG = K3Config(
    vocab_size=8,
    hidden_size=D,
    layers=1,
    dense_layers=1,
    heads=2,
    q_rank=6,
    kv_rank=8,
    nope_dim=4,
    rope_dim=2,
    value_dim=4,
    indexer_heads=8,  # with few heads, relu often gives scores of exactly 0, and ties may be broken either way
    indexer_dim=4,
    indexer_top_k=3,
)
FUSED = {"index_topk": 1, "sparse_attention": 1}


def _layer(cls: Callable[[K3Config], nn.Module] = dsa.DSA) -> nn.Module:
    torch.manual_seed(0)
    module = cls(CONFIG)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return module


def _x() -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("packed", [True, False])
def test_our_layer(packed: bool) -> None:
    args = (_x(), IDS) if packed else (_x(),)
    unit, report = check(FuseDsa(), _layer(), *args)
    assert counts(unit) == FUSED | {"indexer_loss": 1}
    assert what(report) == ["sparse_attention to 3 keys, indexer_loss"]
    assert not report.near_misses
    left = {str(node.target) for node in unit.graph.nodes}
    assert not left & {"aten.topk.default", "aten.softmax.int", "aten.index.Tensor", "aten.masked_fill.Scalar"}


def test_golden_text() -> None:
    unit, _ = check(FuseDsa(), _layer(), _x(), IDS)
    assert_golden("dsa", graph_text(unit))


def test_bfloat16_and_float64() -> None:
    unit, _ = check(FuseDsa(), _layer().bfloat16(), _x().bfloat16(), IDS, bound=6e-2)
    assert counts(unit) == FUSED | {"indexer_loss": 1}
    check(FuseDsa(), _layer().double(), _x().double(), IDS, bound=1e-11)


def test_the_gate_is_found_behind_the_value_expansion() -> None:
    unit, report = check(FuseAttentionGate(), _layer(), _x(), IDS, before=[FuseDsa(), RecognizeAttention()])
    assert counts(unit) == FUSED | {"indexer_loss": 1, "sigmoid_gate": 1}
    assert what(report) == ["sigmoid_gate over 8"]


def test_any_length() -> None:
    length = torch.export.Dim("length", min=5, max=64)
    module = _layer()
    unit = unit_of(module, _x(), IDS, dynamic_shapes=({1: length}, {1: length}))
    apply([Normalize(), FuseDsa()], unit)
    assert counts(unit) == FUSED | {"indexer_loss": 1}
    (node,) = unit.graph.find_nodes(op="call_function", target=torch.ops.moec.index_topk.default)
    assert node.args[4:] == (3, True)


class WithoutLoss(dsa.DSA):
    def forward(self, x: Tensor, document_ids: Tensor | None = None) -> Tensor:
        return super().forward(x, document_ids)[0]


def test_without_the_indexers_loss() -> None:
    unit, report = check(FuseDsa(), _layer(WithoutLoss), _x(), IDS)
    assert counts(unit) == FUSED
    assert what(report) == ["sparse_attention to 3 keys"]


class ScoresUsed(dsa.DSA):
    """Also returns the best scores themselves."""

    def forward(self, x: Tensor, document_ids: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        _, latent = self.query(x)
        scores = self.indexer(x, latent)
        indices, best, chosen = dsa.select(scores, visible(document_ids, T, x.device), self.top_k)
        q = x.reshape(B, T, 2, D // 2)[..., :5]
        o, shares = dsa.sparse_attention(q, x[..., :5], indices, chosen, 0.5, 4)
        return o, dsa.indexer_divergence(best, chosen, shares), best.masked_fill(~chosen, 0.0)


def test_scores_used_elsewhere() -> None:
    unit, report = check(FuseDsa(), _layer(ScoresUsed), _x(), IDS)
    assert not counts(unit)
    assert "is used outside of the sparse attention too" in "\n".join(reasons(report))


def test_a_mask_that_is_not_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    def everything(document_ids: Any, length: int, device: torch.device) -> Tensor:
        return torch.ones(1, length, length, dtype=torch.bool, device=device).tril(2)

    monkeypatch.setattr(dsa, "visible", everything)
    unit, report = check(FuseDsa(), _layer(), _x(), IDS)
    assert not counts(unit)
    assert "is not provably causal" in "\n".join(reasons(report))


def test_a_table_that_may_fall_is_no_document_id() -> None:
    unit = unit_of(_layer(), _x(), IDS)
    _, report = apply([Normalize(), FuseDsa()], unit, documents=False)
    assert not counts(unit)
    assert "are not provably consecutive" in "\n".join(reasons(report))


def test_indices_for_a_dense_mask() -> None:
    """As transformers' GLM: the selected keys become a mask of ordinary attention."""

    class Dense(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            scores = (q @ k.transpose(1, 2)).masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), float("-inf"))
            return torch.zeros(B, T, T).scatter(-1, scores.topk(3, dim=-1)[1], 1.0)

    unit, report = check(FuseDsa(), Dense(), torch.randn(B, T, 4), torch.randn(B, T, 4), exact=True)
    assert not counts(unit)
    assert "its indices are used in another way" in "\n".join(reasons(report))
