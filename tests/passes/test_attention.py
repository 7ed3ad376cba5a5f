"""recognize_attention and fuse_attention_gate: library and written-out attention, heads, masks, sinks, gates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moec.passes.fuse_attention_gate import FuseAttentionGate
from moec.passes.normalize import Normalize
from moec.passes.recognize_attention import RecognizeAttention

from .support import Call, apply, assert_golden, check, counts, graph_text, reasons, unit_of, what

B, T, H, G, D, V = 2, 5, 4, 2, 6, 3
IDS = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]])
LOW = torch.finfo(torch.float32).min
SDPA = F.scaled_dot_product_attention


def _visible(ids: Tensor | None = None, window: int = 0) -> Tensor:
    index = torch.arange(T)
    seen = index <= index[:, None]
    seen = seen & (index > index[:, None] - window) if window else seen
    return seen if ids is None else seen & (ids[:, None, :, None] == ids[:, None, None, :])


def _written(q: Tensor, k: Tensor, v: Tensor, mask: Callable[[Tensor], Tensor], scale: float = 0.5) -> Tensor:
    scores = (q @ k.transpose(-1, -2)) * scale
    return mask(scores).softmax(-1, dtype=torch.float32).to(q.dtype) @ v


FORMS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], str]] = {
    "is_causal": (lambda q, k, v: SDPA(q, k, v, is_causal=True), "causal"),
    "bool mask": (lambda q, k, v: SDPA(q, k, v, attn_mask=_visible(), scale=0.3), "causal"),
    "additive mask": (lambda q, k, v: SDPA(q, k, v, attn_mask=torch.where(_visible(), 0.0, LOW)), "causal"),
    "window": (lambda q, k, v: SDPA(q, k, v, attn_mask=_visible(window=2)), "causal, window 2"),
    "no mask": (lambda q, k, v: SDPA(q, k, v), "full"),
    "written, added": (lambda q, k, v: _written(q, k, v, lambda s: s + torch.where(_visible(), 0.0, LOW)), "causal"),
    "written, filled": (lambda q, k, v: _written(q, k, v, lambda s: s.masked_fill(~_visible(), -torch.inf)), "causal"),
    "written, where": (lambda q, k, v: _written(q, k, v, lambda s: torch.where(_visible(), s, LOW)), "causal"),
    "written, full": (lambda q, k, v: _written(q, k, v, lambda s: s), "full"),
    "written, divided": (
        lambda q, k, v: (q @ k.transpose(2, 3) / 2.0).masked_fill(~_visible(), LOW).softmax(-1) @ v,
        "causal",
    ),
    "written, scaled query": (
        lambda q, k, v: ((q * 0.5) @ k.mT).masked_fill(~_visible(), -torch.inf).softmax(-1) @ v,
        "causal",
    ),
}


def _inputs(dtype: torch.dtype = torch.float32, heads: int = H) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(B, T, H, D), (B, T, heads, D), (B, T, heads, V)]
    return [torch.randn(*shape).to(dtype) for shape in shapes]


def _in_heads(form: Callable[[Tensor, Tensor, Tensor], Tensor]) -> nn.Module:
    """[B, T, H, D] -> [B, T, H * V], with the transposes that models have."""
    return Call(lambda q, k, v: form(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("name", sorted(FORMS))
def test_forms(name: str) -> None:
    form, text = FORMS[name]
    unit, report = check(RecognizeAttention(), _in_heads(form), *_inputs())
    assert counts(unit) == {"attention": 1}
    assert what(report) == [f"attention of 4 heads: {text}"]
    if name != "written, scaled query":
        assert not unit.graph.find_nodes(op="call_function", target=torch.ops.aten.transpose.int)


def test_golden_text() -> None:
    unit, _ = check(RecognizeAttention(), _in_heads(FORMS["bool mask"][0]), *_inputs())
    assert_golden("attention", graph_text(unit))


def test_float64_and_bfloat16() -> None:
    check(RecognizeAttention(), _in_heads(FORMS["is_causal"][0]), *_inputs(torch.float64), bound=1e-12)
    unit, _ = check(RecognizeAttention(), _in_heads(FORMS["written, where"][0]), *_inputs(torch.bfloat16), bound=2e-2)
    assert counts(unit) == {"attention": 1}


def test_documents() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        return SDPA(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=_visible(ids)).transpose(1, 2)

    unit, report = check(RecognizeAttention(), Call(function), *_inputs(), IDS)
    assert what(report) == ["attention of 4 heads: causal, by document"]
    assert not unit.graph.find_nodes(op="call_function", target=torch.ops.aten.eq.Tensor)


def test_a_table_that_may_fall_is_no_document_id() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        return SDPA(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=_visible(ids)).transpose(1, 2)

    unit = unit_of(Call(function), *_inputs(), IDS)
    _, report = apply([Normalize(), RecognizeAttention()], unit, documents=False)
    assert not counts(unit)
    assert "are not provably consecutive" in reasons(report)[0]


def _repeat_expand(x: Tensor) -> Tensor:
    return x[:, :, None].expand(B, G, H // G, T, x.shape[-1]).reshape(B, H, T, x.shape[-1])


def _repeat_tiled(x: Tensor) -> Tensor:
    return x[:, None].expand(B, H // G, G, T, x.shape[-1]).reshape(B, H, T, x.shape[-1])


REPEATS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], str]] = {
    "expand": (lambda q, k, v: SDPA(q, _repeat_expand(k), _repeat_expand(v), is_causal=True), " to 2"),
    "interleave": (
        lambda q, k, v: SDPA(q, *(x.repeat_interleave(2, dim=1) for x in (k, v)), is_causal=True),
        " to 2",
    ),
    "before the transpose": (
        lambda q, k, v: SDPA(
            q, *(x.transpose(1, 2).repeat_interleave(2, dim=2).transpose(1, 2) for x in (k, v)), is_causal=True
        ),
        " to 2",
    ),
    "enable_gqa": (lambda q, k, v: SDPA(q, k, v, is_causal=True, enable_gqa=True), " to 2"),
    "tiled": (lambda q, k, v: SDPA(q, _repeat_tiled(k), _repeat_tiled(v), is_causal=True), ""),
}


@pytest.mark.parametrize("name", sorted(REPEATS))
def test_repeated_heads(name: str) -> None:
    form, text = REPEATS[name]
    unit, report = check(RecognizeAttention(), _in_heads(form), *_inputs(heads=G))
    assert what(report) == [f"attention of 4 heads{text}: causal"]
    assert counts(unit) == {"attention": 1}


@pytest.mark.parametrize("stable", [True, False])
def test_sinks(stable: bool) -> None:
    def form(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        scores = q @ k.transpose(2, 3) * 0.4 + torch.where(_visible(window=3), 0.0, LOW)
        scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(B, -1, T, -1)], dim=-1)
        if stable:
            scores = scores - scores.max(dim=-1, keepdim=True).values
        return scores.softmax(-1)[..., :-1] @ v

    module = Call(
        lambda q, k, v, sinks: form(*(x.transpose(1, 2) for x in (q, k, v)), sinks).transpose(1, 2),
        sinks=torch.randn(H),
    )
    unit, report = check(RecognizeAttention(), module, *_inputs(), bound=2e-6)
    assert what(report) == ["attention of 4 heads: causal, window 3, sinks"]
    assert counts(unit) == {"attention": 1}


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (
            lambda q, k, v: SDPA(q, k, v, attn_mask=(torch.arange(T) % 2 == 0).expand(T, T)),
            "unknown meaning for the mask",
        ),
        (lambda q, k, v: SDPA(q, k, v, attn_mask=_visible().tril(-1)), "unknown meaning for the mask"),
        (lambda q, k, v: SDPA(q[0], k[0], v[0], is_causal=True)[None], "queries have 3 dimensions"),
        (lambda q, k, v: SDPA(q[:, :, :3], k, v), "queries and keys differ in length"),
        (lambda q, k, v: SDPA(q, k, v, dropout_p=0.5) * 0 + v, "attention dropout is 0.5"),
        (
            lambda q, k, v: _written(q, k, v, lambda s: s.masked_fill(~_visible(), -9.0)),
            "hidden scores become -9.0, which may still count",
        ),
        (lambda q, k, v: (p := (q @ k.mT * 0.5).softmax(-1)) @ v + p.sum(), "is used outside the pattern too"),
        (lambda q, k, v: (q @ k.mT * 0.5).softmax(-1).sin() @ v, "its result is not multiplied by values"),
    ],
)
def test_near_misses(form: Callable[[Tensor, Tensor, Tensor], Tensor], reason: str) -> None:
    unit, report = check(RecognizeAttention(), _in_heads(form), *_inputs())
    assert reason in "\n".join(reasons(report))
    assert not counts(unit)


def _gated(x: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor, gate: Callable[[Tensor], Tensor]) -> Tensor:
    o = SDPA(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True).transpose(1, 2).reshape(B, T, H * V)
    return o * gate(F.linear(x, w))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_gate(dtype: torch.dtype) -> None:
    def function(x: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return _gated(x, q, k, v, w, lambda g: torch.sigmoid(g.float()).to(g.dtype))

    module, args = Call(function, w=torch.randn(H * V, 3).to(dtype)), (torch.randn(B, T, 3).to(dtype), *_inputs(dtype))
    bound = 1e-6 if dtype == torch.float32 else 2e-2
    unit, report = check(FuseAttentionGate(), module, *args, before=[RecognizeAttention()], bound=bound)
    assert counts(unit) == {"attention": 1, "sigmoid_gate": 1}
    assert what(report) == ["sigmoid_gate over 12"]


@pytest.mark.parametrize(
    ("gate", "reason"),
    [
        (lambda g: torch.sigmoid(g[..., :1]), "the gate has shape [2, 5, 1], not one number per element"),
        (lambda g: torch.sigmoid(g.sin()), "the gate is not a projection"),
        (F.silu, "attention gate: it is a SiLU, not a sigmoid"),
    ],
)
def test_other_gates(gate: Callable[[Tensor], Tensor], reason: str) -> None:
    module = Call(lambda x, q, k, v, w: _gated(x, q, k, v, w, gate), w=torch.randn(H * V, 3))
    args = (torch.randn(B, T, 3), *_inputs())
    unit, report = check(FuseAttentionGate(), module, *args, before=[RecognizeAttention()])
    assert reason in "\n".join(reasons(report))
    assert counts(unit) == {"attention": 1}


def test_gates_of_other_values_are_none_of_its_business() -> None:
    module = Call(lambda x, w: x[..., :1] * torch.sigmoid(F.linear(x, w)), w=torch.randn(2, 3))
    _, report = check(FuseAttentionGate(), module, torch.randn(2, 3), exact=True)
    assert not report.matches
    assert not report.near_misses
