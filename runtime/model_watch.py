"""Notice what a caller did to a model since its step was compiled, before every step and at little cost.

1. Parameters and buffers that are other objects now, or lie in other memory, are followed: the step works on those that
   the model holds.
2. What the program does not fit any more is refused by name: other paths, shapes, dtypes, devices, ties or trained
   parameters, modules that were added or replaced, and modules that changed between training and evaluation mode.

Attributes that are no tensors, and hooks, are what they were when the step was compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any, NoReturn

from torch import Tensor, nn

from moec.compiler.errors import ModelChangedError
from moec.runtime.inventory import Inventory, check_memory_is_apart, check_weights_have_data

_NAMED = 3


@dataclass(frozen=True)
class Moved:
    """The tensors of a model now, and the paths of those that are other objects or in other memory than before."""

    inventory: Inventory
    paths: frozenset[str]


class ModelWatch:
    """What a module was when this was made.

    without_gradient: see `StepState.from_module`.
    """

    def __init__(self, module: nn.Module, without_gradient: Iterable[str] = ()) -> None:
        self._module, self._without_gradient = module, tuple(without_gradient)
        self._modules = dict(module.named_modules())
        self._modes = [child.training for child in self._modules.values()]
        self._note(Inventory.of(module, self._without_gradient))

    def changed(self) -> Moved | None:
        """The present tensors, if any is another one, or elsewhere, than at the last call.

        Raises ModelChangedError naming what no longer fits the step.
        """
        if [child.training for child in self._modules.values()] != self._modes:
            self._refuse_mode()
        same = not any(self._empty) and all(table.is_same() for table in self._tables)
        if same and [place(tensor) for place, tensor in self._tensors] == self._places:
            return None
        self._check_modules()
        inventory = Inventory.of(self._module, self._without_gradient)
        self._check(inventory)
        before = self._whereabouts
        self._note(inventory)
        return Moved(inventory, frozenset(p for p, where in self._whereabouts.items() if where != before[p]))

    def _note(self, inventory: Inventory) -> None:
        self._before = inventory
        self._described = _described(inventory)
        children = self._modules.values()
        tables: list[Mapping[str, Any]] = [t for c in children for t in (c._parameters, c._buffers, c._modules)]
        self._tables = [_Table.of(table) for table in tables if table]
        self._empty = [table for table in tables if not table]
        named = {**inventory.weights, **inventory.buffers}
        distinct = {id(tensor): tensor for tensor in named.values()}.values()
        self._tensors = [(_of_shard if _is_placed(tensor) else _place, tensor) for tensor in distinct]
        self._places = [place(tensor) for place, tensor in self._tensors]
        where = {id(tensor): place for (_, tensor), place in zip(self._tensors, self._places, strict=True)}
        self._whereabouts = {path: (id(tensor), where[id(tensor)]) for path, tensor in named.items()}

    def _refuse_mode(self) -> NoReturn:
        path, child = next(
            (path, child)
            for (path, child), mode in zip(self._modules.items(), self._modes, strict=True)
            if child.training != mode
        )
        now, then = ("training", "evaluation") if child.training else ("evaluation", "training")
        raise ModelChangedError(
            f"{f'module {path}' if path else 'the model'} is in {now} mode",
            where=path,
            why=f"it was in {then} mode when the step was compiled, and the step computes what it did then",
            hint=f"call {path or 'model'}.{'train' if then == 'training' else 'eval'}(), or compile the model again",
        )

    def _check_modules(self) -> None:
        now = dict(self._module.named_modules())
        for path in sorted({*now, *self._modules}):
            if now.get(path) is not self._modules.get(path):
                happened = "added" if path not in self._modules else "removed" if path not in now else "replaced"
                raise _other_model(f"module {path} was {happened}", path)

    def _check(self, now: Inventory) -> None:
        before, described = self._described, _described(now)
        for path in sorted({*before, *described}):
            then, here = before.get(path), described.get(path)
            if then is None or here is None:
                raise _other_model(f"{(then or here)[0]} {path} was {'added' if then is None else 'removed'}", path)  # type: ignore[index]
            if then != here:
                differs = next(index for index, pair in enumerate(zip(then, here, strict=True)) if pair[0] != pair[1])
                raise _other_model(f"{here[0]} {path} was {then[differs]}, now it is {here[differs]}", path)
        self._check_ties(now)
        for path in sorted({*now.trainable} ^ {*self._before.trainable}):
            trained = "requires a gradient, and did not" if path in now.trainable else "requires no gradient, and did"
            raise _other_model(f"parameter {path} {trained}", path)
        if not any(map(_is_placed, now.weights.values())):
            check_weights_have_data(now)
            check_memory_is_apart(now)

    def _check_ties(self, now: Inventory) -> None:
        before = self._before.aliases
        for path in sorted({*before, *now.aliases}):
            if before.get(path) == now.aliases.get(path):
                continue
            if path in now.aliases:
                raise _other_model(f"{path} is tied to {now.aliases[path]} now, and was not", path)
            raise ModelChangedError(
                f"{path} was tied to {before[path]}, and is a tensor of its own now",
                where=path,
                why="the step was compiled for one tensor under both names",
                hint="let both modules hold the same object again, or compile the model again",
            )


@dataclass(frozen=True)
class _Table:
    """One dictionary of a module, as it was: its parameters, buffers or children."""

    live: Mapping[str, Any]
    names: tuple[str, ...]
    values: tuple[Any, ...]

    @classmethod
    def of(cls, live: Mapping[str, Any]) -> _Table:
        return cls(live, tuple(live), tuple(live.values()))

    def is_same(self) -> bool:
        live = self.live
        return len(live) == len(self.values) and all(map(is_, live.values(), self.values)) and tuple(live) == self.names


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """What tells that a tensor is another one under the same object."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _of_shard(tensor: Tensor) -> tuple[Any, ...]:
    """The same of a DTensor; at its memory looks who placed it."""
    return (tensor.requires_grad,)


def _is_placed(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, whose class is not loaded where there is one rank."""
    return hasattr(tensor, "to_local")


def _described(inventory: Inventory) -> dict[str, tuple[str, ...]]:
    """Path -> kind, and what a program depends on, in words."""
    kinds = (("parameter", inventory.weights), ("buffer", inventory.buffers))
    return {
        path: (kind, f"of shape {list(tensor.shape)}", str(tensor.dtype).removeprefix("torch."), f"on {tensor.device}")
        for kind, tensors in kinds
        for path, tensor in tensors.items()
    }


def _other_model(what: str, path: str) -> ModelChangedError:
    return ModelChangedError(
        what,
        where=path,
        why="the model is no longer the one that the step was compiled for",
        hint="undo the change, or compile the model again",
    )
