"""A collective as one rank calls it, and a recorder of the collectives that run on this rank.

    with record_collectives() as calls:
        step(batch)
    sum(call.sent_bytes for call in calls)

Works on real groups and, inside a function given to `simulate`, on simulated ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moec.compiler._torch_compat import OpOverload, TorchDispatchMode
from moec.compiler.collectives import COLLECTIVES, COMPOSITES


@dataclass(frozen=True)
class Call:
    """What one rank gives to one collective.

    op: name in `_c10d_functional`. role: the group. dtype, shape: of the input. group_size: as the call states it, 0
    where it does not. reduction: "sum", "avg", "min", "max", "product", or "". send, receive: rows to and from each
    rank of the group (all_to_all_single). source: index in the group (broadcast), -1 elsewhere.
    """

    op: str
    role: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    group_size: int = 0
    reduction: str = ""
    send: tuple[int, ...] = ()
    receive: tuple[int, ...] = ()
    source: int = -1

    @classmethod
    def of(cls, target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """The call of a target in COLLECTIVES."""
        names = [argument.name for argument in target._schema.arguments]
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        value: Tensor = given["input"]
        return cls(
            op=COLLECTIVES[target],
            role=str(given["group_name"]),
            dtype=value.dtype,
            shape=tuple(value.shape),
            group_size=given.get("group_size", 0),
            reduction=given.get("reduce_op", "").lower(),
            send=tuple(given.get("input_split_sizes", ())),
            receive=tuple(given.get("output_split_sizes", ())),
            source=given.get("src", -1),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the input."""
        return math.prod(self.shape) * self.dtype.itemsize

    def sent_bytes(self, ranks: int, index: int) -> int:
        """Bytes that the rank at `index` of a group of `ranks` has to send, by an algorithm that sends the least."""
        others = ranks - 1
        match self.op:
            case "all_gather_into_tensor":
                return others * self.nbytes
            case "reduce_scatter_tensor":
                return others * self.nbytes // ranks
            case "all_reduce":
                return 2 * others * self.nbytes // ranks
            case "broadcast":
                return self.nbytes if index == self.source and others else 0
        rows = max(sum(self.send), 1)
        return self.nbytes // rows * (sum(self.send) - self.send[index])

    def __str__(self) -> str:
        details = [self.reduction] if self.reduction else []
        details += [f"{self.group_size} ranks"] if self.group_size else []
        details += [f"sends rows {list(self.send)}", f"expects {list(self.receive)}"] if self.send else []
        details += [f"from index {self.source}"] if self.source >= 0 else []
        dtype = str(self.dtype).removeprefix("torch.")
        text = f'{self.op} on "{self.role}" of {dtype} {list(self.shape)}'
        return f"{text} ({', '.join(details)})" if details else text


class CollectiveMode(TorchDispatchMode):
    """A mode that sees each collective of the table, also those inside composite ops."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        composite = COMPOSITES.get(func)
        if composite is not None:
            with self:
                return composite(*args, **(kwargs or {}))
        return self.dispatch(func, args, kwargs or {})

    def dispatch(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one op that is not composite."""
        raise NotImplementedError


class _Recorder(CollectiveMode):
    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self._calls = calls

    def dispatch(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func in COLLECTIVES:
            self._calls.append(Call.of(func, args, kwargs))
        return func(*args, **kwargs)


@contextmanager
def record_collectives() -> Iterator[list[Call]]:
    """A context whose value is the list of this rank's collectives so far, in the order of their launch."""
    calls: list[Call] = []
    with _Recorder(calls):
        yield calls
