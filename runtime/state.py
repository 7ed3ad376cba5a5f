"""The state of a training run: weights, buffers, gradients and AdamW's moments, all by module path.

Invariants:
1. `weights` and `buffers` hold the caller's own tensors; every update is made in place on them.
2. A tied weight has several paths and one tensor. The first path in module order owns it: gradients, master and
   moments exist under that path only, and `aliases` leads from each other path to it.
3. Sums and moments are float32 (float64 for float64 weights). A half or bfloat16 weight has a float32 master, which is
   what the optimizer changes; the weight is its rounded copy.
4. A parameter without an entry in `gradients` is not touched by the optimizer, not even by weight decay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn

from moec.compiler.errors import ArtifactError, UnsupportedModelError
from moec.compiler.fake import is_fake


@dataclass(frozen=True)
class Inventory:
    """What a model is made of; the fields are those of `StepState`."""

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


@dataclass
class StepState:
    """Everything that a step reads and writes beside its batch.

    weights, buffers: path -> tensor; aliases of tied tensors are keys too and give the same tensor.
    trainable: paths of owning weights that the optimizer may change.
    without_gradient: paths that require a gradient but by design never get one (modules run under no_grad).
    aliases: other path of a tied weight or buffer -> owning path.
    derived_buffers: buffers that the model computes itself and leaves out of its own state_dict.
    masters, exp_avg, exp_avg_sq: trainable path -> tensor of the weight's shape.
    gradients: trainable path -> sum over the microbatches so far.
    overflow: path of experts -> rows beyond their capacity, int64 [E], summed over the microbatches so far.
    capacities: the same paths -> rows that each expert takes from a rank.
    updates: trainable path -> how often the optimizer has changed it (the step of AdamW's bias correction).
    step: completed optimizer steps.
    """

    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    trainable: tuple[str, ...]
    without_gradient: tuple[str, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)
    derived_buffers: frozenset[str] = frozenset()
    step: int = 0
    masters: dict[str, Tensor] = field(init=False)
    exp_avg: dict[str, Tensor] = field(init=False)
    exp_avg_sq: dict[str, Tensor] = field(init=False)
    gradients: dict[str, Tensor] = field(init=False, default_factory=dict)
    updates: dict[str, int] = field(init=False)
    overflow: dict[str, Tensor] = field(init=False, default_factory=dict)
    capacities: dict[str, int] = field(init=False, default_factory=dict)
    _scopes: dict[str, Mapping[str, Tensor]] = field(init=False, default_factory=dict, repr=False)
    _where: dict[str, int] = field(init=False, default_factory=dict, repr=False)
    _versions: dict[str, int] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        weights = {path: self.weights[path].detach() for path in self.trainable}
        self.masters = {
            path: weight.to(sum_dtype(weight.dtype))
            for path, weight in weights.items()
            if weight.dtype != sum_dtype(weight.dtype)
        }
        self.exp_avg = {path: _zeros(weight) for path, weight in weights.items()}
        self.exp_avg_sq = {path: _zeros(weight) for path, weight in weights.items()}
        self.updates = dict.fromkeys(self.trainable, 0)
        self.note_weights()

    @classmethod
    def from_module(cls, module: nn.Module, without_gradient: Iterable[str] = ()) -> StepState:
        """State over a module's own parameters and buffers, sharing their storage.

        without_gradient: parameters to leave out of training although they require a gradient; a path that is no
        parameter is an error. Frozen parameters (requires_grad=False) are weights that nothing changes.
        Raises UnsupportedModelError for parameters without data, and for different trainable ones that share memory.
        """
        inventory = Inventory.of(module, without_gradient)
        check_weights_have_data(inventory)
        check_memory_is_apart(inventory)
        return cls(**vars(inventory))

    @property
    def world(self) -> int:
        """Number of ranks that share the weights."""
        return 1

    @property
    def device(self) -> torch.device:
        """Where the weights are, and where small exchanges between ranks run."""
        return next((weight.device for weight in self.weights.values()), torch.device("cpu"))

    def whole_shape(self, path: str) -> tuple[int, ...]:
        """Shape of a weight, of which several ranks hold a part each."""
        return tuple(self.weights[path].shape)

    def owner(self, path: str) -> str:
        """The path under which a weight's gradient and moments are kept: itself, or the first of its tied names."""
        return self.aliases.get(path, path)

    @torch.no_grad()
    def accumulate(self, path: str, gradient: Tensor) -> None:
        """Add one microbatch's gradient of a weight; all names of a tied weight add to one sum.

        The first gradient is copied, so the caller's tensor may be expanded, or be shared between parameters.
        """
        path = self.owner(path)
        if path not in self.exp_avg:
            raise ArtifactError(
                f"a gradient arrived for {path}, which is not trained",
                where=f"step {self.step + 1}",
                why="it is frozen, unknown, or listed as a parameter without gradient",
                hint="compile the model again after changing requires_grad",
            )
        if gradient.shape != self.weights[path].shape:
            raise ArtifactError(
                f"the gradient of {path} has shape {list(gradient.shape)}, "
                f"the weight has {list(self.weights[path].shape)}",
                where=f"step {self.step + 1}",
                hint="if step.py was edited, check the line that accumulates it",
            )
        total = self.gradients.get(path)
        if total is None:
            self.gradients[path] = torch.empty_like(self.exp_avg[path]).copy_(gradient)
        else:
            total.add_(gradient)

    def accumulate_layer(self, path: str, gradients: Mapping[str, Tensor]) -> None:
        """Add the gradients of one layer, by weight name relative to the layer at `path`."""
        for name, gradient in gradients.items():
            self.accumulate(f"{path}.{name}" if path else name, gradient)

    def note_overflow(self, path: str, rows: Tensor, *, capacity: int) -> None:
        """Add the rows of one microbatch that were too many for the experts at `path`: int64 [E]."""
        self.capacities[path] = capacity
        self.overflow[path] = rows if path not in self.overflow else self.overflow[path] + rows

    def scope(self, path: str) -> Mapping[str, Tensor]:
        """Weights and buffers below a module path, by relative name; "" gives all of them."""
        if path not in self._scopes:
            prefix = f"{path}." if path else ""
            self._scopes[path] = {
                name.removeprefix(prefix): tensor.detach()
                for name, tensor in self._readable().items()
                if name.startswith(prefix)
            }
        return self._scopes[path]

    def _readable(self) -> dict[str, Tensor]:
        """What `scope` gives, by full path."""
        return {**self.weights, **self.buffers}

    def follow_weights(self) -> None:
        """Notice what the caller did to the weights since the last step: moved them, or wrote new values.

        A moved weight is read where it is now; a half-precision weight that was written to gives its master the value.
        """
        where = {path: tensor.data_ptr() for path, tensor in self.weights.items()}
        moved = {path for path, place in where.items() if self._where.get(path, place) != place}
        if where != self._where:
            self._scopes.clear()
            self._where = where
        for path, master in self.masters.items():
            version = self._version(path)
            if self._versions.get(path, version) != version or path in moved:
                with torch.no_grad():
                    master.copy_(self.weights[path])

    def note_weights(self) -> None:
        """The weights are as the step left them; what changes from here on is the caller's doing."""
        self._versions = {path: self._version(path) for path in self.masters}

    def _version(self, path: str) -> int:
        """A number that grows with every write to a weight."""
        return self.weights[path]._version

    def clear_gradients(self) -> None:
        """Forget all sums; called before the first microbatch of a step."""
        self.gradients.clear()
        self.overflow.clear()

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Read the masters again from the weights; needed after anything but the step wrote to the weights."""
        for path, master in self.masters.items():
            master.copy_(self.weights[path])

    def tensors(self) -> dict[str, Tensor]:
        """All persistent tensors under flat names, "weights.PATH", "exp_avg.PATH" ...; tied tensors once.

        A scalar parameter and what belongs to it have one element in one dimension, as when it is sharded.
        """
        groups: Mapping[str, Mapping[str, Tensor]] = {
            "weights": self.weights,
            "buffers": self.buffers,
            "masters": self.masters,
            "exp_avg": self.exp_avg,
            "exp_avg_sq": self.exp_avg_sq,
        }
        return {
            f"{group}.{path}": tensor.detach() if tensor.dim() or group == "buffers" else tensor.detach().view(1)
            for group, members in groups.items()
            for path, tensor in members.items()
            if path not in self.aliases
        }


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of a weight are summed and its moments are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _zeros(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight, dtype=sum_dtype(weight.dtype), requires_grad=False)


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
    """Two parameters over one memory would be updated twice, each with its own moments: UnsupportedModelError."""
    spans = sorted(
        (str(weight.device), weight.data_ptr(), weight.data_ptr() + _extent(weight), path)
        for path, weight in ((path, inventory.weights[path]) for path in inventory.trainable)
        if weight.numel()
    )
    for (device, _, end, path), (other_device, start, _, other) in pairwise(spans):
        if device == other_device and start < end:
            raise UnsupportedModelError(
                f"parameters {path} and {other} share memory but are different parameters",
                why="each would get its own gradient and moments, and the same memory two updates",
                hint=f"tie them as one parameter: the module of {other} must hold the same nn.Parameter object",
            )


def _extent(weight: Tensor) -> int:
    """Bytes from a tensor's first to behind its last element."""
    last = sum((size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True))
    return (last + 1) * weight.element_size()
