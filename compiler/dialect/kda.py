"""The whole token-mixing stage of a Kimi Delta Attention or Gated DeltaNet layer, between its projections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from moec.compiler.dialect._define import asked_for, define_op, math_dtype, only_asked_for
from moec.compiler.dialect.conv import conv_backward, mix
from moec.compiler.dialect.delta_rule import gradients, prepare, read_out
from moec.compiler.dialect.norm import gated_norm_backward, gated_norm_forward, unit_l2, unit_l2_backward


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    conv_q: Tensor | None,
    conv_k: Tensor | None,
    conv_v: Tensor | None,
    output_gate: Tensor | None,
    norm_weight: Tensor | None,
    document_ids: Tensor | None,
    heads: int,
    value_heads: int,
    gate_kind: str,
    lower_bound: float,
    l2_eps: float,
    norm_eps: float,
    output_activation: str,
    scale: float,
    chunk: int = 64,
) -> Tensor:
    """Convolutions, normalised q and k, decay and write gates, delta rule, gated norm; returns [B, T, HV * V].

    q, k [B, T, H * K] and v [B, T, HV * V] straight from their projections, H = heads, HV = value_heads, a multiple
    of H; conv_q, conv_k [H * K, W] and conv_v [HV * V, W] or None for no convolution and no SiLU.
    gate: raw decay logits, [B, T, HV * K] per channel or [B, T, HV] per head; beta [B, T, HV]: logits of the write
    strength; A_log [HV]; dt_bias of the gate's width. With z = gate + dt_bias and a = exp(A_log), the log decay is
    lower_bound * sigmoid(a z) for gate_kind "bounded" and -a * softplus(z) for "softplus".
    output_gate [B, T, HV * V] and norm_weight [V] (both or neither): `act(output_gate) * rms_norm(o) * norm_weight`
    per head, act being output_activation, "sigmoid" or "silu".
    document_ids int64 [B, T]: convolution and state restart at every document; None when each row is one document.
    Result in the dtype of v; each stage computes in float32 and q, k, v, o are rounded to their dtype between stages.
    """
    check(
        "kda", q, k, v, gate, beta, A_log, dt_bias, conv_q, conv_k, conv_v, output_gate, norm_weight, document_ids,
        heads, value_heads, gate_kind, output_activation, chunk,
    )  # fmt: skip
    return torch.ops.moec.kda(
        q, k, v, gate, beta, A_log, dt_bias, conv_q, conv_k, conv_v, output_gate, norm_weight, document_ids, heads,
        value_heads, gate_kind, lower_bound, l2_eps, norm_eps, output_activation, scale, chunk,
    )  # fmt: skip


def check(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    conv_q: Tensor | None,
    conv_k: Tensor | None,
    conv_v: Tensor | None,
    output_gate: Tensor | None,
    norm_weight: Tensor | None,
    document_ids: Tensor | None,
    heads: int,
    value_heads: int,
    gate_kind: str,
    output_activation: str,
    chunk: int,
) -> None:
    """ValueError that names the op and the argument that does not fit the others."""

    def fail(name: str, value: object, expected: str) -> None:
        found = f"has shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"is {value!r}"
        raise ValueError(f"moec::{op}: {name} {found}, expected {expected}")

    if heads < 1 or value_heads < 1 or value_heads % heads:
        fail("value_heads", value_heads, f"a positive multiple of heads={heads}")
    if q.dim() != 3 or q.shape[2] % heads:
        fail("q", q, f"[B, T, a multiple of {heads}]")
    if v.dim() != 3 or v.shape[:2] != q.shape[:2] or v.shape[2] % value_heads:
        fail("v", v, f"[{q.shape[0]}, {q.shape[1]}, a multiple of {value_heads}]")
    if gate.dim() != 3 or gate.shape[2] not in (value_heads, value_heads * (q.shape[2] // heads)):
        fail("gate", gate, f"[B, T, {value_heads}] or [B, T, {value_heads * (q.shape[2] // heads)}]")
    leading = tuple(q.shape[:2])
    shapes: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
        ("k", k, tuple(q.shape)),
        ("gate", gate, (*leading, gate.shape[2])),
        ("beta", beta, (*leading, value_heads)),
        ("A_log", A_log, (value_heads,)),
        ("dt_bias", dt_bias, (gate.shape[2],)),
        ("output_gate", output_gate, tuple(v.shape)),
        ("norm_weight", norm_weight, (v.shape[2] // value_heads,)),
        ("document_ids", document_ids, leading),
    ]
    for name, value, expected in shapes:
        if value is not None and tuple(value.shape) != expected:
            fail(name, value, str(list(expected)))
    for name, value, width in (
        ("conv_q", conv_q, q.shape[2]),
        ("conv_k", conv_k, q.shape[2]),
        ("conv_v", conv_v, v.shape[2]),
    ):
        if value is not None and (value.dim() != 2 or value.shape[0] != width):
            fail(name, value, f"[{width}, W]")
    if (output_gate is None) != (norm_weight is None):
        missing = "output_gate" if output_gate is None else "norm_weight"
        fail(missing, None, "a tensor, because output_gate and norm_weight come together")
    if gate_kind not in ("bounded", "softplus"):
        fail("gate_kind", gate_kind, "'bounded' or 'softplus'")
    if output_activation not in ("sigmoid", "silu"):
        fail("output_activation", output_activation, "'sigmoid' or 'silu'")
    if chunk < 1 or chunk & (chunk - 1):
        fail("chunk", chunk, "a power of two")


class _Decay(NamedTuple):
    """The log decay and what its backward needs, in the math dtype, by value head: D is K or 1."""

    g: Tensor  # [B, T, HV, D]
    logits: Tensor  # [B, T, HV, D]: gate + dt_bias
    rate: Tensor  # [HV, 1]: exp(A_log)
    opening: Tensor | None  # sigmoid(rate * logits), bounded gate only


def _decay(
    gate: Tensor, A_log: Tensor, dt_bias: Tensor, value_heads: int, gate_kind: str, lower_bound: float
) -> _Decay:
    dtype = math_dtype(gate.dtype)
    logits = (gate.to(dtype) + dt_bias.to(dtype)).unflatten(-1, (value_heads, -1))
    rate = A_log.to(dtype).exp().unsqueeze(-1)
    if gate_kind == "bounded":
        opening = torch.sigmoid(rate * logits)
        return _Decay(lower_bound * opening, logits, rate, opening)
    return _Decay(-rate * functional.softplus(logits), logits, rate, None)


def _decay_backward(grad: Tensor, decay: _Decay, lower_bound: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate [B, T, HV * D], A_log and dt_bias, in the math dtype."""
    if decay.opening is not None:
        grad_logits = grad * (lower_bound * decay.rate) * decay.opening * (1 - decay.opening)
        grad_rate = (grad_logits * decay.logits).sum((0, 1, 3))
    else:
        grad_logits = -grad * decay.rate * torch.sigmoid(decay.logits)
        grad_rate = (grad * decay.g).sum((0, 1, 3))
    return grad_logits.flatten(2), grad_rate, grad_logits.sum((0, 1)).flatten()


class _Stages(NamedTuple):
    """Everything between the inputs and the delta rule."""

    mixed: list[Tensor | None]  # q, k, v after their convolution and before SiLU
    q: Tensor  # [B, T, H, K], normalised
    k: Tensor
    v: Tensor  # [B, T, HV, V]
    decay: _Decay
    g: Tensor  # [B, T, HV, K] or [B, T, HV]
    beta: Tensor  # [B, T, HV], in (0, 1), math dtype
    unit_q: tuple[Tensor, Tensor]
    unit_k: tuple[Tensor, Tensor]


def _stages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    conv_q: Tensor | None,
    conv_k: Tensor | None,
    conv_v: Tensor | None,
    document_ids: Tensor | None,
    heads: int,
    value_heads: int,
    gate_kind: str,
    lower_bound: float,
    l2_eps: float,
) -> _Stages:
    pairs = ((q, conv_q), (k, conv_k), (v, conv_v))
    mixed = [None if weight is None else mix(value, weight, document_ids) for value, weight in pairs]
    q, k, v = (
        value if pre is None else functional.silu(pre).to(value.dtype)
        for (value, _), pre in zip(pairs, mixed, strict=True)
    )
    unit_q, unit_k = (unit_l2(value.unflatten(-1, (heads, -1)), l2_eps) for value in (q, k))
    decay = _decay(gate, A_log, dt_bias, value_heads, gate_kind, lower_bound)
    return _Stages(
        mixed=mixed,
        q=unit_q[0].to(q.dtype),
        k=unit_k[0].to(k.dtype),
        v=v.unflatten(-1, (value_heads, -1)),
        decay=decay,
        g=decay.g.squeeze(-1) if gate.shape[2] == value_heads else decay.g,
        beta=torch.sigmoid(beta.to(math_dtype(beta.dtype))),
        unit_q=unit_q,
        unit_k=unit_k,
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    conv_q: Tensor | None,
    conv_k: Tensor | None,
    conv_v: Tensor | None,
    output_gate: Tensor | None,
    norm_weight: Tensor | None,
    document_ids: Tensor | None,
    heads: int,
    value_heads: int,
    gate_kind: str,
    lower_bound: float,
    l2_eps: float,
    norm_eps: float,
    output_activation: str,
    scale: float,
    chunk: int,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y and the final state [B, HV, K, V], in the math dtype."""
    stages = _stages(
        q, k, v, gate, beta, A_log, dt_bias, conv_q, conv_k, conv_v, document_ids, heads, value_heads, gate_kind,
        lower_bound, l2_eps,
    )  # fmt: skip
    mixer = prepare(stages.q, stages.k, stages.v, stages.g, stages.beta, document_ids, initial_state, scale, chunk)
    o = read_out(mixer, v.dtype)
    if output_gate is not None and norm_weight is not None:
        opening = output_gate.unflatten(-1, (value_heads, -1))
        o = gated_norm_forward(o, opening, norm_weight, norm_eps, output_activation, False)
    return o.flatten(2), mixer.final_state


def backward(
    grad_y: Tensor,
    grad_final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    conv_q: Tensor | None,
    conv_k: Tensor | None,
    conv_v: Tensor | None,
    output_gate: Tensor | None,
    norm_weight: Tensor | None,
    document_ids: Tensor | None,
    heads: int,
    value_heads: int,
    gate_kind: str,
    lower_bound: float,
    l2_eps: float,
    norm_eps: float,
    output_activation: str,
    scale: float,
    chunk: int,
    initial_state: Tensor | None = None,
    needed: Sequence[bool] | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of the twelve tensors up to norm_weight, and of the initial state (empty if that is None)."""
    flags = asked_for(needed, 13)
    stages = _stages(
        q, k, v, gate, beta, A_log, dt_bias, conv_q, conv_k, conv_v, document_ids, heads, value_heads, gate_kind,
        lower_bound, l2_eps,
    )  # fmt: skip
    inputs = (stages.q, stages.k, stages.v, stages.g, stages.beta)
    mixer = prepare(*inputs, document_ids, initial_state, scale, chunk)
    grad_o = grad_y.unflatten(-1, (value_heads, -1))
    grad_output_gate, grad_norm_weight = v.new_empty(0), v.new_empty(0)
    if output_gate is not None and norm_weight is not None:
        o = read_out(mixer, v.dtype)
        opening = output_gate.unflatten(-1, (value_heads, -1))
        grad_o, grad_output_gate, grad_norm_weight = gated_norm_backward(
            grad_o, o, opening, norm_weight, norm_eps, output_activation, False, (True, flags[10], flags[11])
        )
    grad_unit_q, grad_unit_k, grad_v, grad_g, grad_beta, grad_initial_state = gradients(
        mixer, grad_o, grad_final_state, *inputs, initial_state, scale
    )
    grad_gate, grad_A_log, grad_dt_bias = _decay_backward(grad_g.view(stages.decay.g.shape), stages.decay, lower_bound)
    grad_beta = grad_beta * stages.beta * (1 - stages.beta)
    grad_q, grad_k = (
        unit_l2_backward(grad.to(unit[0].dtype), *unit).to(value.dtype).flatten(2)
        for grad, unit, value in ((grad_unit_q, stages.unit_q, q), (grad_unit_k, stages.unit_k, k))
    )
    grads, grad_convs = [], []
    convolutions = ((grad_q, q, conv_q), (grad_k, k, conv_k), (grad_v.flatten(2), v, conv_v))
    for index, ((grad, value, weight), mixed) in enumerate(zip(convolutions, stages.mixed, strict=True)):
        grad_weight, asked = value.new_empty(0), (flags[index], flags[7 + index])
        if weight is not None:
            grad, grad_weight = conv_backward(grad, value, weight, document_ids, "silu", asked, mixed)
        grads.append(grad)
        grad_convs.append(grad_weight)
    found = (
        *grads,
        grad_gate.to(gate.dtype).contiguous(),
        grad_beta.to(beta.dtype),
        grad_A_log.to(A_log.dtype),
        grad_dt_bias.to(dt_bias.dtype),
        *grad_convs,
        grad_output_gate.flatten(2) if grad_output_gate.dim() > 2 else grad_output_gate,
        grad_norm_weight,
        grad_initial_state,
    )
    return only_asked_for(needed, found)


def _kda(*arguments: Any) -> Tensor:
    return forward(*arguments)[0]


def _kda_backward(grad_y: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *given, needed = arguments
    given += [None, None if needed is None else [*needed, True]]
    return backward(grad_y, None, *given)[:12]


def _fake(*arguments: Any) -> Tensor:
    v = arguments[2]
    return v.new_empty(v.shape)


def backward_fake(grad_y: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Empty gradients of the first twelve arguments, those that `needed`, the last one, asks for."""
    v = arguments[2]
    like = [v.new_empty(0) if value is None else value.new_empty(value.shape) for value in arguments[:12]]
    return only_asked_for(arguments[-1], like)


ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor gate, Tensor beta, Tensor A_log, Tensor dt_bias, Tensor? conv_q, "
    "Tensor? conv_k, Tensor? conv_v, Tensor? output_gate, Tensor? norm_weight, Tensor? document_ids, int heads, "
    "int value_heads, str gate_kind, float lower_bound, float l2_eps, float norm_eps, str output_activation, "
    "float scale, int chunk=64"
)
GRADIENTS = (
    "Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_gate, Tensor grad_beta, Tensor grad_A_log, "
    "Tensor grad_dt_bias, Tensor grad_conv_q, Tensor grad_conv_k, Tensor grad_conv_v, Tensor grad_output_gate, "
    "Tensor grad_norm_weight"
)
SHAPES = {
    "q": "B T P",
    "k": "B T P",
    "v": "B T R",
    "gate": "B T G",
    "beta": "B T HV",
    "A_log": "HV",
    "dt_bias": "G",
    "conv_q": "P W",
    "conv_k": "P W",
    "conv_v": "R W",
    "output_gate": "B T R",
    "document_ids": "B T",
}
# K and V per head are not dimensions of the projections, so the cost is in P = H * K and R = HV * V.
FLOPS = "B*T*(6*P*R/heads + chunk*(3*P*value_heads/heads + 2*R) + 12*(2*P + R) + 8*G + 8*R)"
BACKWARD_FLOPS = "B*T*(20*P*R/heads + chunk*(12*P*value_heads/heads + 8*R) + 36*(2*P + R) + 16*G + 26*R)"

define_op(
    "kda",
    f"({ARGUMENTS}) -> (Tensor y)",
    _kda,
    _fake,
    backward_schema=f"(Tensor grad_y, {ARGUMENTS}, bool[]? needed=None) -> ({GRADIENTS})",
    backward=_kda_backward,
    backward_fake=backward_fake,
    shapes=SHAPES,
    flops=FLOPS,
    backward_flops=BACKWARD_FLOPS,
    source="Kimi Linear, arXiv:2510.26692; Kimi K3 technical report, 2.1",
    summary="token mixing of a KDA or Gated DeltaNet layer between its projections",
)
