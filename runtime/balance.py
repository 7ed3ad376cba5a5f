"""Quantile balancing after the optimizer: rewrite each router's correction bias from its histogram of one step.

The rule is `dialect.balanced_bias`, the same function that eager models call (Kimi K3 report, appendix D).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from moec.compiler import dialect
from moec.runtime.control import summed
from moec.runtime.state import StepState


class BalanceBuffers(NamedTuple):
    """One router: paths of its bias [experts] float and histogram [experts, bins] int64, and its experts per token."""

    bias: str
    histogram: str
    top_k: int


@torch.no_grad()
def update_balance(state: StepState, routers: Iterable[BalanceBuffers | tuple[str, str, int]]) -> None:
    """Rewrite the bias of each router in place from the counts summed over the step's microbatches; zero the counts.

    On several ranks the counts are summed over them first, so all write the same bias.
    """
    routers = list(routers)
    if state.world > 1 and routers:
        _sum_over_ranks([state.buffers[histogram_path] for _, histogram_path, _ in routers])
    for bias_path, histogram_path, top_k in routers:
        bias, histogram = state.buffers[bias_path], state.buffers[histogram_path]
        bias.copy_(dialect.balanced_bias(bias, histogram, top_k))
        state.clear_buffer(histogram_path)


def _sum_over_ranks(histograms: list[Tensor]) -> None:
    """Replace each histogram by its sum, with one collective for all."""
    total = summed(torch.cat([histogram.flatten() for histogram in histograms]))
    for histogram, part in zip(histograms, total.split([histogram.numel() for histogram in histograms]), strict=True):
        histogram.copy_(part.view_as(histogram))
