"""Quantile balancing after the optimizer: rewrite each router's correction bias from its histogram of one step.

The rule is `dialect.balanced_bias`, the same function that eager models call (Kimi K3 report, appendix D).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from moec.compiler import dialect
from moec.runtime.state import StepState


class BalanceBuffers(NamedTuple):
    """One router: paths of its bias [experts] float and histogram [experts, bins] int64, and its experts per token."""

    bias: str
    histogram: str
    top_k: int


@torch.no_grad()
def update_balance(state: StepState, routers: Iterable[BalanceBuffers | tuple[str, str, int]]) -> None:
    """Rewrite the bias of each router in place from the counts summed over the step's microbatches; zero the counts."""
    for bias_path, histogram_path, top_k in routers:
        bias, histogram = state.buffers[bias_path], state.buffers[histogram_path]
        bias.copy_(dialect.balanced_bias(bias, histogram, top_k))
        histogram.zero_()
