"""Normalisations: RMS norm, gated RMS norm, L2 norm. Each reduces over the last dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moec.compiler.dialect._define import asked_for, define_op, math_dtype, only_asked_for
from moec.compiler.dialect.activation import gate_activation, gate_activation_slope


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False, cast_before_weight: bool = False
) -> Tensor:
    """`x * rsqrt(mean(x^2) + eps) * weight` over the last dimension.

    x [..., D]; weight [D]. Computed in float32 (float64 for float64), cast once to the dtype of x at the end.
    zero_centered: multiply by 1 + weight instead. cast_before_weight: cast the normalised value to the dtype of x
    before it meets the weight, as Hugging Face's LLaMA-style norms do; the result then has the promoted dtype of
    both. Returns [..., D].
    """
    _check_width("rms_norm", x, weight=weight)
    return torch.ops.moec.rms_norm(x, weight, eps, zero_centered, cast_before_weight)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str = "sigmoid", zero_centered: bool = False
) -> Tensor:
    """`act(gate) * x * rsqrt(mean(x^2) + eps) * weight`: the output norm of linear attention layers.

    x, gate [..., D]; weight [D]; activation "sigmoid" or "silu". float32 math, one cast to the dtype of x.
    Returns [..., D].
    """
    _check_width("gated_norm", x, gate=gate, weight=weight)
    if gate.shape != x.shape:
        raise ValueError(f"moec::gated_norm: gate has shape {tuple(gate.shape)}, x has {tuple(x.shape)}")
    if activation not in ("sigmoid", "silu"):
        raise ValueError(f"moec::gated_norm: activation is {activation!r}, expected 'sigmoid' or 'silu'")
    return torch.ops.moec.gated_norm(x, gate, weight, eps, activation, zero_centered)


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """`x * rsqrt(sum(x^2) + eps)` over the last dimension; x [..., D], float32 math, result in the dtype of x."""
    if x.dim() < 1:
        raise ValueError("moec::l2_norm: x has no dimension to normalise over")
    return torch.ops.moec.l2_norm(x, eps)


def _check_width(op: str, x: Tensor, **others: Tensor) -> None:
    for name, other in others.items():
        if x.dim() < 1 or other.dim() < 1 or other.shape[-1] != x.shape[-1]:
            raise ValueError(f"moec::{op}: {name} has shape {tuple(other.shape)}, x has {tuple(x.shape)}")
    if others["weight"].dim() != 1:
        raise ValueError(f"moec::{op}: weight has shape {tuple(others['weight'].shape)}, expected one dimension")


def _unit_rms(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) and 1 / rms(x), in the math dtype."""
    wide = x.to(math_dtype(x.dtype))
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * inverse, inverse


def _unit_rms_backward(grad: Tensor, unit: Tensor, inverse: Tensor) -> Tensor:
    return inverse * (grad - unit * (grad * unit).mean(-1, keepdim=True))


def _scale(weight: Tensor, zero_centered: bool, dtype: torch.dtype) -> Tensor:
    wide = weight.to(dtype)
    return 1 + wide if zero_centered else wide


def _sum_to_weight(grad: Tensor, weight: Tensor) -> Tensor:
    return grad.reshape(-1, weight.shape[0]).sum(0).to(weight.dtype)


def _rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool, cast_before_weight: bool) -> Tensor:
    unit, _ = _unit_rms(x, eps)
    if cast_before_weight:
        return (unit.to(x.dtype) * (1 + weight if zero_centered else weight)).contiguous()
    return (unit * _scale(weight, zero_centered, unit.dtype)).to(x.dtype).contiguous()


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float, zero_centered: bool, cast_before_weight: bool) -> Tensor:
    dtype = torch.promote_types(x.dtype, weight.dtype) if cast_before_weight else x.dtype
    return x.new_empty(x.shape, dtype=dtype)


def _rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    zero_centered: bool,
    cast_before_weight: bool,
    needed: Sequence[bool] | None,
) -> tuple[Tensor, Tensor]:
    of_x, of_weight = asked_for(needed, 2)
    unit, inverse = _unit_rms(x, eps)
    grad = grad.to(unit.dtype)
    grad_x, grad_weight = x.new_empty(0), weight.new_empty(0)
    if of_x:
        scaled = grad * _scale(weight, zero_centered, unit.dtype)
        grad_x = _unit_rms_backward(scaled, unit, inverse).to(x.dtype).contiguous()
    if of_weight:
        seen = unit.to(x.dtype).to(unit.dtype) if cast_before_weight else unit
        grad_weight = _sum_to_weight(grad * seen, weight)
    return grad_x, grad_weight


def gated_norm_forward(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str, zero_centered: bool
) -> Tensor:
    unit, _ = _unit_rms(x, eps)
    opening = gate_activation(gate.to(unit.dtype), activation)
    return (unit * _scale(weight, zero_centered, unit.dtype) * opening).to(x.dtype).contiguous()


def gated_norm_backward(
    grad: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    activation: str,
    zero_centered: bool,
    needed: Sequence[bool] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    of_x, of_gate, of_weight = asked_for(needed, 3)
    unit, inverse = _unit_rms(x, eps)
    grad, wide_gate = grad.to(unit.dtype), gate.to(unit.dtype)
    scale = _scale(weight, zero_centered, unit.dtype)
    opening, slope = gate_activation_slope(wide_gate, activation)
    grad_unit = grad * opening
    grad_x, grad_gate, grad_weight = x.new_empty(0), gate.new_empty(0), weight.new_empty(0)
    if of_gate:
        grad_gate = (grad * unit * scale * slope).to(gate.dtype).contiguous()
    if of_x:
        grad_x = _unit_rms_backward(grad_unit * scale, unit, inverse).to(x.dtype).contiguous()
    if of_weight:
        grad_weight = _sum_to_weight(grad_unit * unit, weight)
    return grad_x, grad_gate, grad_weight


def _l2_norm(x: Tensor, eps: float) -> Tensor:
    unit, _ = unit_l2(x, eps)
    return unit.to(x.dtype).contiguous()


def _l2_norm_backward(grad: Tensor, x: Tensor, eps: float) -> Tensor:
    unit, inverse = unit_l2(x, eps)
    return unit_l2_backward(grad.to(unit.dtype), unit, inverse).to(x.dtype).contiguous()


def unit_l2(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / |x| and 1 / |x| with |x| = sqrt(sum(x^2) + eps), in the math dtype."""
    wide = x.to(math_dtype(x.dtype))
    inverse = torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
    return wide * inverse, inverse


def unit_l2_backward(grad: Tensor, unit: Tensor, inverse: Tensor) -> Tensor:
    """Gradient of x given the gradient of x / |x| and both results of `unit_l2`."""
    return inverse * (grad - unit * (grad * unit).sum(-1, keepdim=True))


def _like(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Empty gradients for the tensors among a backward op's arguments that follow the incoming gradient."""
    *values, needed = inputs
    return only_asked_for(needed, [value.new_empty(value.shape) for value in values if isinstance(value, Tensor)])


define_op(
    "rms_norm",
    "(Tensor x, Tensor weight, float eps, bool zero_centered=False, bool cast_before_weight=False) -> (Tensor y)",
    _rms_norm,
    _rms_norm_fake,
    backward_schema="(Tensor grad_y, Tensor x, Tensor weight, float eps, bool zero_centered=False, "
    "bool cast_before_weight=False, bool[]? needed=None) -> (Tensor grad_x, Tensor grad_weight)",
    backward=_rms_norm_backward,
    backward_fake=_like,
    shapes={"x": "... D", "weight": "D"},
    flops="4*N*D",
    backward_flops="N*D*(3 + 4*need_x + 2*need_weight)",
    source="Root Mean Square Layer Normalization, arXiv:1910.07467",
    summary="RMS norm over the last dimension",
)
define_op(
    "gated_norm",
    "(Tensor x, Tensor gate, Tensor weight, float eps, str activation, bool zero_centered=False) -> (Tensor y)",
    gated_norm_forward,
    lambda x, gate, weight, eps, activation, zero_centered: x.new_empty(x.shape),
    backward_schema="(Tensor grad_y, Tensor x, Tensor gate, Tensor weight, float eps, str activation, "
    "bool zero_centered=False, bool[]? needed=None) -> (Tensor grad_x, Tensor grad_gate, Tensor grad_weight)",
    backward=gated_norm_backward,
    backward_fake=_like,
    shapes={"x": "... D", "gate": "... D", "weight": "D"},
    flops="8*N*D",
    backward_flops="N*D*(7 + 5*need_x + 4*need_gate + 2*need_weight)",
    source="Kimi Linear, arXiv:2510.26692, output gate",
    summary="RMS norm times an activated gate",
)
define_op(
    "l2_norm",
    "(Tensor x, float eps) -> (Tensor y)",
    _l2_norm,
    lambda x, eps: x.new_empty(x.shape),
    backward_schema="(Tensor grad_y, Tensor x, float eps) -> (Tensor grad_x)",
    backward=_l2_norm_backward,
    backward_fake=lambda grad, x, eps: x.new_empty(x.shape),
    shapes={"x": "... D"},
    flops="3*N*D",
    backward_flops="8*N*D",
    source="Gated Delta Networks, arXiv:2412.06464, normalised keys and queries",
    summary="L2 norm over the last dimension",
)
