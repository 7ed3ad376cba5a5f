"""Short causal depthwise convolution that restarts at every document."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from moec.compiler.dialect._define import asked_for, define_op, math_dtype, only_asked_for
from moec.compiler.dialect.activation import gate_activation_slope


def short_conv(x: Tensor, weight: Tensor, document_ids: Tensor | None = None, activation: str = "silu") -> Tensor:
    """`act(sum_j weight[:, j] * x[t - W + 1 + j])`: tokens before the start of t's document count as zero.

    x [B, T, C]; weight [C, W]; document_ids int64 [B, T], non-decreasing along T, or None when each row is one
    document; activation "silu" or "none". float32 math, result [B, T, C] in the dtype of x.
    """
    if x.dim() != 3:
        raise ValueError(f"moec::short_conv: x has shape {tuple(x.shape)}, expected [B, T, C]")
    if weight.dim() != 2 or weight.shape[0] != x.shape[2]:
        raise ValueError(f"moec::short_conv: weight has shape {tuple(weight.shape)}, expected [{x.shape[2]}, W]")
    if document_ids is not None and document_ids.shape != x.shape[:2]:
        raise ValueError(
            f"moec::short_conv: document_ids has shape {tuple(document_ids.shape)}, expected {tuple(x.shape[:2])}"
        )
    if activation not in ("silu", "none"):
        raise ValueError(f"moec::short_conv: activation is {activation!r}, expected 'silu' or 'none'")
    return torch.ops.moec.short_conv(x, weight, document_ids, activation)


def conv_forward(x: Tensor, weight: Tensor, document_ids: Tensor | None, activation: str) -> Tensor:
    """The computation of `moec::short_conv`."""
    mixed = mix(x, weight, document_ids)
    return (functional.silu(mixed) if activation == "silu" else mixed).to(x.dtype).contiguous()


def conv_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    document_ids: Tensor | None,
    activation: str,
    needed: Sequence[bool] | None = None,
    mixed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The computation of `moec::short_conv_backward`: gradients of x and weight.

    mixed: the convolution before its activation (`mix`), where the caller has it already.
    """
    of_x, of_weight = asked_for(needed, 2)
    dtype = math_dtype(x.dtype)
    grad, wide, taps = grad.to(dtype), x.to(dtype), weight.to(dtype)
    if activation == "silu":
        mixed = mix(x, weight, document_ids) if mixed is None else mixed
        grad = grad * gate_activation_slope(mixed, "silu")[1]
    width = weight.shape[1]
    grad_x = grad * taps[:, width - 1] if of_x else grad.new_empty(0)
    grad_taps = [(grad * wide).sum((0, 1))] if of_weight else []
    for back in range(1, min(width, x.shape[1])):
        reaching = _same_document(grad[:, back:], document_ids, back)
        if of_x:
            grad_x[:, :-back].addcmul_(reaching, taps[:, width - 1 - back])
        if of_weight:
            grad_taps.append((reaching * wide[:, :-back]).sum((0, 1)))
    grad_taps += [grad.new_zeros(grad.shape[2])] * (width - len(grad_taps))
    grad_weight = torch.stack(grad_taps[::-1], 1) if of_weight else grad.new_empty(0)
    return grad_x.to(x.dtype).contiguous(), grad_weight.to(weight.dtype)


def mix(x: Tensor, weight: Tensor, document_ids: Tensor | None) -> Tensor:
    """The convolution before its activation, in the math dtype."""
    wide, taps = x.to(math_dtype(x.dtype)), weight.to(math_dtype(x.dtype))
    width = weight.shape[1]
    mixed = wide * taps[:, width - 1]
    for back in range(1, min(width, x.shape[1])):
        mixed[:, back:].addcmul_(_same_document(wide[:, :-back], document_ids, back), taps[:, width - 1 - back])
    return mixed


def _same_document(values: Tensor, document_ids: Tensor | None, back: int) -> Tensor:
    """values [B, T - back, C] of token pairs `back` apart, zeroed where the two belong to different documents."""
    if document_ids is None:
        return values
    same = document_ids[:, back:] == document_ids[:, :-back]
    return values.masked_fill(~same.unsqueeze(-1), 0.0)


def _fake(x: Tensor, weight: Tensor, document_ids: Tensor | None, activation: str) -> Tensor:
    return x.new_empty(x.shape)


def _backward_fake(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    document_ids: Tensor | None,
    activation: str,
    needed: Sequence[bool] | None,
) -> tuple[Tensor, ...]:
    return only_asked_for(needed, [x.new_empty(x.shape), weight.new_empty(weight.shape)])


define_op(
    "short_conv",
    "(Tensor x, Tensor weight, Tensor? document_ids, str activation) -> (Tensor y)",
    conv_forward,
    _fake,
    backward_schema="(Tensor grad_y, Tensor x, Tensor weight, Tensor? document_ids, str activation, "
    "bool[]? needed=None) -> (Tensor grad_x, Tensor grad_weight)",
    backward=conv_backward,
    backward_fake=_backward_fake,
    shapes={"x": "B T C", "weight": "C W", "document_ids": "B T"},
    flops="B*T*C*(2*W + 4)",
    backward_flops="B*T*C*(2*W*(1 + need_x + need_weight) + 8)",
    source="Mamba, arXiv:2312.00752; Kimi Linear, arXiv:2510.26692",
    summary="short causal depthwise convolution",
)
