"""Models whose weights have no values yet, and how these would be made.

    with deferred_init():
        model = build("k3-mini")            # shapes alone; nothing is drawn
    recording = recording_of(model)
    recording.run(dict(model.named_parameters()), take)     # take(path, value): one weight after the other, with the
                                                            # bits that build() would have given

1. Within the context these tensors are fakes: those without values (`torch.empty`), constants of floating-point
   numbers, random ones, and whatever is computed from such. What writes to them is recorded, by storage, so that views
   need no record. Everything else is computed as usual.
2. A random operation draws nothing. Its place in the stream of its generator is recorded as a token: after each one the
   generator moves on by a single number, so that a generator that is seeded, forked or set back is recognised.
3. `run` runs the record (`compiler/replay.py`), each random operation at its place of the stream.

What reads a value that is not there yet (`.item()`) makes the record run for it, and so does `make_buffers`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from moec.compiler._torch_compat import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    ShapeEnv,
    TorchDispatchMode,
    pytree,
)
from moec.compiler.errors import DeferredInitError

_aten = torch.ops.aten
_EMPTY = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_CONSTANT = {
    _aten.zeros.default,
    _aten.ones.default,
    _aten.full.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.full_like.default,
    _aten.new_zeros.default,
    _aten.new_ones.default,
    _aten.new_full.default,
}
_OVERWRITING = {"normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_", "zero_"}
_OVERWRITING |= {"fill_", "copy_", "bernoulli_"}


@dataclass(frozen=True)
class View:
    """A tensor as part of a storage, which is known by its number."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Draw:
    """Where a random operation stands. before, after: tokens."""

    generator: torch.Generator
    before: bytes
    after: bytes


@dataclass(frozen=True)
class Operation:
    """One recorded call. args, kwargs, results: with a View for each deferred tensor.

    reads, writes: storages. fresh: storages whose values before the call do not matter. default: torch's default dtype
    at the call.
    """

    function: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[View, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    fresh: frozenset[int]
    draw: Draw | None
    default: torch.dtype


@dataclass
class Recording:
    """How deferred tensors get their values.

    storages: number -> (bytes, device) of every storage that was met. states: token -> state of a generator that
    recording found, and did not make, or that is known since something has looked at values. ends: the generators at
    the end of the context, with their tokens.
    """

    operations: list[Operation] = field(default_factory=list)
    storages: dict[int, tuple[int, torch.device]] = field(default_factory=dict)
    states: dict[bytes, Tensor] = field(default_factory=dict)
    ends: list[tuple[torch.Generator, bytes]] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict, repr=False)
    _alive: list[torch.UntypedStorage] = field(default_factory=list, repr=False)

    def view(self, tensor: Tensor) -> View:
        """A tensor of this recording as part of a storage."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            self._alive.append(storage)  # or another could be allocated in its place
            self.storages[self._numbers[key]] = storage.nbytes(), tensor.device
        return View(
            self._numbers[key], tensor.dtype, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset())
        )

    def run(self, wanted: Mapping[str, Tensor], take: Callable[[str, Tensor], None]) -> None:
        """Call `take(name, value)` for deferred tensors, each as soon as it is final; a value is freed after the call.

        What else is alive meanwhile is what the initialisation itself needs at a time. The generators then stand as
        after a build.
        """
        from moec.compiler.replay import replay

        replay(self, {name: self.view(tensor) for name, tensor in wanted.items()}, take, finish=True)

    def values(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values of some deferred tensors by name; the generators stay as they are."""
        from moec.compiler.replay import replay

        found: dict[str, Tensor] = {}
        replay(self, {n: self.view(tensor) for n, tensor in wanted.items()}, found.__setitem__, finish=False)
        return found


_RECORDINGS: WeakKeyDictionary[FakeTensorMode, Recording] = WeakKeyDictionary()


@contextmanager
def deferred_init() -> Iterator[Recording]:
    """Build a model within this context, and its weights get values when a step is made of it; see the module.

    Each rank then makes its own rows of one weight after the other, with the bits that one rank would have. Raises
    DeferredInitError where the shape of a tensor depends on values that are not there yet.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    recording = _RECORDINGS[mode] = Recording()
    recorder = _Recorder(recording, mode)
    with recorder, _conversions():
        yield recording
    recording.ends = [(generator, _digest(generator)) for generator in recorder.generators.values()]


def recording_of(module: nn.Module) -> Recording | None:
    """How the weights of a module get their values, None where they have them or nobody knows."""
    for parameter in module.parameters():
        if isinstance(parameter, FakeTensor):
            return _RECORDINGS.get(parameter.fake_mode)
    return None


def make_buffers(module: nn.Module) -> None:
    """Give deferred buffers their values, in place of the fakes; attributes that are the same tensor too."""
    recording = recording_of(module)
    if recording is None:
        return
    fakes = {path: b for path, b in module.named_buffers(remove_duplicate=False) if isinstance(b, FakeTensor)}
    values = {id(fakes[path]): value for path, value in recording.values(fakes).items()}
    for child in module.modules():
        for table in (child._buffers, child.__dict__):
            for name, tensor in table.items():
                if id(tensor) in values:
                    table[name] = values[id(tensor)]


class _Recorder(TorchDispatchMode):
    """Decides for each operation whether it runs or is recorded."""

    def __init__(self, recording: Recording, mode: FakeTensorMode) -> None:
        super().__init__()
        self._recording, self._mode = recording, mode
        self._made: set[bytes] = set()
        self.generators: dict[int, torch.Generator] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        deferred = any(isinstance(tensor, FakeTensor) for tensor in given)
        random = torch.Tag.nondeterministic_seeded in func.tags
        if not deferred and not random and func not in _EMPTY | _CONSTANT:
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        if any(not isinstance(tensor, FakeTensor) for tensor in written):
            raise _too_late(func)
        try:
            with self._mode:
                result = func(*args, **kwargs)
        except DataDependentOutputException:
            return self._look(func, args, kwargs)
        leaves = pytree.tree_leaves(result)
        if any(isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) for leaf in leaves):
            return self._look(func, args, kwargs)
        results = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if any(not all(isinstance(size, int) for size in tensor.size()) for tensor in results):
            raise _shapeless(func)
        if not results:
            return result
        if not deferred and func in _CONSTANT and not results[0].is_floating_point():
            return func(*args, **kwargs)
        self._record(func, args, kwargs, written, results, random)
        return result

    def _record(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: list[Tensor],
        results: list[Tensor],
        random: bool,
    ) -> None:
        recording = self._recording

        def stored(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return recording.view(leaf) if isinstance(leaf, FakeTensor) else leaf.detach().clone()

        stored_args, stored_kwargs = pytree.tree_map(stored, (args, kwargs))
        given = {leaf.storage for leaf in pytree.tree_leaves((stored_args, stored_kwargs)) if isinstance(leaf, View)}
        views = [recording.view(tensor) for tensor in results]
        made = tuple(view for view in views if view.storage not in given)
        writes = {recording.view(tensor).storage for tensor in written} | {view.storage for view in made}
        if not writes or func in _EMPTY:
            return  # a view, or memory without values
        fresh = {view.storage for view in made}
        reads = set(given)
        if func._schema.name.removeprefix("aten::") in _OVERWRITING and _covers(written[0]):
            own = recording.view(written[0]).storage
            others = pytree.tree_leaves((stored_args[1:], stored_kwargs))
            if not any(isinstance(leaf, View) and leaf.storage == own for leaf in others):
                fresh.add(own)
                reads.discard(own)
        draw = self._draw(func, kwargs, (written + results)[0].device) if random else None
        recording.operations.append(
            Operation(
                func,
                stored_args,
                stored_kwargs,
                tuple(views) if made else (),
                frozenset(reads),
                frozenset(writes),
                frozenset(fresh),
                draw,
                torch.get_default_dtype(),
            )
        )

    def _draw(self, func: OpOverload, kwargs: Mapping[str, Any], device: torch.device) -> Draw:
        generator = kwargs.get("generator") or _default_generator(device)
        self.generators[id(generator)] = generator
        before = _digest(generator)
        if before not in self._made:
            self._recording.states[before] = generator.get_state()
        torch.empty(1, device=device).uniform_(generator=generator)
        after = _digest(generator)
        self._made.add(after)
        return Draw(generator, before, after)

    def _look(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of an operation that looks at values."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        fakes = {str(index): leaf for index, leaf in enumerate(leaves) if isinstance(leaf, FakeTensor)}
        values = self._recording.values(fakes)
        args, kwargs = pytree.tree_unflatten([values.get(str(i), leaf) for i, leaf in enumerate(leaves)], spec)
        return func(*args, **kwargs)


@contextmanager
def _conversions() -> Iterator[None]:
    """`module.to(...)` puts new tensors into the module, since a fake cannot become another in place."""
    apply = nn.Module._apply
    made: dict[tuple[int, int], tuple[Any, Tensor, Tensor]] = {}

    def exchange(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(function)
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, value in table.items():
                if value is not None:
                    key = id(function), id(value)  # tied tensors stay tied; what is kept keeps its number
                    if key not in made:
                        made[key] = function, value, _converted(value, function)
                    table[name] = made[key][2]
        return module

    nn.Module._apply = exchange  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module._apply = apply  # type: ignore[method-assign]


def _converted(value: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    with torch.no_grad():
        new = function(value)
    if new is value or not isinstance(value, nn.Parameter):
        return new
    return nn.Parameter(new, requires_grad=value.requires_grad)


def _shapeless(func: OpOverload) -> DeferredInitError:
    return DeferredInitError(
        f"the shape of what {func} returns depends on values that the initialisation has yet to make",
        why="the model is built without its weights",
        hint="build the model outside of deferred_init(), or give sizes as numbers",
    )


def _too_late(func: OpOverload) -> DeferredInitError:
    return DeferredInitError(
        f"{func} writes values that the initialisation has yet to make to a tensor that has its values",
        why="the model is built without its weights; only weights made by torch.empty, zeros, ones, full, or at random "
        "are made later",
        hint="build the model outside of deferred_init(), or make that tensor with torch.empty",
    )


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes to, by its schema."""
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


def _covers(tensor: Tensor) -> bool:
    """Whether a tensor is all of its storage, each element once."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes() and _dense(tensor)


def _dense(tensor: Tensor) -> bool:
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def _digest(generator: torch.Generator) -> bytes:
    return digest_of(generator.get_state())


def digest_of(state: Tensor) -> bytes:
    """A short name of a generator's state."""
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()
