"""Count the memory that code allocates: an allocator's view of PyTorch, on any device and without one.

Every new storage counts from the operation that makes it until its last tensor is gone. Ops of the dialect are looked
into: their Python bodies run under the same count, so that what they hold meanwhile is seen. What one ATen kernel
allocates and frees inside is not.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Mapping
from typing import Any

from torch import Tensor

from moec.compiler._torch_compat import OpOverload, TorchDispatchMode, pytree
from moec.compiler.dialect.registry import BODIES


class AllocationCount(TorchDispatchMode):
    """Within the context: `held`, bytes of storages made inside and still alive, and `peak`, the most there were.

    granularity: every storage counts as a multiple of this many bytes, as the device's allocator hands it out.
    opaque: ops of the dialect that are not looked into: their results alone count.
    """

    def __init__(self, granularity: int = 1, opaque: Container[OpOverload] = ()) -> None:
        super().__init__()
        self._opaque = opaque
        self.held = self.peak = 0
        self._granularity = granularity
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {storage_key(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        body = None if function in self._opaque else BODIES.get(function)
        if body is None:
            result = function(*args, **(kwargs or {}))
        else:
            with self:
                result = body(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and storage_key(leaf) not in given:
                self._count(leaf)
        return result

    def _count(self, value: Tensor) -> None:
        storage = value.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = rounded(storage.nbytes(), self._granularity)
        self._known.add(key)
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.held -= size


def storage_key(tensor: Tensor) -> int:
    """Equal for tensors over the same storage, while one of them lives."""
    return tensor.untyped_storage()._cdata


def held_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the storages of tensors, each counted once."""
    return sum({storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors.values()}.values())


def rounded(size: int, granularity: int) -> int:
    """Bytes that an allocator hands out for `size`."""
    return -(-size // granularity) * granularity
