"""How the weights of one bucket lie over the ranks that share it: pure numbers, the same on every rank.

A bucket is what one all-gather brings and one reduce-scatter takes away. Each rank holds one flat buffer of bytes, in
which every weight has `rows` of its first dimension; rank r has rows [r * rows, (r + 1) * rows), cut off at the end of
the weight (the semantics of `torch.chunk`, and of DTensor's Shard(0)). So late ranks may have fewer rows, or none, and
what is missing is padding in the buffer: all ranks have the same size, and one collective suits all of them.

    local bytes     | weight 0: rows x row | gap | weight 1 ... | gap |       every start a multiple of 16 bytes
    gathered        | rank 0's local bytes | rank 1's | ...                   ranks * nbytes
    local gradients | weight 0: rows x row | gap | weight 1 ... |             one dtype; starts a multiple of 4 elements
    to be reduced   | rank 0's local gradients | rank 1's | ...               ranks * gradient_numel
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal, Self

import torch

from moec.compiler.plan import MeshPlan

Role = Literal["dense", "experts"]
ALIGNMENT = 16
GRADIENT_ALIGNMENT = 4
NO_GRADIENT = -1


@dataclass(frozen=True)
class ShardedWeight:
    """One weight of a bucket.

    name: relative to the bucket's layer. shape: of the whole weight, as the gather yields it (experts: those of one
    rank of the exchange). dtype: "bfloat16". rows: of dimension 0 per rank, padding included; a scalar has one row.
    offset: bytes into the local buffer. gradient_offset: elements into the local gradients, -1 where there is none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    rows: int
    offset: int
    gradient_offset: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch names it."""
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    @property
    def size(self) -> int:
        """Rows of the whole weight."""
        return self.shape[0] if self.shape else 1

    @property
    def row_numel(self) -> int:
        """Elements of one row."""
        return math.prod(self.shape[1:])

    @property
    def local_numel(self) -> int:
        """Elements in the local buffer, padding included."""
        return self.rows * self.row_numel

    @property
    def has_gradient(self) -> bool:
        """Whether its gradient is reduced over the ranks."""
        return self.gradient_offset != NO_GRADIENT


@dataclass(frozen=True)
class BucketLayout:
    """Where the weights of one bucket lie.

    ranks: that share the bucket. role: which collectives serve it. weights: in the order of the buffer, those with a
    gradient first. nbytes: of the local buffer. gradient_numel: elements of the local gradients.
    """

    ranks: int
    role: Role
    weights: tuple[ShardedWeight, ...]
    nbytes: int
    gradient_numel: int

    @classmethod
    def of(cls, role: Role, ranks: int, entries: Sequence[tuple[str, Sequence[int], str, bool]]) -> Self:
        """The layout of weights given as (name, whole shape, dtype, whether it gets a gradient).

        Raises ValueError for a name that comes twice or a number of ranks below one.
        """
        names = [name for name, *_ in entries]
        if ranks < 1 or len(set(names)) != len(names):
            raise ValueError(f"a bucket of {ranks} ranks with weights {names}: at least one rank, and each weight once")
        nbytes = gradient_numel = 0
        weights = []
        for name, shape, dtype, has_gradient in sorted(entries, key=lambda entry: not entry[3]):
            rows = rows_per_rank(shape[0] if len(shape) else 1, ranks)
            weight = ShardedWeight(
                name, tuple(shape), dtype, rows, nbytes, gradient_numel if has_gradient else NO_GRADIENT
            )
            weights.append(weight)
            nbytes = _aligned(nbytes + weight.local_numel * weight.torch_dtype.itemsize, ALIGNMENT)
            if has_gradient:
                gradient_numel = _aligned(gradient_numel + weight.local_numel, GRADIENT_ALIGNMENT)
        return cls(ranks, role, tuple(weights), nbytes, gradient_numel)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The layout that `to_json` wrote."""
        weights = (ShardedWeight(**{**weight, "shape": tuple(weight["shape"])}) for weight in values["weights"])
        return cls(**{**values, "weights": tuple(weights)})

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        values = asdict(self)
        return {**values, "weights": [{**weight, "shape": list(weight["shape"])} for weight in values["weights"]]}

    def without_gradients(self) -> Self:
        """This layout for a layer whose weights get none: they lie where they lay."""
        weights = tuple(replace(weight, gradient_offset=NO_GRADIENT) for weight in self.weights)
        return replace(self, weights=weights, gradient_numel=0)

    @property
    def gathered_nbytes(self) -> int:
        """Bytes that all ranks together hold, and that an all-gather yields on each of them."""
        return self.ranks * self.nbytes

    @property
    def with_gradient(self) -> tuple[ShardedWeight, ...]:
        """The weights whose gradients are reduced, in the order of the buffer."""
        return tuple(weight for weight in self.weights if weight.has_gradient)

    def weight(self, name: str) -> ShardedWeight:
        """The weight of a name; KeyError when the bucket has none."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, ShardedWeight]:
        return {weight.name: weight for weight in self.weights}


@dataclass(frozen=True)
class BucketInstance:
    """A layout at work for one layer: `prefix` is the layer's path, "" where the weights have absolute names."""

    layout: BucketLayout
    prefix: str

    def paths(self) -> Iterator[tuple[str, ShardedWeight]]:
        """(path in the model, weight), in the order of the buffer."""
        for weight in self.layout.weights:
            yield f"{self.prefix}.{weight.name}" if self.prefix else weight.name, weight


def rows_per_rank(size: int, ranks: int) -> int:
    """Rows of a dimension of `size` that each rank has room for."""
    return -(-size // ranks)


def rows_held(size: int, ranks: int, rank: int) -> range:
    """The rows of a dimension that a rank holds, without padding; late ranks may have none."""
    rows = rows_per_rank(size, ranks)
    return range(min(rank * rows, size), min((rank + 1) * rows, size))


def expert_places(experts: int, ranks: int, parts: int) -> tuple[int, ...]:
    """For each expert its place on the rank that holds it, of `ranks` that share them: as its part is gathered.

    A rank's part lies on `parts` ranks in turn, `ceil(ceil(experts / ranks) / parts)` rows on each; a part with fewer
    experts than the others is spread over all of them too, so places between its experts stay empty.
    """
    share = rows_per_rank(experts, ranks)
    room = rows_per_rank(share, parts)
    places = []
    for first in range(0, experts, share):
        held = min(share, experts - first)
        each = rows_per_rank(held, parts)
        places += [index // each * room + index % each for index in range(held)]
    return tuple(places)


def places_per_rank(experts: int, ranks: int, parts: int) -> int:
    """Places for experts on each rank, empty ones included."""
    return 1 + max(expert_places(experts, ranks, parts))


def rows_of_rank(role: Role, size: int, mesh: MeshPlan, rank: int) -> range:
    """The rows of a weight of `size` rows in all that rank `rank` of a mesh holds.

    Experts are cut by ep_index = rank % ep first, and each part by edp_index = rank // ep.
    """
    if role == "dense":
        return rows_held(size, mesh.world, rank)
    part = rows_held(size, mesh.ep, rank % mesh.ep)
    inner = rows_held(len(part), mesh.edp, rank // mesh.ep)
    return range(part.start + inner.start, part.start + inner.stop)


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
