"""The part of a training run's state that one of several ranks holds.

1. The weights of a bucket are typed views of one flat buffer of bytes (`compiler/layout.py`), which a program gathers.
   The optimizer writes the views, so an update is in the buffer at once. Views have no padding.
2. Masters, moments and gradients exist for the rows that this rank holds, and for no others.
3. Buffers are whole on every rank.
4. On real ranks `place_in` turns the parameters of the caller's model into DTensors over the same memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moec.compiler.deferred import make_buffers, recording_of
from moec.compiler.errors import ArtifactError, UnsupportedModelError
from moec.compiler.fake import is_fake
from moec.compiler.layout import BucketInstance, Role, ShardedWeight, places_per_rank, rows_of_rank
from moec.compiler.plan import MeshPlan
from moec.runtime.inventory import Inventory, check_memory_is_apart, check_weights_have_data
from moec.runtime.model_watch import ModelWatch
from moec.runtime.placements import PlacedParameter, Placements, ScalarReplica
from moec.runtime.state import StepState
from moec.runtime.weight_source import ModuleWeights, Part, WeightSource


@dataclass(frozen=True)
class Shard:
    """Where a weight lies. rows: of the whole weight, those that this rank holds. shape: of the whole weight."""

    bucket: str
    role: Role
    weight: ShardedWeight
    rows: range
    shape: tuple[int, ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what this rank holds; a scalar is a vector of one element, or of none."""
        return (len(self.rows), *self.shape[1:])


@dataclass(kw_only=True)
class ShardedState(StepState):
    """`StepState` of one rank; `weights`, `masters`, moments and `gradients` hold its rows.

    mesh, rank: which ranks there are, and which one this is. buckets: by name. shards: owning path -> where it lies.
    flats: bucket name -> uint8 [nbytes].
    """

    mesh: MeshPlan
    rank: int
    buckets: Mapping[str, BucketInstance]
    shards: Mapping[str, Shard]
    flats: dict[str, Tensor] = field(repr=False)
    _placements: Placements | None = field(init=False, default=None, repr=False)
    _placed: dict[str, PlacedParameter] = field(init=False, default_factory=dict, repr=False)
    _scalars: dict[str, ScalarReplica] = field(init=False, default_factory=dict, repr=False)

    @classmethod
    def from_module(  # type: ignore[override]
        cls,
        module: nn.Module,
        without_gradient: Iterable[str] = (),
        *,
        buckets: Mapping[str, BucketInstance],
        mesh: MeshPlan,
        rank: int,
        source: WeightSource | None = None,
        device: torch.device | str | None = None,
    ) -> ShardedState:
        """The state of rank `rank` for a module, which stays as it is.

        source: where the values come from; by default the module, which holds all of them or was built in
        `deferred_init` and makes one after the other. With a source the module's parameters may be fakes or on the meta
        device. So no rank ever holds more than its part and one weight. device: of the shards, by default that of the
        parameters.

        Raises UnsupportedModelError for a trainable weight in no bucket and for parameters or buffers without data,
        ArtifactError for buckets that belong to another model.
        """
        make_buffers(module)
        inventory = Inventory.of(module, without_gradient)
        check_memory_is_apart(inventory)
        if source is None:
            if recording_of(module) is None:
                check_weights_have_data(inventory)
            source = ModuleWeights(module)
        return cls.of(inventory, source, buckets=buckets, mesh=mesh, rank=rank, device=device)

    @classmethod
    def of(
        cls,
        inventory: Inventory,
        source: WeightSource,
        *,
        buckets: Mapping[str, BucketInstance],
        mesh: MeshPlan,
        rank: int,
        device: torch.device | str | None = None,
    ) -> ShardedState:
        """The state of rank `rank` for tensors of which only shapes and dtypes are looked at; see `from_module`."""
        shards = dict(_shards(inventory, buckets, mesh, rank))
        _check_all_sharded(inventory, shards)
        place = torch.device(device) if device is not None else _device(inventory)
        flats = {
            name: torch.zeros(bucket.layout.nbytes, dtype=torch.uint8, device=place) for name, bucket in buckets.items()
        }
        weights: dict[str, Tensor] = {}
        parts = []
        for path, whole in inventory.weights.items():
            if path in inventory.aliases:
                weights[path] = weights[inventory.aliases[path]]
            elif path in shards:
                weights[path] = _view(flats[shards[path].bucket], shards[path])
                parts.append(Part(path, shards[path].rows, weights[path]))
            else:
                weights[path] = _whole(whole, place)
                parts.append(Part.whole(path, weights[path]))
        source.fill(parts)
        buffers = {path: _buffer(path, buffer, inventory, source) for path, buffer in inventory.buffers.items()}
        return cls(
            **{**vars(inventory), "weights": weights, "buffers": buffers},
            mesh=mesh,
            rank=rank,
            buckets=buckets,
            shards=shards,
            flats=flats,
        )

    @property
    def world(self) -> int:
        """See `StepState.world`."""
        return self.mesh.world

    def whole_shape(self, path: str) -> tuple[int, ...]:
        """See `StepState.whole_shape`."""
        owner = self.owner(path)
        return self.shards[owner].shape if owner in self.shards else super().whole_shape(path)

    def shard(self, bucket: str) -> Tensor:
        """What this rank gives to an all-gather of a bucket: uint8 [nbytes], the memory of the weights themselves."""
        return self.flats[bucket]

    @torch.no_grad()
    def accumulate_shard(self, bucket: str, reduced: Tensor) -> None:
        """Add one microbatch's gradients of a bucket, reduced over the ranks: [gradient_numel], in any float dtype.

        The tensor belongs to the state from here on: the first of a step may become the sum.
        """
        instance = self.buckets[bucket]
        if reduced.shape != (instance.layout.gradient_numel,):
            raise ArtifactError(
                f"the gradients of {bucket} have shape {list(reduced.shape)}, "
                f"the bucket has [{instance.layout.gradient_numel}]",
                where=f"step {self.step + 1}",
                hint="if step.py was edited, check the line that accumulates them",
            )
        sums, pieces = [], []
        for path, weight in instance.paths():
            if not weight.has_gradient:
                continue
            shape = self.shards[path].local_shape
            count = len(self.shards[path].rows) * weight.row_numel
            piece = reduced[weight.gradient_offset : weight.gradient_offset + count].view(shape)
            total = self.gradients.get(path)
            if total is None:
                self.gradients[path] = piece.to(self.exp_avg[path].dtype)
            elif count:
                sums.append(total)
                pieces.append(piece)
        if sums:
            torch._foreach_add_(sums, pieces)

    @torch.no_grad()
    def accumulate(self, path: str, gradient: Tensor) -> None:
        """See `StepState.accumulate`, for experts that lie whole on this rank: rows of padding are left out."""
        super().accumulate(path, gradient[: len(self.shards[self.owner(path)].rows)])

    @torch.no_grad()
    def follow_weights(self) -> None:
        """See `StepState.follow_weights`; parameters of the caller's model have to be the shards they became."""
        for placed in self._placed.values():
            placed.check()
        for scalar in self._scalars.values():
            scalar.give()
        super().follow_weights()

    @torch.no_grad()
    def note_weights(self) -> None:
        """See `StepState.note_weights`; scalars of the caller's model take the value of the rank that holds them."""
        for path, scalar in self._scalars.items():
            scalar.take(self.as_dtensor(path, scalar.shard).full_tensor())
        super().note_weights()

    @torch.no_grad()
    def place_in(self, module: nn.Module) -> None:
        """Turn the module's parameters into DTensors over these shards; what they were before is freed.

        From then on a step updates the module, and writing to a parameter in place changes the run. All ranks call it
        together. A scalar cannot be sharded: its parameter is a replica, brought up to date after every step.
        """
        made: dict[str, nn.Parameter] = {}
        for path, parameter in list(module.named_parameters(remove_duplicate=False)):
            owner = self.owner(path)
            if owner not in made:
                made[owner] = nn.Parameter(self._for_module(owner), requires_grad=parameter.requires_grad)
            holder, _, name = path.rpartition(".")
            self._placed[path] = PlacedParameter(path, module.get_submodule(holder), name, made[owner])
        self.watch = ModelWatch(module, self.without_gradient)
        self.note_weights()

    def _follow_model(self) -> frozenset[str]:
        """Buffers may be others; for parameters see `PlacedParameter.check`."""
        moved = self.watch.changed() if self.watch is not None else None
        if moved is not None:
            self._scopes.clear()
            self.buffers.update(moved.inventory.buffers)
        return frozenset()

    def tensors(self) -> dict[str, Tensor]:
        """See `StepState.tensors`; sharded ones are DTensors, a scalar among them has one element in one dimension."""
        found = super().tensors()
        for name, local in found.items():
            group, _, path = name.partition(".")
            if group != "buffers" and path in self.shards:
                found[name] = self.as_dtensor(path, local)
        return found

    def as_dtensor(self, path: str, local: Tensor) -> DTensor:
        """A tensor over this rank's rows of a weight as part of the whole; all ranks call it together."""
        if self._placements is None:
            self._placements = Placements(self.mesh, self.flats[self.shards[path].bucket].device.type)
        shard = self.shards[path]
        return self._placements.sharded(shard.role, local, shard.shape or (1,))

    def _readable(self) -> dict[str, Tensor]:
        """A program reads weights from what it gathered; those of a bucket that lies on one rank, from there."""
        own = {path: weight for path, weight in self.weights.items() if self.owner(path) not in self.shards}
        for name, bucket in self.buckets.items():
            if bucket.layout.ranks == 1:
                own |= {path: _padded(self.flats[name], weight) for path, weight in bucket.paths()}
        return {**own, **self.buffers}

    def _version(self, path: str) -> int:
        placed = self._placed.get(path)
        return super()._version(path) + (placed.version if placed is not None else 0)

    def _for_module(self, path: str) -> Tensor:
        """What stands for a weight in the caller's model."""
        weight = self.weights[path]
        if path not in self.shards:
            return weight.detach()
        whole = self.as_dtensor(path, weight)
        if self.shards[path].shape:
            return whole
        assert self._placements is not None
        replica = self._placements.replicated(whole.full_tensor().reshape(()).clone())
        self._scalars[path] = ScalarReplica(replica, weight)
        return replica


def _shards(
    inventory: Inventory, buckets: Mapping[str, BucketInstance], mesh: MeshPlan, rank: int
) -> Iterator[tuple[str, Shard]]:
    """Where every weight of the buckets lies, after checking that each fits the model and comes once."""
    seen: dict[str, str] = {}
    for bucket, instance in buckets.items():
        layout = instance.layout
        ranks = mesh.world if layout.role == "dense" else mesh.edp
        if layout.ranks != ranks:
            raise _stale(f"bucket {bucket} is laid out for {layout.ranks} ranks", f"the mesh has {ranks} for it")
        for path, weight in instance.paths():
            if path in seen:
                raise _stale(f"{path} lies in two buckets, {seen[path]} and {bucket}", "a weight is sharded once")
            seen[path] = bucket
            whole = inventory.weights.get(path)
            if whole is None or path in inventory.aliases:
                why = "it is tied to another" if path in inventory.aliases else "the model has no such parameter"
                raise _stale(f"bucket {bucket} holds {path}, which is no weight of its own", why)
            shape = tuple(whole.shape)
            _check_shape(path, weight, shape, whole.dtype, layout.role, mesh)
            if weight.has_gradient != (path in inventory.trainable):
                wrong = "gets a gradient" if weight.has_gradient else "gets no gradient"
                other = "is not trained" if weight.has_gradient else "is trained"
                raise _stale(f"{path} {wrong} in bucket {bucket}", f"the model's parameter {other}")
            rows = rows_of_rank(layout.role, shape[0] if shape else 1, mesh, rank)
            yield path, Shard(bucket, layout.role, weight, rows, shape)


def _check_shape(
    path: str, weight: ShardedWeight, shape: tuple[int, ...], dtype: torch.dtype, role: Role, mesh: MeshPlan
) -> None:
    gathered = shape
    if role == "experts":
        gathered = (places_per_rank(shape[0], mesh.ep, mesh.edp), *shape[1:])
    if weight.shape != gathered or weight.torch_dtype != dtype:
        raise _stale(
            f"{path} is {weight.dtype} {list(weight.shape)} in its bucket", f"the model has {dtype} {list(gathered)}"
        )


def _check_all_sharded(inventory: Inventory, shards: Mapping[str, Shard]) -> None:
    left = [path for path in inventory.trainable if path not in shards]
    if left:
        raise UnsupportedModelError(
            f"parameter {left[0]} is trained but not sharded" + (f", and {len(left) - 1} more" if left[1:] else ""),
            why="no bucket holds it, so its gradient would not be summed over the ranks",
            hint="freeze it, or use it in the model's forward",
        )


def _stale(what: str, why: str) -> ArtifactError:
    return ArtifactError(what, why=why, hint="compile again for this model and mesh")


def _device(inventory: Inventory) -> torch.device:
    return next((weight.device for weight in inventory.weights.values() if not weight.is_meta), torch.device("cpu"))


def _view(flat: Tensor, shard: Shard) -> Tensor:
    """The rows that this rank holds, in the memory of the bucket but with a version counter of their own."""
    return _typed(flat, shard.weight, shard.local_shape)


def _padded(flat: Tensor, weight: ShardedWeight) -> Tensor:
    """All rows that a bucket of one rank has room for."""
    return _typed(flat, weight, weight.shape)


def _typed(flat: Tensor, weight: ShardedWeight, shape: tuple[int, ...]) -> Tensor:
    empty = torch.empty(0, dtype=weight.torch_dtype, device=flat.device)
    stride = torch.empty(shape, device="meta").stride()
    start = weight.offset // empty.element_size()
    return empty.set_(flat.untyped_storage(), start, shape, stride)  # type: ignore[call-overload]


def _whole(weight: Tensor, device: torch.device) -> Tensor:
    """A weight that no program reads and nothing trains: the caller's own, or a copy on every rank."""
    return torch.empty(weight.shape, dtype=weight.dtype, device=device) if is_fake(weight) else weight


@torch.no_grad()
def _buffer(path: str, buffer: Tensor, inventory: Inventory, source: WeightSource) -> Tensor:
    if is_fake(buffer):
        raise UnsupportedModelError(
            f"buffer {path} has no data",
            why="only parameters may be on the meta device or fakes",
            hint="build the model within moec.deferred_init(), which makes buffers",
        )
    saved = None if path in inventory.derived_buffers or path in inventory.aliases else source.buffer(path)
    return buffer if saved is None else buffer.copy_(saved)
