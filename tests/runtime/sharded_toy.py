"""A small model whose sizes fit no number of ranks, and the buckets of a compiled step for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from moec.compiler.layout import BucketInstance, BucketLayout, Role, places_per_rank
from moec.compiler.plan import MeshPlan
from moec.runtime.sharded_state import ShardedState

HIDDEN, VOCABULARY, EXPERTS = 60, 513, 6


class Block(nn.Module):
    """One layer: a dense projection with a bias and a scalar, and stacked experts."""

    def __init__(self, experts: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.proj = nn.Linear(HIDDEN, HIDDEN - 1, dtype=dtype)
        self.scale = nn.Parameter(torch.randn(()))
        self.frozen = nn.Parameter(torch.randn(3, dtype=dtype), requires_grad=False)
        self.experts = nn.Parameter(torch.randn(experts, 4, 3).to(dtype))
        self.register_buffer("bias", torch.randn(experts))


class Model(nn.Module):
    """Vocabulary 513, hidden 60, 6 experts (cases.md C23); `tied` shares embedding and head."""

    def __init__(self, tied: bool = True, experts: int = EXPERTS, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN, dtype=dtype)
        self.layers = nn.ModuleList(Block(experts, dtype) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=dtype)
        self.unused = nn.Parameter(torch.randn(2, 2), requires_grad=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("counts", torch.randn(3), persistent=False)


def model(seed: int = 0, tied: bool = True, experts: int = EXPERTS, dtype: torch.dtype = torch.float32) -> Model:
    """A model with random values."""
    torch.manual_seed(seed)
    return Model(tied, experts, dtype)


def buckets(module: Model, mesh: MeshPlan) -> dict[str, BucketInstance]:
    """One bucket for each layer's dense weights, one for its experts, one for each weight outside of layers."""
    made: dict[str, BucketInstance] = {}
    for index, layer in enumerate(module.layers):
        weights = dict(layer.named_parameters())
        experts = {"experts": weights.pop("experts")}
        prefix = f"layers.{index}"
        made[prefix] = BucketInstance(_layout("dense", mesh, weights), prefix)
        made[f"{prefix}:experts"] = BucketInstance(_layout("experts", mesh, experts), prefix)
    tied = module.head.weight is module.embed.weight
    for path in ("embed.weight",) if tied else ("embed.weight", "head.weight"):
        made[path] = BucketInstance(_layout("dense", mesh, {path: module.get_parameter(path)}), "")
    return made


def state(module: Model, mesh: MeshPlan, rank: int) -> ShardedState:
    """What a rank holds of a module."""
    return ShardedState.from_module(module, buckets=buckets(module, mesh), mesh=mesh, rank=rank)


def states(module: Model, mesh: MeshPlan) -> list[ShardedState]:
    """What all ranks hold, made in one process."""
    return [state(module, mesh, rank) for rank in range(mesh.world)]


def joined(parts: list[ShardedState], group: str) -> dict[str, Tensor]:
    """Path -> whole tensor, put together from the rows that the ranks hold of it."""
    wholes = {}
    for path, shard in parts[0].shards.items():
        locals_ = [getattr(part, group)[path] for part in parts if path in getattr(part, group)]
        if not locals_:
            continue
        whole = torch.full(shard.shape or (1,), float("nan"), dtype=locals_[0].dtype)
        for part, local in zip(parts, locals_, strict=True):
            rows = part.shards[path].rows
            whole[rows.start : rows.stop] = local
        wholes[path] = whole.reshape(shard.shape)
    return wholes


def joined_rows(ranks: list[dict[str, tuple[int, Tensor, tuple[int, ...]]]]) -> dict[str, Tensor]:
    """Name -> whole tensor, from (first row, rows, whole shape) of each rank."""
    wholes: dict[str, Tensor] = {}
    for rank in ranks:
        for name, (start, rows, shape) in rank.items():
            whole = wholes.setdefault(name, torch.full(shape, float("nan"), dtype=rows.dtype))
            (whole if shape else whole.view(1))[start : start + len(rows if rows.dim() else rows.view(1))] = rows
    return wholes


def _layout(role: Role, mesh: MeshPlan, weights: Mapping[str, Tensor]) -> BucketLayout:
    entries = []
    for name, weight in weights.items():
        shape = tuple(weight.shape)
        if role == "experts":
            shape = (places_per_rank(shape[0], mesh.ep, mesh.edp), *shape[1:])
        entries.append((name, shape, str(weight.dtype).removeprefix("torch."), weight.requires_grad))
    return BucketLayout.of(role, mesh.world if role == "dense" else mesh.edp, entries)
