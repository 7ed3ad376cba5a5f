"""Where a rank takes its rows of each weight from: a module that holds them all, its initialisation, or files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from moec.compiler.deferred import recording_of
from moec.compiler.errors import ArtifactError
from moec.compiler.fake import is_fake
from moec.compiler.overlap import overlaps_itself, write_overlapping
from moec.runtime.checksum import checksum
from moec.runtime.inventory import Inventory


@dataclass(frozen=True)
class Part:
    """Rows of the first dimension of the weight at `path`, and the memory for them: [len(rows), ...].

    A scalar is one row.
    """

    path: str
    rows: range
    memory: Tensor

    @classmethod
    def whole(cls, path: str, weight: Tensor) -> Part:
        """All rows of a weight."""
        memory = weight.detach() if weight.dim() else weight.detach().view(1)
        return cls(path, range(len(memory)), memory)

    @torch.no_grad()
    def take(self, values: Tensor) -> None:
        """Copy the rows' values, of any dtype; ArtifactError for another shape."""
        if values.shape != self.memory.shape:
            raise ArtifactError(
                f"rows {self.rows.start} to {self.rows.stop} of {self.path} have shape {list(values.shape)}",
                why=f"expected {list(self.memory.shape)}",
            )
        if not overlaps_itself(self.memory):
            self.memory.copy_(values)
        elif not write_overlapping(self.memory, values):
            raise ArtifactError(
                f"{self.path} is given different values where it has one",
                why="elements of it share memory",
                hint="give it memory of its own (.contiguous()) before compiling",
            )

    def take_from(self, whole: Tensor) -> None:
        """Copy the rows out of the whole weight."""
        whole = whole.detach()
        self.take((whole if whole.dim() else whole.reshape(1))[self.rows.start : self.rows.stop])


class WeightSource(Protocol):
    """Values of a model's weights."""

    def fill(self, parts: Sequence[Part]) -> None:
        """Fill the memory of every part, in whatever order costs the least."""
        ...

    def buffer(self, path: str) -> Tensor | None:
        """The value of a buffer; None to keep what the module has."""
        ...


class ModuleWeights:
    """The weights that a module holds whole, or makes one after the other (`compiler/deferred.py`)."""

    def __init__(self, module: nn.Module) -> None:
        self._weights = dict(module.named_parameters(remove_duplicate=False))
        self._recording = recording_of(module)

    def fill(self, parts: Sequence[Part]) -> None:
        """See `WeightSource`; at most one whole weight is made at a time."""
        by_path = {part.path: part for part in parts}
        unmade = {path: self._weights[path] for path in by_path if is_fake(self._weights[path])}
        for path in by_path.keys() - unmade.keys():
            by_path[path].take_from(self._weights[path])
        if unmade:
            assert self._recording is not None, "states refuse weights that nobody can make"
            self._recording.run(unmade, lambda path, value: by_path[path].take_from(value))

    def buffer(self, path: str) -> Tensor | None:
        """The module's own buffers are the run's."""
        return None

    def signature(self) -> list[str]:
        """Lines that are equal where the values are, in other processes too."""
        found = [f"{path}: values {checksum(w):08x}" for path, w in self._weights.items() if not is_fake(w)]
        operations = self._recording.operations if self._recording is not None else ()
        draws = [(operation.function, operation.draw) for operation in operations if operation.draw is not None]
        return found + [f"{function} from generator at {draw.before.hex()}" for function, draw in draws]


@torch.no_grad()
def fill_module(module: nn.Module, source: WeightSource) -> None:
    """Give every weight of a module a value, and every buffer that the source has; fakes make room for real tensors."""
    inventory = Inventory.of(module)
    made: dict[str, nn.Parameter] = {}
    parts = []
    for path, weight in inventory.weights.items():
        if path not in inventory.aliases:
            made[path] = _with_memory(weight)
            parts.append(Part.whole(path, made[path]))
    source.fill(parts)
    for path in inventory.weights:
        holder, _, name = path.rpartition(".")
        module.get_submodule(holder)._parameters[name] = made[inventory.aliases.get(path, path)]
    for path, buffer in inventory.buffers.items():
        value = None if path in inventory.aliases else source.buffer(path)
        if value is not None:
            buffer.copy_(value)


def _with_memory(weight: Tensor) -> nn.Parameter:
    if not is_fake(weight) and isinstance(weight, nn.Parameter):
        return weight
    device = torch.device("cpu") if weight.is_meta else weight.device
    empty = torch.empty_strided(weight.size(), weight.stride(), dtype=weight.dtype, device=device)
    return nn.Parameter(empty, requires_grad=weight.requires_grad)
