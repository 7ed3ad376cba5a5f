"""How many bytes a `StepState` takes on one rank, from shapes alone: what `StepState` and `ShardedState` would make."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import Tensor

from moec.compiler.allocations import rounded
from moec.compiler.layout import BucketInstance, rows_of_rank
from moec.compiler.memory import StateBytes
from moec.compiler.plan import MeshPlan
from moec.runtime.inventory import Inventory
from moec.runtime.state import sum_dtype


def state_bytes(
    inventory: Inventory, buckets: Mapping[str, BucketInstance], mesh: MeshPlan, granularity: int = 1
) -> StateBytes:
    """Bytes on the rank that holds most, which is the first; buckets: what lies sharded where, none for one rank."""
    sharded = {path: bucket.layout.role for bucket in buckets.values() for path, _ in bucket.paths()}

    def local(path: str, itemsize: int) -> int:
        weight = inventory.weights[path]
        shape = tuple(weight.shape)
        if path in sharded:
            rows = rows_of_rank(sharded[path], shape[0] if shape else 1, mesh, 0)
            shape = (len(rows), *shape[1:])
        return rounded(math.prod(shape) * itemsize, granularity)

    owners = [path for path in inventory.weights if path not in inventory.aliases]
    flat = sum(rounded(bucket.layout.nbytes, granularity) for bucket in buckets.values())
    trained = {path: sum_dtype(inventory.weights[path].dtype) for path in inventory.trainable}
    return StateBytes(
        weights=flat + sum(local(p, inventory.weights[p].element_size()) for p in owners if p not in sharded),
        buffers=sum(
            rounded(_nbytes(buffer), granularity)
            for path, buffer in inventory.buffers.items()
            if path not in inventory.aliases
        ),
        masters=sum(local(p, t.itemsize) for p, t in trained.items() if t != inventory.weights[p].dtype),
        moments=2 * sum(local(p, t.itemsize) for p, t in trained.items()),
    )


def copied_bytes(inventory: Inventory, copied: Iterable[str], granularity: int = 1) -> int:
    """Bytes of the copies that a step keeps of some buffers, by path, until it has succeeded."""
    return sum(rounded(_nbytes(inventory.buffers[path]), granularity) for path in copied)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
