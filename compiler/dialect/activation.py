"""Elementwise gates: the activation of a gated MLP, and a sigmoid output gate."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from moec.compiler.dialect._define import define_op, math_dtype


def gated_mlp_act(gate: Tensor, up: Tensor, kind: str, a: float = 0.0, b: float = 0.0) -> Tensor:
    """`act(gate) * up`, the elementwise middle of a gated MLP.

    gate, up [..., I]; float32 math (float64 for float64), one cast to the dtype of gate. Returns [..., I]. kind:

    - "silu":  gate * sigmoid(gate) * up
    - "gelu", "gelu_tanh": exact and tanh-approximated GELU
    - "relu2": relu(gate)^2 * up
    - "situ":  a tanh(gate / a) sigmoid(gate) * b tanh(up / b), bounded by a * b in magnitude
    - "clamped_swiglu": with g = min(gate, b), u = clamp(up, -b, b): g sigmoid(a g) * (u + 1)
    """
    if gate.shape != up.shape:
        raise ValueError(f"moec::gated_mlp_act: up has shape {tuple(up.shape)}, gate has {tuple(gate.shape)}")
    if kind not in KINDS:
        raise ValueError(f"moec::gated_mlp_act: kind is {kind!r}, expected one of {', '.join(KINDS)}")
    if kind in ("situ", "clamped_swiglu") and not (a > 0 and b > 0):
        raise ValueError(f"moec::gated_mlp_act: kind {kind!r} needs a > 0 and b > 0, got a={a}, b={b}")
    return torch.ops.moec.gated_mlp_act(gate, up, kind, a, b)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """`x * sigmoid(gate)`; x, gate [..., D]; float32 math, result in the dtype of x."""
    if gate.shape != x.shape:
        raise ValueError(f"moec::sigmoid_gate: gate has shape {tuple(gate.shape)}, x has {tuple(x.shape)}")
    return torch.ops.moec.sigmoid_gate(x, gate)


def gate_activation(gate: Tensor, kind: str) -> Tensor:
    """sigmoid(gate) or silu(gate), in the dtype of gate."""
    return torch.sigmoid(gate) if kind == "sigmoid" else functional.silu(gate)


def gate_activation_slope(gate: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The activation and its derivative with respect to gate."""
    opening = torch.sigmoid(gate)
    if kind == "sigmoid":
        return opening, opening * (1 - opening)
    return gate * opening, _silu_slope(gate, opening)


def _silu_slope(x: Tensor, sigmoid: Tensor) -> Tensor:
    return sigmoid * (1 + x * (1 - sigmoid))


# A rule maps (gate, up, a, b) in the math dtype to the two factors whose product is the result. Its partner, for the
# backward, maps them to both factors and to their derivatives, the first with respect to gate, the second with respect
# to up; a derivative of one everywhere is None.
Factors = tuple[Tensor, Tensor]
Slopes = tuple[Tensor, Tensor, Tensor, Tensor | None]
Rule = Callable[[Tensor, Tensor, float, float], Factors]
SlopeRule = Callable[[Tensor, Tensor, float, float], Slopes]


def _silu(gate: Tensor, up: Tensor, a: float, b: float) -> Factors:
    return functional.silu(gate), up


def _silu_slopes(gate: Tensor, up: Tensor, a: float, b: float) -> Slopes:
    sigmoid = torch.sigmoid(gate)
    return gate * sigmoid, up, _silu_slope(gate, sigmoid), None


def _gelu(gate: Tensor, up: Tensor, a: float, b: float) -> Factors:
    return functional.gelu(gate), up


def _gelu_slopes(gate: Tensor, up: Tensor, a: float, b: float) -> Slopes:
    density = torch.exp(-0.5 * gate.square()) / math.sqrt(2 * math.pi)
    cumulative = 0.5 * (1 + torch.erf(gate / math.sqrt(2)))
    return gate * cumulative, up, cumulative + gate * density, None


_GELU_SCALE, _GELU_CUBIC = math.sqrt(2 / math.pi), 0.044715


def _gelu_tanh(gate: Tensor, up: Tensor, a: float, b: float) -> Factors:
    return functional.gelu(gate, approximate="tanh"), up


def _gelu_tanh_slopes(gate: Tensor, up: Tensor, a: float, b: float) -> Slopes:
    tanh = torch.tanh(_GELU_SCALE * (gate + _GELU_CUBIC * gate**3))
    half = 0.5 * (1 + tanh)
    inner = _GELU_SCALE * (1 + 3 * _GELU_CUBIC * gate.square())
    return gate * half, up, half + 0.5 * gate * (1 - tanh.square()) * inner, None


def _relu2(gate: Tensor, up: Tensor, a: float, b: float) -> Factors:
    return functional.relu(gate).square(), up


def _relu2_slopes(gate: Tensor, up: Tensor, a: float, b: float) -> Slopes:
    positive = functional.relu(gate)
    return positive.square(), up, 2 * positive, None


def _situ(gate: Tensor, up: Tensor, a: float, b: float) -> Factors:
    return (gate / a).tanh_().mul_(a).mul_(torch.sigmoid(gate)), (up / b).tanh_().mul_(b)


def _situ_slopes(gate: Tensor, up: Tensor, a: float, b: float) -> Slopes:
    tanh, sigmoid, bound = torch.tanh(gate / a), torch.sigmoid(gate), torch.tanh(up / b)
    left = (tanh * a).mul_(sigmoid)
    # d/dg [a tanh(g/a) s] = (1 - tanh^2) s + a tanh s (1 - s)
    slope = left.addcmul(left, sigmoid, value=-1).add_(sigmoid).addcmul_(tanh.square_(), sigmoid, value=-1)
    return left, bound * b, slope, bound.square_().neg_().add_(1)


def _clamped_swiglu(gate: Tensor, up: Tensor, a: float, b: float) -> Factors:
    gate, up = gate.clamp(max=b), up.clamp(-b, b)
    return gate * torch.sigmoid(a * gate), up + 1


def _clamped_swiglu_slopes(gate: Tensor, up: Tensor, a: float, b: float) -> Slopes:
    inside_gate, inside_up = gate <= b, (up >= -b) & (up <= b)
    gate, up = gate.clamp(max=b), up.clamp(-b, b)
    sigmoid = torch.sigmoid(a * gate)
    slope = sigmoid * (1 + a * gate * (1 - sigmoid))
    return gate * sigmoid, up + 1, slope.mul_(inside_gate), inside_up.to(up.dtype)


_RULES: dict[str, tuple[Rule, SlopeRule]] = {
    "silu": (_silu, _silu_slopes),
    "gelu": (_gelu, _gelu_slopes),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_slopes),
    "relu2": (_relu2, _relu2_slopes),
    "situ": (_situ, _situ_slopes),
    "clamped_swiglu": (_clamped_swiglu, _clamped_swiglu_slopes),
}
KINDS = tuple(_RULES)


def _gated_mlp_act(gate: Tensor, up: Tensor, kind: str, a: float, b: float) -> Tensor:
    dtype = math_dtype(gate.dtype)
    left, right = _RULES[kind][0](gate.to(dtype), up.to(dtype), a, b)
    return (left * right).to(gate.dtype).contiguous()


def _gated_mlp_act_backward(
    grad: Tensor, gate: Tensor, up: Tensor, kind: str, a: float, b: float
) -> tuple[Tensor, Tensor]:
    dtype = math_dtype(gate.dtype)
    left, right, left_slope, right_slope = _RULES[kind][1](gate.to(dtype), up.to(dtype), a, b)
    grad = grad.to(dtype)
    grad_left, grad_right = grad * right, grad * left
    grad_up = grad_right if right_slope is None else grad_right.mul_(right_slope)
    return grad_left.mul_(left_slope).to(gate.dtype).contiguous(), grad_up.to(up.dtype).contiguous()


def _sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    dtype = math_dtype(x.dtype)
    return (x.to(dtype) * torch.sigmoid(gate.to(dtype))).to(x.dtype).contiguous()


def _sigmoid_gate_backward(grad: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    dtype = math_dtype(x.dtype)
    opening, slope = gate_activation_slope(gate.to(dtype), "sigmoid")
    grad = grad.to(dtype)
    return (grad * opening).to(x.dtype).contiguous(), (grad * x.to(dtype) * slope).to(gate.dtype).contiguous()


define_op(
    "gated_mlp_act",
    "(Tensor gate, Tensor up, str kind, float a=0., float b=0.) -> (Tensor y)",
    _gated_mlp_act,
    lambda gate, up, kind, a, b: gate.new_empty(gate.shape),
    backward_schema="(Tensor grad_y, Tensor gate, Tensor up, str kind, float a=0., float b=0.) "
    "-> (Tensor grad_gate, Tensor grad_up)",
    backward=_gated_mlp_act_backward,
    backward_fake=lambda grad, gate, up, kind, a, b: (gate.new_empty(gate.shape), up.new_empty(up.shape)),
    shapes={"gate": "... I", "up": "... I"},
    flops="8*N*I",
    backward_flops="14*N*I",
    source="GLU Variants Improve Transformer, arXiv:2002.05202; SiTU: Kimi K3 technical report, 2.3.2",
    summary="activated gate times up projection",
)
define_op(
    "sigmoid_gate",
    "(Tensor x, Tensor gate) -> (Tensor y)",
    _sigmoid_gate,
    lambda x, gate: x.new_empty(x.shape),
    backward_schema="(Tensor grad_y, Tensor x, Tensor gate) -> (Tensor grad_x, Tensor grad_gate)",
    backward=_sigmoid_gate_backward,
    backward_fake=lambda grad, x, gate: (x.new_empty(x.shape), gate.new_empty(gate.shape)),
    shapes={"x": "... D", "gate": "... D"},
    flops="5*N*D",
    backward_flops="9*N*D",
    source="Gated Attention for Large Language Models, arXiv:2505.06708",
    summary="sigmoid output gate",
)
