"""A pass that matched nothing says so where something was to be expected, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moec.compiler.capture import capture
from moec.compiler.document_inputs import document_inputs
from moec.compiler.graph import Unit
from moec.compiler.pass_manager import Pass, PassContext, Report
from moec.compiler.plan import Plan
from moec.models.adapters import training_view
from moec.models.build import build
from moec.passes.fuse_attention_gate import FuseAttentionGate
from moec.passes.fuse_dsa import FuseDsa
from moec.passes.normalize import Normalize
from moec.passes.recognize_attention import RecognizeAttention
from moec.passes.recognize_conv import RecognizeConv
from moec.passes.recognize_depth_mix import RecognizeDepthMix
from moec.passes.recognize_mlp import RecognizeMlp
from moec.preflight import example_inputs

from .support import ONE_RANK, Call, apply, unit_of

PLAN = Plan(batch=2, length=12, packing=True)
OURS = ["k3-tiny", "k3-dsa-tiny"]
TRANSFORMERS = ["mixtral", "deepseek_v3", "gpt_oss", "qwen3_next", "kimi_linear", "glm_moe_dsa"]
SILENT = [step for step in ONE_RANK if type(step).expected is Pass.expected]


@cache
def _walk(name: str) -> list[tuple[str, str, Report, str, str]]:
    """(pass, unit, report, what it expected before it ran, what it expected after)."""
    torch.manual_seed(0)
    if name in OURS:
        model = build(name).train()
    else:
        pytest.importorskip("transformers")
        from moec.models.huggingface.adapter import from_config
        from moec.models.huggingface.tiny import tiny_config

        model = from_config(tiny_config(name)).train()
    program = capture(training_view(model, PLAN), PLAN, example_inputs(model, PLAN)).program
    context = PassContext(plan=PLAN, documents=document_inputs(program))
    return [row for step in ONE_RANK for unit in program.units.values() for row in _run(step, unit, context)]


def _run(step: Pass, unit: Unit, context: PassContext) -> Iterator[tuple[str, str, Report, str, str]]:
    before = step.expected(unit)
    report = step.run(unit, context)
    unit.graph.eliminate_dead_code()
    yield step.name, unit.name, report, before, step.expected(unit)


def test_every_recognising_pass_has_expectations() -> None:
    assert [ONE_RANK[0]] == SILENT, "normalize has none: any graph may be in its form already"


@pytest.mark.parametrize("name", OURS + TRANSFORMERS)
def test_what_a_pass_matches_it_expects(name: str) -> None:
    """Were its rules broken, each pass would warn on every unit where it matches something today."""
    unexpected = [
        (step, unit, [match.what for match in report.matches])
        for step, unit, report, before, _ in _walk(name)
        if report.matches and not before and step != "normalize"
    ]
    assert unexpected == []


@pytest.mark.parametrize("name", OURS + TRANSFORMERS)
def test_no_false_alarm(name: str) -> None:
    alarms = sorted({(step, after) for step, _, report, _, after in _walk(name) if not report.matches and after})
    if name == "glm_moe_dsa":  # its selected keys become the mask of an ordinary attention
        assert [step for step, _ in alarms] == ["fuse_dsa", "recognize_attention"]
        assert "selects keys by scores, but no sparse attention was recognised" in alarms[0][1]
    else:
        assert alarms == []


W, D, T = 8, 6, 5
_generator = torch.Generator().manual_seed(0)


def _tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, generator=_generator) for shape in shapes]


def _expects(step: Pass, function: Callable[..., Tensor], *args: Tensor, **weights: Tensor) -> str:
    """What the pass expects of a function's graph, after the passes before it and itself."""
    unit = unit_of(Call(function, **weights), *args)
    before = [RecognizeAttention()] if isinstance(step, FuseAttentionGate) else []
    *_, report = apply([Normalize(), *before, step], unit)
    assert not report.matches
    return step.expected(unit)


@dataclass
class Projections:
    """x and its projections in a gated MLP; `down` projects back."""

    x: Tensor
    weights: tuple[Tensor, Tensor, Tensor]

    @property
    def gate(self) -> Tensor:
        return F.linear(self.x, self.weights[0])

    @property
    def up(self) -> Tensor:
        return F.linear(self.x, self.weights[1])

    def down(self, value: Tensor) -> Tensor:
        return F.linear(value, self.weights[2])


UNKNOWN_MLPS: dict[str, Callable[[Projections], Tensor]] = {
    "quick gelu": lambda p: p.down((gate := p.gate) * torch.sigmoid(1.702 * gate) * p.up),
    "sigmoid": lambda p: p.down(torch.sigmoid(p.gate) * p.up),
    "a bias apart": lambda p: p.down(torch.sigmoid(p.gate + p.weights[2][0]) * p.up),
    "both activated": lambda p: p.down(F.silu(p.gate) * torch.tanh(p.up)),
    "halves of one": lambda p: p.down(
        torch.sigmoid((both := F.linear(p.x, torch.cat(p.weights[:2])))[..., :W]) * both[..., W:]
    ),
}
NO_MLPS: dict[str, Callable[[Projections], Tensor]] = {
    "no activation": lambda p: p.down(p.gate * p.up),
    "one value": lambda p: p.down((gate := p.gate) * torch.sigmoid(1.702 * gate)),
    "two inputs": lambda p: p.down(torch.sigmoid(p.gate) * F.linear(p.x.cos(), p.weights[1])),
    "a number per token": lambda p: p.down(torch.sigmoid(F.linear(p.x, p.weights[0][:1])) * p.up),
    "nothing follows": lambda p: torch.sigmoid(p.gate) * p.up,
    "products of values": lambda p: F.linear(torch.sigmoid(p.x @ p.x.mT) * (p.x @ p.x.mT), torch.ones(T, T)),
}


def _mlp_expectation(function: Callable[[Projections], Tensor]) -> str:
    def run(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return function(Projections(x, (gate, up, down)))

    gate, up, down = _tensors((W, D), (W, D), (D, W))
    return _expects(RecognizeMlp(), run, *_tensors((2, T, D)), gate=gate, up=up, down=down)


@pytest.mark.parametrize("name", UNKNOWN_MLPS)
def test_unknown_gated_mlps_are_expected(name: str) -> None:
    found = _mlp_expectation(UNKNOWN_MLPS[name])
    assert "multiplies two projections, one activated, as no known MLP does" in found
    assert "(aten.mul.Tensor" in found


@pytest.mark.parametrize("name", NO_MLPS)
def test_other_products_are_no_mlps(name: str) -> None:
    assert _mlp_expectation(NO_MLPS[name]) == ""


@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        (lambda x, w: F.silu(F.linear(x, w)), True),
        (lambda x, w: torch.sigmoid(F.linear(x, w[:1])), True),
        (lambda x, w: torch.sigmoid(x), False),
        (lambda x, w: F.linear(x, w), False),
        (lambda x, w: w[0], False),
    ],
)
def test_gates_of_an_attention(gate: Callable[[Tensor, Tensor], Tensor], expected: bool) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        o = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return o.transpose(1, 2).flatten(2) * gate(x, w)

    found = _expects(FuseAttentionGate(), function, *_tensors((2, T, D)), w=_tensors((D, D))[0])
    assert ("gates the output of an attention, but not by sigmoid_gate" in found) == expected
    assert bool(found) == expected


def _mixed(score: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def function(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
        values = torch.stack([a, b], -2)
        return (values * score(values @ w[0]).softmax(-1).unsqueeze(-1)).sum(-2)

    return function


def _as_product(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    values = torch.stack([a, b], -2)
    return ((values @ w[0]).softmax(-1).unsqueeze(-2) @ values).squeeze(-2)


def _dense_experts(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    shares = F.linear(a, w[:2]).softmax(-1)
    return (torch.stack([F.linear(a, w), F.linear(a, w.T)], -2) * shares.unsqueeze(-1)).sum(-2)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_mixed(lambda scores: scores), True),
        (_mixed(torch.tanh), True),
        (_as_product, True),
        (_dense_experts, False),
        (lambda a, b, w: torch.stack([a, b], -2).sum(-2) * w[0].softmax(-1), False),
    ],
)
def test_mixtures_over_depth(function: Callable[..., Tensor], expected: bool) -> None:
    found = _expects(RecognizeDepthMix(), function, *_tensors((2, T, D), (2, T, D)), w=_tensors((D, D))[0])
    assert ("weighs stacked values by a softmax of them, but is no depth_mix" in found) == expected
    assert bool(found) == expected


def _additive(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    scores = (q @ k.mT) * F.linear(q, w[:1]) + torch.full((T, T), -1e30).triu(1)
    return scores.topk(2, dim=-1)[1]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_additive, True),
        (lambda q, k, w: (torch.einsum("btd,bsd->bts", q, k) + k.sum()).relu().topk(2, dim=-1)[1], True),
        (lambda q, k, w: F.linear(q, w).topk(2, dim=-1)[1], False),  # a router
        (lambda q, k, w: (q @ w.T).sigmoid().topk(2, dim=-1)[1], False),
        (lambda q, k, w: F.linear(q @ (k.mT @ k), w).topk(2, dim=-1)[1], False),
        (lambda q, k, w: (q @ k.mT).flatten(0, 1).topk(2, dim=-1)[1], False),
    ],
)
def test_selections(function: Callable[..., Tensor], expected: bool) -> None:
    found = _expects(FuseDsa(), function, *_tensors((2, T, D), (2, T, D)), w=_tensors((D, D))[0])
    assert ("selects keys by scores, but no sparse attention was recognised" in found) == expected
    assert bool(found) == expected


def _weighed(taps: Sequence[int]) -> Callable[..., Tensor]:
    def function(x: Tensor, w: Tensor) -> Tensor:
        shifted = [F.pad(x, (0, 0, back, 0))[:, :T] * w[back] for back in taps]
        return torch.stack(shifted).amax(0)

    return function


@pytest.mark.parametrize(("taps", "expected"), [((1, 2), True), ((1, 1, 1), False)])
def test_weighed_copies_of_a_sequence(taps: Sequence[int], expected: bool) -> None:
    """Several shifts make a convolution; one shift, for keys, values and more, mixes a token with the one before."""
    found = _expects(RecognizeConv(), _weighed(taps), *_tensors((2, T, D)), w=_tensors((3, D))[0])
    assert ("weigh shifted copies, but are no short_conv" in found) == expected
    assert bool(found) == expected
