"""Small exchanges between all ranks on the role "control", with the same functional collectives that programs use."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch import Tensor

from moec.compiler.errors import AgreedError, MoecError
from moec.runtime.ranks import Ranks

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


def first_rank_decides(decide: Callable[[], str], ranks: Ranks, device: torch.device) -> str:
    """What `decide()` returns on rank 0, on all ranks; a MoecError of it is raised on all."""
    if ranks.world == 1:
        return decide()
    text, refusal = "", None
    if ranks.is_first:
        try:
            text = decide()
        except MoecError as error:
            refusal = error
    fields = [text, *((refusal.what, refusal.where, refusal.why, refusal.hint) if refusal else ())]
    text, *problem = json.loads(gathered_texts(json.dumps(fields), ranks.world, device)[0])
    if refusal is not None:
        raise refusal
    if problem:
        what, where, why, hint = problem
        raise AgreedError(f"rank 0 stopped: {what}", where=where, why=why, hint=hint)
    return text
