"""The routing kernels against the reference in float64, run by test_route_kernels.py."""

from __future__ import annotations

import sys
from typing import Any

import torch

from moec.codegen.triton import route_launch
from moec.compiler.dialect.registry import BODIES

FORMS: dict[str, dict[str, Any]] = {
    "sigmoid, biased": {"score": "sigmoid", "biased": True},
    "sigmoid, groups": {"score": "sigmoid", "experts": 32, "groups": 8, "top_groups": 3},
    "sigmoid, biased, groups": {"score": "sigmoid", "biased": True, "experts": 32, "groups": 4, "top_groups": 2},
    "groups of one": {"score": "softmax", "biased": True, "experts": 16, "groups": 16, "top_groups": 5, "top_k": 4},
    "softmax": {"score": "softmax", "renormalize": False},
    "softmax, renormalized": {"score": "softmax", "experts": 60},
    "softmax after": {"score": "softmax", "softmax_after_topk": True, "renormalize": False},
    "many experts": {"score": "sigmoid", "biased": True, "experts": 896, "top_k": 16},
    "one expert": {"score": "sigmoid", "experts": 1, "top_k": 1, "renormalize": False},
    "all experts": {"score": "softmax", "experts": 6, "top_k": 6},
}


COUNTED = ((530, 9, 3, 1000), (37, 1, 1, 1000), (5, 60, 59, 64), (11, 6, 6, 1024), (0, 4, 2, 10), (3, 384, 8, 1000))
"""Tokens, experts, choices, bins: more than one block, none, and as many choices as experts."""


def main(device: str, dtype: torch.dtype) -> None:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    bound = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}[dtype]
    for name, form in FORMS.items():
        for what, error in compare(device, dtype, **form).items():
            assert error <= bound, (name, what, error)
    for sizes in COUNTED:
        counts(device, dtype, *sizes)
    print("checked", len(FORMS) + len(COUNTED))


def compare(
    device: str, dtype: torch.dtype, score: str, experts: int = 23, top_k: int = 5, groups: int = 1,
    top_groups: int = 1, biased: bool = False, softmax_after_topk: bool = False, renormalize: bool = True,
) -> dict[str, float]:  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(13, experts, generator=generator).to(device, dtype)
    bias = torch.randn(experts, generator=generator).to(device) if biased else None
    grad = torch.randn(13, top_k, generator=generator).to(device, dtype)
    weighting = (score, softmax_after_topk, renormalize, 2.5)
    weights, indices = route_launch.route(logits, bias, top_k, *weighting, groups, top_groups, 1e-20)
    exact = (logits.double(), None if bias is None else bias.double())
    truth, chosen = BODIES[torch.ops.moec.route.default](*exact, top_k, *weighting, groups, top_groups, 1e-20)
    # Equal scores may be taken in another order.
    scores = exact[0].sigmoid() if score == "sigmoid" else exact[0]
    if exact[1] is not None:
        scores = (scores if score == "sigmoid" else scores.softmax(-1)) + exact[1]
    assert torch.allclose(scores.gather(1, indices), scores.gather(1, chosen), rtol=0, atol=1e-6)
    assert all(row.unique().numel() == top_k for row in indices)
    found = route_launch.route_backward(grad, logits, indices, *weighting, 1e-20)
    grads = (grad.double(), logits.double(), indices)
    wanted = BODIES[torch.ops.moec.route_backward.default](*grads, *weighting, 1e-20)
    return {
        name: float((one.double() - two).norm() / two.norm().clamp_min(1e-30))
        for name, one, two in (("weights", weights, truth), ("gradient", found, wanted))
    }


def counts(device: str, dtype: torch.dtype, tokens: int, experts: int, top_k: int, bins: int) -> None:
    """Every token is counted once for each expert; a rounded score may fall into the bin beside its own."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(tokens, experts, generator=generator).to(device, dtype)
    bias = torch.randn(experts, generator=generator).to(device) / 4
    found = route_launch.route_histogram(logits, bias, top_k, bins)
    assert torch.equal(found, route_launch.route_histogram(logits, bias, top_k, bins))
    wanted = BODIES[torch.ops.moec.route_histogram.default](logits, bias, top_k, bins)
    assert found.dtype == wanted.dtype
    assert (found.sum(1) == tokens).all()
    moved = int((found - wanted).cumsum(1).abs().sum())
    assert moved <= 2 + tokens * experts // 1000, (tokens, experts, moved)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], getattr(torch, sys.argv[2]))
