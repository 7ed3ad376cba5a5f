"""Routed experts spread over ranks in plain eager PyTorch, as a model that is trained with FSDP2 has them.

Each rank holds experts r * E / ranks ... of a layer. Rows sorted by expert go to their ranks by
`all_to_all_single_autograd`, are sorted by local expert, multiplied, and go back the same way.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd, wait_tensor

from moec.compiler import dialect
from moec.models.k3.model import K3Model
from moec.models.k3.moe import Experts


class SpreadExperts(nn.Module):
    """This rank's share of `experts`, with the same call."""

    def __init__(self, experts: Experts, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.ranks, self.count = group, group.size(), experts.count
        self.local = experts.count // self.ranks
        own = slice(group.rank() * self.local, (group.rank() + 1) * self.local)
        self.gate_up = nn.Parameter(experts.gate_up[own].detach().clone())
        self.down = nn.Parameter(experts.down[own].detach().clone())
        self.activation = experts.activation

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x [N, D]; weights float32 [N, k]; experts int64 [N, k] -> [N, D]"""
        rows, order, offsets = dialect.permute(x, experts, experts=self.count)
        sent = offsets.long().diff(prepend=offsets.new_zeros(1, dtype=torch.int64))
        received = wait_tensor(all_to_all_single(sent, None, None, self.group)).view(self.ranks, self.local)
        sizes = torch.stack((sent.view_as(received).sum(1), received.sum(1))).tolist()
        arrived = all_to_all_single_autograd(rows, sizes[1], sizes[0], self.group)
        by_expert = _by_expert(received, sum(sizes[1]))
        local_offsets = received.sum(0).cumsum(0).int()
        gate, up = dialect.grouped_linear(arrived[by_expert], self.gate_up, local_offsets).chunk(2, dim=-1)
        done = dialect.grouped_linear(self.activation(gate, up), self.down, local_offsets)
        by_source = torch.empty_like(by_expert)
        by_source[by_expert] = torch.arange(len(by_expert), device=by_expert.device)
        returned = all_to_all_single_autograd(done[by_source], sizes[0], sizes[1], self.group)
        return dialect.unpermute(returned, order, weights)


def spread_experts(model: K3Model, group: dist.ProcessGroup) -> list[SpreadExperts]:
    """Replace the experts of every layer by this rank's share."""
    found = []
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, Experts):
                spread = SpreadExperts(child, group)
                setattr(module, name, spread)
                found.append(spread)
    return found


def _by_expert(received: Tensor, total: int) -> Tensor:
    """Where rows that came sorted by (rank, expert) lie in the order (expert, rank): int64 [total]."""
    expert = torch.arange(received.shape[1], device=received.device).repeat(received.shape[0])
    return expert.repeat_interleave(received.flatten(), output_size=total).argsort(stable=True)
