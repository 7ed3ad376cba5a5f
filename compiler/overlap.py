"""Different tensors over the same memory, such as two views of one matrix that are both parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moec.compiler.fake import is_fake


def overlapping(tensors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Pairs of names whose tensors are different objects and share at least one byte; none for tensors without data."""
    distinct = {id(tensor): name for name, tensor in tensors.items() if tensor.numel() and not is_fake(tensor)}
    spans = sorted((_place(tensors[name]), name) for name in distinct.values())
    found = []
    open_spans: list[tuple[tuple[str, int, int], str]] = []
    for place, name in spans:
        open_spans = [other for other in open_spans if other[0][0] == place[0] and other[0][2] > place[1]]
        found += [(other, name) for _, other in open_spans if _share(tensors[other], tensors[name])]
        open_spans.append((place, name))
    return found


def _place(tensor: Tensor) -> tuple[str, int, int]:
    """Device, address of the first byte, and address behind the last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return str(tensor.device), start, start + (last + 1) * tensor.element_size()


def _share(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors whose spans overlap have a byte in common: columns of one matrix have none."""
    (_, start, end), (_, start2, end2) = _place(one), _place(two)
    first = min(start, start2)
    touched = torch.zeros(max(end, end2) - first, dtype=torch.uint8)
    _bytes(one, touched, start - first).fill_(1)
    return bool(_bytes(two, touched, start2 - first).any())


def _bytes(tensor: Tensor, memory: Tensor, offset: int) -> Tensor:
    """The view of `memory` that lies as `tensor` lies, each element as its bytes."""
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()]
    return memory.as_strided([*tensor.shape, size], [*strides, 1], offset)
