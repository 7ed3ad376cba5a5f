from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from moec.compiler import dialect
from moec.compiler.dialect import DEFINITIONS
from tests.dialect.contract import assert_as_accurate, backward_args, check_op, documents, leaves_of, rand, run
from tests.dialect.test_delta_rule import recurrence

OPTIONAL = ("conv_q", "conv_k", "conv_v", "output_gate", "norm_weight")


def arguments(
    length: int, *, batch: int = 2, heads: int = 2, value_heads: int = 4, width: int = 3, values: int = 2,
    per_head_gate: bool = False, without: tuple[str, ...] = (), **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    gates = value_heads if per_head_gate else value_heads * width
    given: dict[str, Any] = {
        "q": rand(batch, length, heads * width, seed=1),
        "k": rand(batch, length, heads * width, seed=2),
        "v": rand(batch, length, value_heads * values, seed=3),
        "gate": rand(batch, length, gates, seed=4),
        "beta": rand(batch, length, value_heads, seed=5),
        "A_log": rand(value_heads, seed=6),
        "dt_bias": rand(gates, seed=7),
        "conv_q": rand(heads * width, 4, seed=8),
        "conv_k": rand(heads * width, 4, seed=9),
        "conv_v": rand(value_heads * values, 4, seed=10),
        "output_gate": rand(batch, length, value_heads * values, seed=11),
        "norm_weight": rand(values, seed=12),
        "document_ids": None,
        "heads": heads,
        "value_heads": value_heads,
        "gate_kind": "bounded",
        "lower_bound": -5.0,
        "l2_eps": 1e-6,
        "norm_eps": 1e-5,
        "output_activation": "sigmoid",
        "scale": 0.5,
        "chunk": 16,
    }
    return given | dict.fromkeys(without) | settings


def composition(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, conv_q: Tensor | None,
    conv_k: Tensor | None, conv_v: Tensor | None, output_gate: Tensor | None, norm_weight: Tensor | None,
    document_ids: Tensor | None, heads: int, value_heads: int, gate_kind: str, lower_bound: float, l2_eps: float,
    norm_eps: float, output_activation: str, scale: float, chunk: int = 64, *, token_by_token: bool = True,
) -> Tensor:  # fmt: skip
    """The stage from its parts, the delta rule token by token or as the op."""
    wide = torch.promote_types(v.dtype, torch.float32)
    q, k, v = (
        x if weight is None else dialect.short_conv(x, weight, document_ids)
        for x, weight in ((q, conv_q), (k, conv_k), (v, conv_v))
    )
    q, k = (dialect.l2_norm(x.unflatten(-1, (heads, -1)), l2_eps) for x in (q, k))
    logits = (gate.to(wide) + dt_bias.to(wide)).unflatten(-1, (value_heads, -1))
    rate = A_log.to(wide).exp().unsqueeze(-1)
    bounded = gate_kind == "bounded"
    g = lower_bound * torch.sigmoid(rate * logits) if bounded else -rate * functional.softplus(logits)
    g = g.squeeze(-1) if gate.shape[2] == value_heads else g
    mixer = (q, k, v.unflatten(-1, (value_heads, -1)), g, torch.sigmoid(beta.to(wide)), document_ids, None, scale)
    o = recurrence(*mixer)[0] if token_by_token else dialect.delta_rule(*mixer, chunk)[0]
    if output_gate is not None and norm_weight is not None:
        opening = output_gate.unflatten(-1, (value_heads, -1))
        o = dialect.gated_norm(o, opening, norm_weight, norm_eps, output_activation)
    return o.flatten(2)


CASES = {
    "K3": {},
    "Kimi-Linear": {"gate_kind": "softplus", "value_heads": 2},
    "Gated-DeltaNet": {"gate_kind": "softplus", "per_head_gate": True, "output_activation": "silu"},
    "bare": {"without": OPTIONAL, "per_head_gate": True},
    "keys-convolved": {"without": ("conv_q", "conv_v"), "output_activation": "silu"},
}


@pytest.mark.parametrize("case", CASES)
def test_op(case: str) -> None:
    sizes = {"heads": 1, "value_heads": 2, "width": 2, "values": 2} | CASES[case]
    if case == "K3":
        sizes["document_ids"] = documents([2, 1], [3])
    check_op("kda", tuple(arguments(3, **sizes).values()))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [1, 17, 37])
def test_composition(case: str, length: int) -> None:
    given = tuple(arguments(length, **CASES[case]).values())
    found, expected = run(dialect.kda, given, torch.ones_like), run(composition, given, torch.ones_like)
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-11)


def test_equals_the_composed_ops_in_bfloat16() -> None:
    """Recognising the stage in a graph of its parts changes no output bit."""
    low = {name: value.detach().bfloat16() for name, value in arguments(40).items() if isinstance(value, Tensor)}
    given = arguments(40) | low
    torch.testing.assert_close(dialect.kda(**given), composition(**given, token_by_token=False), rtol=0, atol=0)


def test_documents_are_separate_runs() -> None:
    lengths = [7, 1, 9, 15]
    given = arguments(sum(lengths), document_ids=documents(lengths, lengths))
    outs = []
    for start, length in zip((0, 7, 8, 17), lengths, strict=True):
        part = {
            name: value[:, start : start + length] if isinstance(value, Tensor) and value.dim() == 3 else value
            for name, value in given.items()
        }
        outs.append(dialect.kda(**part | {"document_ids": None}))
    leaves = leaves_of(tuple(given.values()))
    packed, separate = dialect.kda(**given), torch.cat(outs, 1)
    torch.testing.assert_close(packed, separate, atol=1e-12, rtol=1e-12)
    grads = [torch.autograd.grad((out * out).sum(), leaves) for out in (packed, separate)]
    torch.testing.assert_close(*grads, atol=1e-11, rtol=1e-11)


def test_nothing_crosses_a_document_start() -> None:
    given = arguments(20, document_ids=documents([11, 9], [11, 9]))
    out = dialect.kda(**given)
    grads = torch.autograd.grad(out[:, 11:].square().sum(), leaves_of(tuple(given.values())))
    assert all(not bool(grad[:, :11].any()) for grad in grads if grad.dim() == 3)
    with torch.no_grad():
        for name in ("q", "k", "v", "gate", "beta", "output_gate"):
            given[name][:, :11] *= 100
    torch.testing.assert_close(dialect.kda(**given)[:, 11:], out[:, 11:], rtol=0, atol=0)


@pytest.mark.parametrize("gate_kind", ["bounded", "softplus"])
@pytest.mark.parametrize("logit", [-1e4, 1e4])
def test_saturated_gates_stay_finite(gate_kind: str, logit: float) -> None:
    given = arguments(70, gate_kind=gate_kind, chunk=64)
    given["gate"] = torch.full_like(given["gate"], logit)
    given = {n: v.detach().float().requires_grad_() if isinstance(v, Tensor) else v for n, v in given.items()}
    outputs, grads = run(lambda *args: dialect.kda(*args), tuple(given.values()), torch.ones_like)
    assert all(bool(value.isfinite().all()) for value in (*outputs, *grads))


@pytest.mark.parametrize("case", ["K3", "Gated-DeltaNet"])
def test_low_precision(case: str) -> None:
    given = arguments(64, width=16, values=16, **CASES[case])
    wide = ("A_log", "dt_bias", "conv_q", "conv_k", "conv_v", "norm_weight")
    low = {
        name: value.detach().to(torch.float32 if name in wide else torch.bfloat16).requires_grad_()
        for name, value in given.items()
        if isinstance(value, Tensor)
    }
    assert_as_accurate(dialect.kda, composition, tuple((given | low).values()))


def test_gradients_keep_each_dtype() -> None:
    given = arguments(5)
    low = {name: value.detach().bfloat16() for name, value in given.items() if isinstance(value, Tensor)}
    low |= {name: given[name].detach().float() for name in ("A_log", "dt_bias", "norm_weight")}
    args = tuple((given | low).values())
    definition = DEFINITIONS["kda"]
    assert definition.backward is not None
    grads = definition.backward(*backward_args("kda", args))
    assert [grad.dtype for grad in grads] == [arg.dtype for arg in args[:12]]


def test_exported_with_dynamic_length() -> None:
    weights = {n: value.detach() if isinstance(value, Tensor) else value for n, value in arguments(1).items()}

    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, opening: Tensor) -> Tensor:
            tokens = {"q": q, "k": k, "v": v, "gate": gate, "beta": beta, "output_gate": opening}
            return dialect.kda(**weights | tokens)

    def args(length: int) -> tuple[Tensor, ...]:
        given = arguments(length)
        return tuple(given[name].detach() for name in ("q", "k", "v", "gate", "beta", "output_gate"))

    dynamic = [{1: torch.export.Dim("length", min=2, max=512)}] * 6
    exported = torch.export.export(Module(), args(20), dynamic_shapes=dynamic)
    torch.testing.assert_close(exported.module()(*args(33)), Module()(*args(33)))
    (node,) = [node for node in exported.graph.nodes if node.target is DEFINITIONS["kda"].op]
    values = [getattr(arg, "meta", {}).get("val", arg) for arg in node.args]
    assert len(DEFINITIONS["kda"].flops_of(values, node.kwargs).free_symbols) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": rand(2, 4, 7)}, "q has shape"),
        ({"k": rand(2, 4, 8)}, "k has shape"),
        ({"v": rand(2, 4, 9)}, "v has shape"),
        ({"gate": rand(2, 4, 5)}, "gate has shape"),
        ({"beta": rand(2, 4, 3)}, "beta has shape"),
        ({"A_log": rand(3)}, "A_log has shape"),
        ({"dt_bias": rand(4)}, "dt_bias has shape"),
        ({"conv_v": rand(8, 1, 4)}, "conv_v has shape"),
        ({"norm_weight": None}, "norm_weight is None"),
        ({"document_ids": documents([4])}, "document_ids has shape"),
        ({"value_heads": 3}, "value_heads is 3"),
        ({"gate_kind": "tanh"}, "gate_kind is 'tanh'"),
        ({"output_activation": "relu"}, "output_activation is 'relu'"),
        ({"chunk": 24}, "chunk is 24"),
    ],
)
def test_mistakes_name_op_and_argument(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"moec::kda: {message}"):
        dialect.kda(**arguments(4) | change)
