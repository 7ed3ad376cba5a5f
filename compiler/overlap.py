"""Different tensors over the same memory, such as two views of one matrix that are both parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moec.compiler.fake import is_fake


def overlapping(tensors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Pairs of names whose tensors are different objects and share at least one byte."""
    distinct = {id(tensor): name for name, tensor in tensors.items() if tensor.numel()}
    spans = sorted((_place(tensors[name]), name) for name in distinct.values())
    found = []
    open_spans: list[tuple[tuple[str, int, int], str]] = []
    for place, name in spans:
        open_spans = [other for other in open_spans if other[0][0] == place[0] and other[0][2] > place[1]]
        found += [(other, name) for _, other in open_spans if _share(tensors[other], tensors[name])]
        open_spans.append((place, name))
    return found


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of a tensor share memory, as those of an expanded one do."""
    if tensor.numel() < 2:
        return False
    reach = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size == 1:
            continue
        if stride == 0:
            return True
        if stride < reach:
            return tensor.numel() > len(np.unique(_offsets(tensor)))
        reach = stride * (size - 1) + reach
    return False


def write_overlapping(tensor: Tensor, values: Tensor) -> bool:
    """Write values into a tensor that overlaps itself; False, with nothing written, where its memory has fewer."""
    places, first, place_of = np.unique(_offsets(tensor), return_index=True, return_inverse=True)
    flat = values.to(tensor).flatten()
    distinct = flat[torch.from_numpy(first).to(tensor.device)]
    if not torch.equal(distinct[torch.from_numpy(place_of.reshape(-1)).to(tensor.device)], flat):
        return False
    tensor.as_strided([int(places[-1]) + 1], [1])[torch.from_numpy(places).to(tensor.device)] = distinct
    return True


def _offsets(tensor: Tensor) -> Any:
    """Where each element lies, counted in elements from the first: int64 [numel]."""
    offsets = np.zeros((), dtype=np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets[..., None] + np.arange(size) * stride
    return offsets.reshape(-1)


def _place(tensor: Tensor) -> tuple[str, int, int]:
    """Device, address of the first byte, and address behind the last one.

    A tensor without data has a storage all the same, and its addresses are places in that.
    """
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if is_fake(tensor):
        device, start = f"{tensor.untyped_storage()._cdata}", int(tensor.storage_offset()) * tensor.element_size()
    else:
        device, start = str(tensor.device), tensor.data_ptr()
    return device, start, start + (last + 1) * tensor.element_size()


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
