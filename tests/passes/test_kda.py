"""fuse_kda: our layers and transformers' gated delta nets become one op; what has another form keeps its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moec.compiler import dialect
from moec.compiler.graph import Unit
from moec.compiler.pass_manager import Report
from moec.models.k3.config import K3Config
from moec.models.k3.kda import KDA
from moec.passes.fuse_kda import FuseKda
from moec.passes.recognize_conv import RecognizeConv
from moec.passes.recognize_norm import RecognizeNorm

from .support import assert_golden, check, counts, graph_text, reasons, what

B, T, H, HV, K, V, D = 2, 6, 2, 4, 4, 3, 8
IDS = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
CONFIG = K3Config(vocab_size=8, hidden_size=D, layers=1, kda_heads=H, kda_head_dim=K, decay_rank=3, dense_layers=1)
BEFORE = [RecognizeNorm(), RecognizeConv()]


def _fused(module: nn.Module, *args: Tensor, bound: float = 2e-6) -> tuple[Unit, Report]:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return check(FuseKda(), module, *args, before=BEFORE, bound=bound)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("decay", "gate"), [("bounded", "full_rank"), ("softplus", "low_rank")], ids=["bounded", "softplus"]
)
def test_our_layer_becomes_one_op(decay: Any, gate: Any, packed: bool) -> None:
    module = KDA(dataclasses.replace(CONFIG, kda_decay=decay, kda_output_gate=gate))
    args = (torch.randn(B, T, D), IDS) if packed else (torch.randn(B, T, D),)
    unit, report = _fused(module, *args)
    assert counts(unit) == {"kda": 1}
    assert what(report) == [f"kda of 2 heads: {decay} decay per channel, convolutions, sigmoid gated norm"]
    assert not report.near_misses
    left = {str(n.target) for n in unit.graph.nodes if n.op == "call_function"} - {"moec.kda.default"}
    assert left == {"aten.linear.default"}


def test_golden_text() -> None:
    unit, _ = _fused(KDA(CONFIG), torch.randn(B, T, D), IDS)
    assert_golden("kda", graph_text(unit))


def test_bfloat16_and_float64() -> None:
    unit, _ = _fused(KDA(CONFIG).to(torch.bfloat16), torch.randn(B, T, D).bfloat16(), IDS, bound=6e-2)
    assert counts(unit) == {"kda": 1}
    unit, _ = _fused(KDA(CONFIG).double(), torch.randn(B, T, D).double(), IDS, bound=1e-10)
    assert counts(unit) == {"kda": 1}


class DeltaNet(nn.Module):
    """As transformers' Qwen3-Next: one convolution over [q | k | v], a decay per head, a SiLU gate after the norm.

    `change` replaces one of the operands, by name, on the way. gates_itself: the output is its own gate.
    """

    gates_itself = False

    def __init__(self, change: dict[str, Callable[[Tensor], Tensor]] | None = None) -> None:
        super().__init__()
        self.change = change or {}
        size = 2 * H * K + HV * V
        self.qkv = nn.Linear(D, size, bias=False)
        self.conv = nn.Conv1d(size, size, 3, groups=size, padding=2, bias=False)
        self.rest = nn.Linear(D, 2 * HV + HV * V, bias=False)
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(HV)), nn.Parameter(torch.zeros(HV))
        self.norm = nn.Parameter(torch.ones(V))

    def _changed(self, name: str, value: Tensor) -> Tensor:
        return self.change.get(name, lambda given: given)(value)

    def forward(self, x: Tensor) -> Tensor:
        mixed = F.silu(self.conv(self.qkv(x).transpose(1, 2))[..., :T]).transpose(1, 2)
        q, k, v = self._changed("mixed", mixed).split([H * K, H * K, HV * V], dim=-1)
        b, a, z = self.rest(x).split([HV, HV, HV * V], dim=-1)
        g = self._changed("g", -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias))
        q, k = (self._unit(y.reshape(B, T, -1, K)) for y in (q, k))
        beta = self._changed("beta", b.sigmoid())
        o, _ = dialect.delta_rule(q, self._changed("k", k), v.reshape(B, T, -1, V), g, beta, None, None, 0.5)
        o, z = self._changed("o", o).reshape(-1, V), self._changed("z", z).reshape(-1, V)
        z = o if self.gates_itself else z
        o = self.norm * (o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + 1e-6)) * F.silu(z)
        return o.reshape(B, T, -1)

    def _unit(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def test_one_convolution_over_all_is_split() -> None:
    unit, report = _fused(DeltaNet(), torch.randn(B, T, D))
    assert counts(unit) == {"kda": 1}
    assert what(report) == ["kda of 2 to 4 heads: softplus decay per head, convolutions, silu gated norm"]
    assert not report.near_misses


def test_a_convolution_used_elsewhere_stays_outside() -> None:
    class Shared(DeltaNet):
        def forward(self, x: Tensor) -> Tensor:
            seen: list[Tensor] = []
            self.change["mixed"] = lambda mixed: (seen.append(mixed.mean()), mixed)[1]
            return super().forward(x) + seen[0]

    unit, report = _fused(Shared(), torch.randn(B, T, D))
    assert counts(unit) == {"short_conv": 1, "kda": 1}
    assert what(report) == ["kda of 2 to 4 heads: softplus decay per head, silu gated norm"]
    assert "kda without its convolutions: short_conv" in reasons(report)[0]
    assert "is used outside of the stage too" in reasons(report)[0]


def test_documents_of_convolution_and_recurrence_must_agree() -> None:
    class Other(KDA):
        def forward(self, x: Tensor, document_ids: Tensor | None = None) -> Tensor:
            real, dialect.delta_rule = dialect.delta_rule, _without_documents
            try:
                return super().forward(x, document_ids)
            finally:
                dialect.delta_rule = real

    real = dialect.delta_rule

    def _without_documents(*args: Any) -> tuple[Tensor, Tensor]:
        return real(*args[:5], None, *args[6:])

    unit, report = _fused(Other(CONFIG), torch.randn(B, T, D), IDS)
    assert counts(unit) == {"short_conv": 3, "kda": 1}
    assert "convolution and recurrence restart at different documents" in reasons(report)[0]


def test_without_a_norm_the_output_is_raw() -> None:
    unit, report = _fused(DeltaNet({"o": torch.sin}), torch.randn(B, T, D))
    assert counts(unit) == {"kda": 1, "gated_norm": 1}
    assert what(report) == ["kda of 2 to 4 heads: softplus decay per head, convolutions"]


def test_an_output_that_gates_itself_keeps_its_norm_outside() -> None:
    class Itself(DeltaNet):
        gates_itself = True

    unit, report = _fused(Itself(), torch.randn(B, T, D))
    assert counts(unit) == {"kda": 1, "gated_norm": 1}
    assert what(report) == ["kda of 2 to 4 heads: softplus decay per head, convolutions"]


def test_a_norm_in_another_dtype_stays_outside() -> None:
    wide = DeltaNet({"o": Tensor.float, "z": Tensor.float}).bfloat16()
    wide.norm = nn.Parameter(torch.ones(V))
    unit, report = _fused(wide, torch.randn(B, T, D).bfloat16(), bound=6e-2)
    assert counts(unit) == {"kda": 1, "gated_norm": 1}
    assert not report.near_misses


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"g": lambda g: g.clamp(min=-3.0)}, "the decay has an unknown form: "),
        ({"g": lambda g: g + 0.0 * g.exp()}, "the decay has an unknown form"),
        ({"beta": lambda b: 2 * b}, "the write strength is not a sigmoid"),
        ({"k": lambda k: k.sin()}, "k does not come from heads of a projection but from sin"),
        ({"k": lambda k: k * 1.5}, "k does not come from heads of a projection but from mul"),
    ],
)
def test_near_misses(change: dict[str, Callable[[Tensor], Tensor]], reason: str) -> None:
    unit, report = _fused(DeltaNet(change), torch.randn(B, T, D))
    assert reason in "\n".join(reasons(report))
    assert counts(unit)["delta_rule"] == 1
    assert FuseKda().expected(unit) == "1 delta rules are in the graph, none was fused with its stages"


class Stateful(DeltaNet):
    """Starts from a state, or gives back the final one, before its norm is computed."""

    def __init__(self, given: bool, taken: bool) -> None:
        super().__init__()
        self.given, self.taken = given, taken

    def forward(self, x: Tensor) -> Tensor:
        real = dialect.delta_rule
        means = []

        def carrying(*args: Any) -> tuple[Tensor, Tensor]:
            first = x.new_ones(B, HV, K, V) if self.given else None
            o, state = real(*args[:6], first, *args[7:])
            means.append(state.mean())
            return o, state

        dialect.delta_rule = carrying
        try:
            y = super().forward(x)
        finally:
            dialect.delta_rule = real
        return y + means[0] if self.taken else y


@pytest.mark.parametrize(("given", "taken"), [(True, False), (False, True), (True, True)])
def test_states_go_into_the_op(given: bool, taken: bool) -> None:
    unit, report = _fused(Stateful(given, taken), torch.randn(B, T, D))
    assert counts(unit) == {"kda_with_state": 1}
    parts = "softplus decay per head, convolutions, silu gated norm"
    parts += ", from a given state" * given + ", final state" * taken
    assert what(report) == [f"kda of 2 to 4 heads: {parts}"]
    assert not report.near_misses


def test_a_state_used_before_the_inputs_are_there_keeps_the_recurrence() -> None:
    seen: list[Tensor] = []
    real = dialect.delta_rule

    def seeing(*args: Any) -> tuple[Tensor, Tensor]:
        o, state = real(*args)
        seen.append(state.mean())
        return o, state

    dialect.delta_rule = seeing
    try:
        unit, report = _fused(DeltaNet({"z": lambda z: z * seen[-1]}), torch.randn(B, T, D))
    finally:
        dialect.delta_rule = real
    assert counts(unit)["delta_rule"] == 1
    assert "is used before" in "\n".join(reasons(report))


class Rates(DeltaNet):
    """A rate per channel of a decay per head: broadcasts, but is not A_log of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(B, T, HV))


def test_a_rate_of_another_shape_is_refused() -> None:
    _, report = _fused(Rates(), torch.randn(B, T, D))
    assert "the decay has no bias per channel or no rate per head" in "\n".join(reasons(report))
