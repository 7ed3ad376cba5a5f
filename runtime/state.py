"""The state of a training run: weights, buffers, gradients and AdamW's moments, all by module path.

Invariants:
1. `weights` and `buffers` hold the caller's own tensors, those that the model has now; every update is made in place.
2. A tied weight has several paths and one tensor. The first path in module order owns it: gradients, master and
   moments exist under that path only, and `aliases` leads from each other path to it.
3. Sums and moments are float32 (float64 for float64 weights). A half or bfloat16 weight has a float32 master, which is
   what the optimizer changes; the weight is its rounded copy.
4. A parameter without an entry in `gradients` is not touched by the optimizer, not even by weight decay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from moec.compiler.errors import ArtifactError
from moec.runtime.host_cache import HostCache
from moec.runtime.inventory import Inventory, check_memory_is_apart, check_weights_have_data
from moec.runtime.model_watch import ModelWatch


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
    watch: notices what the caller does to the model; None for a state without one.
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
    watch: ModelWatch | None = field(init=False, default=None, repr=False)
    _scopes: dict[str, Mapping[str, Tensor]] = field(init=False, default_factory=dict, repr=False)
    _host_cache: HostCache | None = field(init=False, default=None, repr=False)
    _versions: dict[str, int] = field(init=False, default_factory=dict, repr=False)
    _cleared: dict[str, int] = field(init=False, default_factory=dict, repr=False)

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
        Raises UnsupportedModelError for parameters without data, and where an update would write memory that is not
        the weight's alone.
        """
        inventory = Inventory.of(module, without_gradient)
        check_weights_have_data(inventory)
        check_memory_is_apart(inventory)
        state = cls(**vars(inventory))
        state.watch = ModelWatch(module, without_gradient)
        return state

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

    def separate_buffers(self) -> None:
        """Take copies of the module's buffers, for a rank that is not alone in its process; several names of one stay
        one."""
        own = {id(buffer): buffer.clone() for buffer in self.buffers.values()}
        self.buffers = {path: own[id(buffer)] for path, buffer in self.buffers.items()}

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

    def host_cache(self, capacity: int) -> HostCache:
        """The host memory for values between forward and backward, made at the first call: bytes of its pool."""
        if self._host_cache is None:
            self._host_cache = HostCache(self.device, capacity)
        return self._host_cache

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
        """Notice what the caller did to the model since the last step; see `ModelWatch`.

        A half-precision weight that is another tensor, moved, or was written to, gives its master the value. Moments
        stay what they are. Raises ModelChangedError when the model does not fit the step any more.
        """
        moved = self._follow_model()
        for path, master in self.masters.items():
            version = self._version(path)
            if path in moved or self._versions.get(path, version) != version:
                with torch.no_grad():
                    master.copy_(self.weights[path])

    def _follow_model(self) -> frozenset[str]:
        """Take over tensors that the model holds in the place of others; returns the paths of those that moved."""
        moved = self.watch.changed() if self.watch is not None else None
        if moved is None:
            return frozenset()
        self._scopes.clear()
        self._cleared.clear()
        self.weights.update(moved.inventory.weights)
        self.buffers.update(moved.inventory.buffers)
        return moved.paths

    def note_weights(self) -> None:
        """The weights are as the step left them; what changes from here on is the caller's doing."""
        self._versions = {path: self._version(path) for path in self.masters}

    def _version(self, path: str) -> int:
        """A number that grows with every write to a weight."""
        return self.weights[path]._version

    def written_versions(self) -> list[int]:
        """A number for each trainable path that grows when the optimizer writes it."""
        return [(self.masters.get(path, self.weights[path]))._version for path in self.trainable]

    def clear_gradients(self) -> None:
        """Forget all sums; called before the first microbatch of a step."""
        self.gradients.clear()
        self.overflow.clear()

    @torch.no_grad()
    def clear_buffer(self, path: str) -> None:
        """Set a buffer to zero, and know from then on that it is, until something writes it."""
        buffer = self.buffers[path]
        buffer.zero_()
        self._cleared[self.owner(path)] = buffer._version

    def is_cleared(self, path: str) -> bool:
        """Whether a buffer is known to be zero; its values are read at the first question alone."""
        owner, buffer = self.owner(path), self.buffers[path]
        if owner not in self._cleared:
            self._cleared[owner] = -1 if bool(buffer.any()) else buffer._version
        return self._cleared[owner] == buffer._version

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


def scale_dtype(weights: Iterable[Tensor]) -> torch.dtype:
    """The dtype of what scales a loss: in float32 it would round the loss of a model in float64."""
    return torch.float64 if any(weight.dtype == torch.float64 for weight in weights) else torch.float32


def _zeros(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight, dtype=sum_dtype(weight.dtype), requires_grad=False)
