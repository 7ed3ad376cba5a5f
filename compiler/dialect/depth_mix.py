"""Attention over depth: a per-token softmax mixture of earlier sublayer outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moec.compiler.dialect._define import asked_for, define_op, math_dtype, only_asked_for


def depth_mix(sources: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float) -> Tensor:
    """`sum_j p_j sources[j]`, with p the softmax over j of `u . rms_norm(sources[j])`, u = norm_weight * proj_weight.

    sources: one or more tensors [..., D] of equal shape; norm_weight, proj_weight [D]. The values are the raw
    sources; float32 math. Returns [..., D] in the dtype of the first source.
    """
    if not sources:
        raise ValueError("moec::depth_mix: sources is empty, expected at least one tensor")
    first = sources[0]
    for index, source in enumerate(sources):
        if source.dim() < 1 or source.shape != first.shape:
            raise ValueError(
                f"moec::depth_mix: sources[{index}] has shape {tuple(source.shape)}, sources[0] has "
                f"{tuple(first.shape)}"
            )
    for name, weight in (("norm_weight", norm_weight), ("proj_weight", proj_weight)):
        if weight.dim() != 1 or weight.shape[0] != first.shape[-1]:
            raise ValueError(f"moec::depth_mix: {name} has shape {tuple(weight.shape)}, expected [{first.shape[-1]}]")
    return torch.ops.moec.depth_mix(list(sources), norm_weight, proj_weight, eps)


def _direction(norm_weight: Tensor, proj_weight: Tensor, dtype: torch.dtype) -> Tensor:
    return norm_weight.to(dtype) * proj_weight.to(dtype)


def _scores(sources: list[Tensor], direction: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Per source and token: 1 / rms, u . source, and the mixing probability; each [..., J]."""
    wide = [source.to(direction.dtype) for source in sources]
    inverse = torch.stack([torch.rsqrt(source.square().mean(-1) + eps) for source in wide], -1)
    along = torch.stack([source @ direction for source in wide], -1)
    return inverse, along, torch.softmax(inverse * along, -1)


def _depth_mix(sources: list[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float) -> Tensor:
    dtype = math_dtype(sources[0].dtype)
    _, _, share = _scores(sources, _direction(norm_weight, proj_weight, dtype), eps)
    mixed = sources[0].to(dtype) * share[..., :1]
    for index, source in enumerate(sources[1:], 1):
        mixed = mixed.addcmul_(source.to(dtype), share[..., index : index + 1])
    return mixed.to(sources[0].dtype).contiguous()


def _depth_mix_backward(
    grad: Tensor,
    sources: list[Tensor],
    norm_weight: Tensor,
    proj_weight: Tensor,
    eps: float,
    needed: Sequence[bool] | None,
) -> tuple[list[Tensor], Tensor, Tensor]:
    of_sources, *of_weights = asked_for(needed, 3)
    dtype = math_dtype(sources[0].dtype)
    direction, grad = _direction(norm_weight, proj_weight, dtype), grad.to(dtype)
    inverse, along, share = _scores(sources, direction, eps)
    grad_share = torch.stack([(grad * source.to(dtype)).sum(-1) for source in sources], -1)
    grad_score = share * (grad_share - (share * grad_share).sum(-1, keepdim=True))
    weighted = grad_score * inverse
    shrink = weighted * along * inverse.square() / direction.shape[0]
    grad_sources, grad_direction = [], torch.zeros_like(direction)
    for index, source in enumerate(sources):
        wide, column = source.to(dtype), slice(index, index + 1)
        if of_sources:
            grad_source = grad * share[..., column] + weighted[..., column] * direction - wide * shrink[..., column]
            grad_sources.append(grad_source.to(source.dtype).contiguous())
        if any(of_weights):
            grad_direction += (wide * weighted[..., column]).reshape(-1, direction.shape[0]).sum(0)
    grad_weights = (
        (grad_direction * proj_weight.to(dtype)).to(norm_weight.dtype),
        (grad_direction * norm_weight.to(dtype)).to(proj_weight.dtype),
    )
    return grad_sources, *only_asked_for(of_weights, grad_weights)  # type: ignore[return-value]


def _fake(sources: list[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float) -> Tensor:
    return sources[0].new_empty(sources[0].shape)


def _backward_fake(
    grad: Tensor,
    sources: list[Tensor],
    norm_weight: Tensor,
    proj_weight: Tensor,
    eps: float,
    needed: Sequence[bool] | None,
) -> tuple[list[Tensor], Tensor, Tensor]:
    of_sources, *of_weights = asked_for(needed, 3)
    weights = [weight.new_empty(weight.shape) for weight in (norm_weight, proj_weight)]
    return (
        [source.new_empty(source.shape) for source in sources] if of_sources else [],
        *only_asked_for(of_weights, weights),
    )  # type: ignore[return-value]


define_op(
    "depth_mix",
    "(Tensor[] sources, Tensor norm_weight, Tensor proj_weight, float eps) -> (Tensor y)",
    _depth_mix,
    _fake,
    backward_schema="(Tensor grad_y, Tensor[] sources, Tensor norm_weight, Tensor proj_weight, float eps, "
    "bool[]? needed=None) -> (Tensor[] grad_sources, Tensor grad_norm_weight, Tensor grad_proj_weight)",
    backward=_depth_mix_backward,
    backward_fake=_backward_fake,
    shapes={"sources": "... D", "norm_weight": "D", "proj_weight": "D"},
    flops="len_sources*6*N*D",
    backward_flops="len_sources*N*D*(6 + 5*need_sources + 2*Max(need_norm_weight, need_proj_weight))",
    source="Attention Residuals, arXiv:2603.15031",
    summary="softmax mixture over earlier sublayer outputs",
)
