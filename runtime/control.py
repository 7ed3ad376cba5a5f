"""Small exchanges between all ranks on the role "control", with the same functional collectives that programs use."""

from __future__ import annotations

import torch
from torch import Tensor

_functional = torch.ops._c10d_functional


def summed(value: Tensor) -> Tensor:
    """The sum over all ranks, of the same shape and dtype; the same bits on every rank."""
    return _functional.wait_tensor(_functional.all_reduce(value.contiguous(), "sum", "control"))


def gathered(value: Tensor, world: int) -> Tensor:
    """[world, *shape]: the value of every rank, which has the same shape and dtype on all."""
    flat = value.reshape(-1).contiguous()
    joined = _functional.wait_tensor(_functional.all_gather_into_tensor(flat, world, "control"))
    return joined.view(world, *value.shape)


def gathered_texts(text: str, world: int, device: torch.device) -> list[str]:
    """The text of every rank, in rank order. device: where collectives run."""
    data = text.encode()
    sizes = [int(size) for size in gathered(torch.tensor([len(data)], device=device), world)]
    padded = data.ljust(max(sizes))
    if not padded:
        return [""] * world
    values = gathered(torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(device), world).cpu()
    return [bytes(row[:size].tolist()).decode() for row, size in zip(values, sizes, strict=True)]
