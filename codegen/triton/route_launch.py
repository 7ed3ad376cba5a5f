"""The launches of the routing kernels."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from moec.codegen.triton.route_histogram import route_count, route_threshold
from moec.codegen.triton.route_kernels import AFTER, SIGMOID, SOFTMAX, route_choose, route_gradient
from moec.compiler.dialect.route import check

COUNTERS = 8192
"""Counts that one program holds: bins times experts."""


def route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    score: str,
    softmax_after_topk: bool,
    renormalize: bool,
    scale: float,
    groups: int,
    top_groups: int,
    renorm_eps: float,
) -> tuple[Tensor, Tensor]:
    """`moec::route`."""
    check(logits, top_k, score, softmax_after_topk, groups, top_groups)
    logits, (tokens, experts) = logits.contiguous(), logits.shape
    weights = logits.new_empty(tokens, top_k)
    indices = logits.new_empty(tokens, top_k, dtype=torch.int64)
    if tokens:
        route_choose[(tokens,)](
            logits, logits if bias is None else bias.contiguous(), weights, indices, experts, scale, renorm_eps,
            RENORMALIZE=renormalize, BIASED=bias is not None, GROUPS=groups, TOP_GROUPS=top_groups,
            **_constants(experts, top_k, score, softmax_after_topk),
        )  # fmt: skip
    return weights, indices


def route_backward(
    grad_weights: Tensor,
    logits: Tensor,
    indices: Tensor,
    score: str,
    softmax_after_topk: bool,
    renormalize: bool,
    scale: float,
    renorm_eps: float,
) -> Tensor:
    """`moec::route_backward`."""
    logits, (tokens, experts) = logits.contiguous(), logits.shape
    grad_logits = torch.empty_like(logits)
    if tokens:
        route_gradient[(tokens,)](
            grad_weights.contiguous(), logits, indices.contiguous(), grad_logits, experts, scale, renorm_eps,
            RENORMALIZE=renormalize, **_constants(experts, indices.shape[1], score, softmax_after_topk),
        )  # fmt: skip
    return grad_logits


def route_histogram(logits: Tensor, bias: Tensor, top_k: int, bins: int) -> Tensor:
    """`moec::route_histogram`, for up to COUNTERS bins."""
    logits, bias, (tokens, experts) = logits.contiguous(), bias.contiguous(), logits.shape
    counts = logits.new_empty(experts, bins, dtype=torch.int64)
    threshold = logits.new_empty(tokens, dtype=torch.float32)
    block, wide = triton.next_power_of_2(experts), triton.next_power_of_2(bins)
    members = min(block, COUNTERS // wide)
    if tokens:
        rank = min(top_k + 1, experts)
        route_threshold[(tokens,)](
            logits, bias, threshold, experts, RANK=rank, BLOCK=block, num_warps=1 if experts <= 1024 else 4
        )
    route_count[(triton.cdiv(experts, members),)](
        logits, bias, threshold, counts, tokens, experts, bins, BLOCK=block, BINS=wide, EXPERTS=members, TOKENS=512,
        num_warps=8,
    )  # fmt: skip
    return counts


def _constants(experts: int, top_k: int, score: str, softmax_after_topk: bool) -> dict[str, Any]:
    kind = AFTER if softmax_after_topk else SIGMOID if score == "sigmoid" else SOFTMAX
    return {
        "SCORE": kind.value,
        "TOP_K": top_k,
        "BLOCK": triton.next_power_of_2(experts),
        "CHOICES": triton.next_power_of_2(top_k),
        "num_warps": 1 if experts <= 1024 else 4,
    }
