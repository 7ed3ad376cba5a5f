"""Attention residuals: a sublayer reads a learned mix of earlier depth blocks (arXiv:2603.15031, Kimi K3 report 2.2).

Layers come in blocks. Within a block, sublayer outputs add up in `prefix`; when a block ends, its sum is stored for
good, and the token embedding is the first stored block. A sublayer's input is a softmax mix over the stored blocks and
the prefix; its output goes raw into the prefix. Without blocks this is the ordinary residual stream.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moec.models.k3.numerics import widen


class DepthMix(nn.Module):
    """One site: softmax attention of a learned query over the sources at each token.

    norm, proj [D]: a source v scores `(norm * proj) . v / sqrt(mean(v^2) + eps)`; proj starts at 0, a plain mean.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(size))
        self.proj = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, sources: list[Tensor]) -> Tensor:
        """J sources [B, T, D] -> [B, T, D]; the mixed values are the raw sources"""
        values = widen(torch.stack(sources, dim=-2))
        query = widen(self.norm) * widen(self.proj)
        scale = torch.rsqrt(values.pow(2).mean(-1) + self.eps)
        weights = ((values * query).sum(-1) * scale).softmax(-1)
        return (values * weights.unsqueeze(-1)).sum(-2).to(sources[0].dtype)


class ResidualStream:
    """What flows from layer to layer during one forward: the stored blocks and the running sum."""

    def __init__(self, embeddings: Tensor) -> None:
        self.blocks: list[Tensor] = []
        self.prefix: Tensor | None = embeddings

    def read(self, mix: DepthMix | None) -> Tensor:
        """Input of a sublayer: the mix, or the running sum where nothing is stored yet or there is no mix."""
        if mix is None or not self.blocks:
            assert self.prefix is not None
            return self.prefix
        return mix(self.blocks if self.prefix is None else [*self.blocks, self.prefix])

    def end_block(self) -> None:
        """Store the running sum and start a new one."""
        assert self.prefix is not None
        self.blocks.append(self.prefix)
        self.prefix = None

    def write(self, output: Tensor) -> None:
        """Add a sublayer's output."""
        self.prefix = output if self.prefix is None else self.prefix + output
