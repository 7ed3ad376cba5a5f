"""Which tensors an op, or a whole forward, writes in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from moec.compiler._torch_compat import TorchDispatchMode, pytree

# Arguments that an op writes although its schema does not say so.
_HIDDEN = {
    torch.ops.aten.native_batch_norm.default: ("running_mean", "running_var"),
    torch.ops.aten.cudnn_batch_norm.default: ("running_mean", "running_var"),
    torch.ops.aten.miopen_batch_norm.default: ("running_mean", "running_var"),
}


def written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that one call of an op writes."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    hidden = _HIDDEN.get(func, ())
    for argument in func._schema.arguments:
        if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name in hidden:
            yield from (leaf for leaf in pytree.tree_leaves(given.get(argument.name)) if isinstance(leaf, Tensor))


@contextmanager
def watched_writes(tensors: Mapping[str, Tensor]) -> Iterator[set[str]]:
    """Within the context the names of those `tensors` that are written, also through views, are collected on exit."""
    before = {name: tensor._version for name, tensor in tensors.items()}
    found: set[str] = set()
    with _HiddenWrites() as watcher:
        yield found
    hidden = set(map(id, watcher.written))
    found |= {name for name, tensor in tensors.items() if tensor._version != before[name] or id(tensor) in hidden}


class _HiddenWrites(TorchDispatchMode):
    """Collects the tensors whose version counter tells nothing of a write."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _HIDDEN:
            self.written += written_by(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
