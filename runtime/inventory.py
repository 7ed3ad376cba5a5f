"""What a model is made of, as a training run sees it: its tensors by module path, which are trained, which are tied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from moec.compiler.errors import UnsupportedModelError
from moec.compiler.fake import is_fake
from moec.compiler.overlap import overlapping, overlaps_itself


@dataclass(frozen=True)
class Inventory:
    """The tensors of a model; the fields are those of `StepState`."""

    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    trainable: tuple[str, ...]
    without_gradient: tuple[str, ...]
    aliases: dict[str, str]
    derived_buffers: frozenset[str]

    @classmethod
    def of(cls, module: nn.Module, without_gradient: Iterable[str] = ()) -> Inventory:
        """The tensors of a module, which may have no data; see `StepState.from_module`."""
        weights = dict[str, Tensor](module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        aliases = _aliases(weights) | _aliases(buffers)
        left_out = tuple(without_gradient)
        _check_left_out(weights, left_out)
        skipped = {aliases.get(path, path) for path in left_out}
        trainable = tuple(
            path
            for path, weight in weights.items()
            if weight.requires_grad and path not in aliases and path not in skipped
        )
        saved = set(module.state_dict())
        derived = frozenset(path for path in buffers if path not in saved)
        return cls(weights, buffers, trainable, left_out, aliases, derived)


def check_weights_have_data(inventory: Inventory) -> None:
    """Raise UnsupportedModelError for a parameter without values."""
    for path, weight in inventory.weights.items():
        if is_fake(weight):
            raise UnsupportedModelError(
                f"parameter {path} has no data",
                why="it is on the meta device" if weight.is_meta else "it is a fake tensor",
                hint="load or initialise the weights before training; compiling alone needs none",
            )


def check_memory_is_apart(inventory: Inventory) -> None:
    """Raise UnsupportedModelError where an update of one weight would write another tensor, or one element twice."""
    trained = set(inventory.trainable)
    for path in inventory.trainable:
        if overlaps_itself(inventory.weights[path]):
            raise UnsupportedModelError(
                f"elements of parameter {path} share memory with each other",
                where=f"{path}: shape {list(inventory.weights[path].shape)}, stride {inventory.weights[path].stride()}",
                why="it is trained, and an update would write the same memory several times",
                hint="give it memory of its own (weight.contiguous()), or freeze it",
            )
    for one, two in overlapping({**inventory.weights, **inventory.buffers}):
        if not trained & {one, two}:
            continue
        first, second = (one, two) if one in trained else (two, one)
        if second in trained:
            why = "each would get its own gradient and moments, and the same memory two updates"
        else:
            why = f"{first} is trained, and every update of it would change {second} too"
        raise UnsupportedModelError(
            f"{_named(first, inventory)} and {_named(second, inventory)} share memory but are different tensors",
            why=why,
            hint=f"make them one (the module of {second} holds the same object), or give each its own memory",
        )


def _named(path: str, inventory: Inventory) -> str:
    return f"{'parameter' if path in inventory.weights else 'buffer'} {path}"


def _aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    first: dict[int, str] = {}
    owners = {path: first.setdefault(id(tensor), path) for path, tensor in tensors.items()}
    return {path: owner for path, owner in owners.items() if path != owner}


def _check_left_out(weights: Mapping[str, Tensor], left_out: tuple[str, ...]) -> None:
    unknown = [path for path in left_out if path not in weights]
    if unknown:
        raise UnsupportedModelError(
            f"{', '.join(unknown)} is listed as without gradient, but is no parameter of the model",
            hint="list parameter paths as model.named_parameters() gives them",
        )
