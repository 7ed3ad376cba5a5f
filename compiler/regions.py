"""Regions: find the layers that repeat, and prove which of them are the same program.

1. `find_regions` picks the modules: those whose class sets `moec_region = True`, or else the entries of the repeated
   ModuleLists.
2. `probe` runs the view once on fake tensors and records, for every call of a region, the stream of ATen ops with
   their constants, shapes and data flow. Two regions share a template exactly when their streams are equal; nothing
   is inferred from class names or configuration.
3. A region that cannot stand alone (it uses a tensor that is neither an argument nor its own weight, returns
   something other than tensors, is called twice, ...) stays part of the outer graph, and the reason is reported.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moec.compiler._torch_compat import TorchDispatchMode, pytree, unset_fake_temporarily
from moec.compiler.ambient import current
from moec.compiler.pass_manager import NearMiss
from moec.compiler.writes import written_by

MARK = "moec_region"


@dataclass(frozen=True)
class RegionCall:
    """One region as the probe saw it called.

    names: readable name of each tensor input. inputs: fakes of the tensor inputs, ambient ones last.
    ambient: names of the ambient inputs. constants, spec: how to rebuild (args, kwargs) from the inputs.
    mutated: names of the region's buffers that the call writes. key: digest of everything that makes it what it is.
    """

    path: str
    names: tuple[str, ...]
    inputs: tuple[Tensor, ...]
    ambient: tuple[str, ...]
    constants: tuple[Any, ...]
    spec: Any
    outputs: tuple[Tensor, ...]
    output_constants: tuple[Any, ...]
    output_spec: Any
    mutated: tuple[str, ...]
    key: str

    def arguments(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Tensor]]:
        """(args, kwargs, ambient) of the module's forward for these tensor inputs."""
        count = len(tensors) - len(self.ambient)
        args, kwargs = pytree.tree_unflatten(_merge(self.constants, list(tensors[:count])), self.spec)
        return args, kwargs, dict(zip(self.ambient, tensors[count:], strict=True))

    def result(self, tensors: list[Tensor]) -> Any:
        """The module's return value for these tensor outputs."""
        return pytree.tree_unflatten(_merge(self.output_constants, tensors), self.output_spec)


@dataclass
class Probe:
    """What the fake run found: calls by region path, the regions left alone with the reason, and the paths of all
    weights and buffers that the run writes (each under all of its names)."""

    calls: dict[str, RegionCall] = field(default_factory=dict)
    near_misses: list[NearMiss] = field(default_factory=list)
    written: set[str] = field(default_factory=set)

    def groups(self) -> list[list[RegionCall]]:
        """Calls with equal programs, in order of first appearance."""
        found: dict[str, list[RegionCall]] = {}
        for call in self.calls.values():
            found.setdefault(call.key, []).append(call)
        return list(found.values())


def find_regions(module: nn.Module) -> dict[str, nn.Module]:
    """Path -> module of every candidate: marked modules, else entries of lists that hold one class at least twice.

    A module that is reached by several paths is a candidate under the first.
    """
    marked = {path: child for path, child in module.named_modules() if getattr(child, MARK, False)}
    if marked:
        return _outermost(marked)
    found: dict[str, nn.Module] = {}
    for path, child in module.named_modules():
        if isinstance(child, nn.ModuleList) and len(child) > 1:
            classes = Counter(type(entry) for entry in child)
            if max(classes.values()) > 1:
                found |= {f"{path}.{index}": entry for index, entry in enumerate(child)}
    first = {id(body): path for path, body in reversed(found.items())}
    return _outermost({path: body for path, body in found.items() if first[id(body)] == path})


def probe(module: nn.Module, regions: dict[str, nn.Module], run: Callable[[], Any]) -> Probe:
    """Call `run` (which must run `module` on fake tensors) and record every call of a region."""
    result = Probe()
    with patched_forwards(regions, lambda path, body, forward: _recording(path, body, forward, result)):
        run()
    return result


def weight_slots(module: nn.Module) -> list[tuple[str, Tensor]]:
    """All parameters, then all buffers of a region, by relative path; the order in which a template takes them."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


@contextmanager
def patched_forwards(
    regions: dict[str, nn.Module], replace: Callable[[str, nn.Module, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Within the context each region's forward is `replace(path, module, forward)`."""
    before = {path: body.__dict__.get("forward") for path, body in regions.items()}
    try:
        for path, body in regions.items():
            body.forward = replace(path, body, body.forward)  # type: ignore[method-assign]
        yield
    finally:
        for path, body in regions.items():
            del body.forward
            own = before[path]
            if own is not None:
                body.forward = own  # type: ignore[method-assign]


def _outermost(candidates: dict[str, nn.Module]) -> dict[str, nn.Module]:
    return {
        path: body for path, body in candidates.items() if not any(path.startswith(f"{other}.") for other in candidates)
    }


def _recording(path: str, body: nn.Module, forward: Callable[..., Any], result: Probe) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        def leave(reason: str) -> None:
            result.calls.pop(path, None)
            result.near_misses.append(NearMiss(path, type(body).__name__, reason))

        if path in result.calls or any(miss.path == path for miss in result.near_misses):
            if path in result.calls:
                leave("it is called more than once in a forward pass")
            return forward(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        constants = tuple(None if isinstance(leaf, Tensor) else Constant(leaf) for leaf in leaves)
        around = current()
        recorder = _Recorder(weight_slots(body), [*tensors, *around.values()])
        with recorder:
            output = forward(*args, **kwargs)
        out_leaves, out_spec = pytree.tree_flatten(output)
        outputs = [leaf for leaf in out_leaves if isinstance(leaf, Tensor)]
        out_constants = tuple(None if isinstance(leaf, Tensor) else Constant(leaf) for leaf in out_leaves)
        reason = recorder.foreign or _unfit(constants) or _unfit(out_constants)
        if not outputs:
            reason = reason or "it returns no tensor"
        if reason:
            leave(reason)
            return output
        used = [name for i, name in enumerate(around) if recorder.used_input(len(tensors) + i)]
        inputs = [*tensors, *(around[name] for name in used)]
        key = _digest(
            type(body).__qualname__,
            [describe(tensor) for tensor in inputs],
            constants,
            spec,
            [(name, describe(tensor), isinstance(tensor, nn.Parameter)) for name, tensor in weight_slots(body)],
            recorder.stream,
            [recorder.token(tensor) for tensor in outputs],
            out_constants,
            out_spec,
        )
        result.calls[path] = RegionCall(
            path,
            (*_input_names(forward, args, kwargs), *used),
            tuple(inputs),
            tuple(used),
            constants,
            spec,
            tuple(outputs),
            out_constants,
            out_spec,
            tuple(name for name, _ in weight_slots(body) if name in recorder.mutated),
            key,
        )
        return output

    return run


@dataclass(frozen=True)
class Constant:
    """A non-tensor leaf of the arguments."""

    value: Any


def describe(tensor: Tensor) -> tuple[Any, ...]:
    """What a program may depend on: size, stride, dtype, device, and whether a gradient is wanted."""
    sizes = tuple(str(size) for size in tensor.size())
    return sizes, tuple(str(s) for s in tensor.stride()), str(tensor.dtype), str(tensor.device), tensor.requires_grad


_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout)


def _unfit(constants: tuple[Constant | None, ...]) -> str:
    for constant in constants:
        if constant is not None and not isinstance(constant.value, _PLAIN):
            return f"it takes or returns a {type(constant.value).__name__}, which is not a tensor or a plain constant"
    return ""


def _merge(constants: tuple[Constant | None, ...], tensors: list[Tensor]) -> list[Any]:
    remaining = iter(tensors)
    return [next(remaining) if constant is None else constant.value for constant in constants]


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _input_names(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    try:
        bound = inspect.signature(forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        bound = {f"input{i}": value for i, value in enumerate(args)} | kwargs
    flat: list[str] = []
    for name, value in bound.items():
        inner = value.items() if name == "kwargs" and isinstance(value, dict) else [(name, value)]
        for label, item in inner:
            count = sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(item))
            flat += [label] if count == 1 else [f"{label}_{i}" for i in range(count)]
    return flat


def _makes_views(func: Any) -> bool:
    return any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)


class _Recorder(TorchDispatchMode):
    """The stream of ops below autograd, with tensors named by where they come from."""

    def __init__(self, weights: list[tuple[str, Tensor]], inputs: list[Tensor]) -> None:
        super().__init__()
        self.stream: list[Any] = []
        self.foreign = ""
        self.mutated: list[str] = []
        self._tokens: dict[int, str] = {}
        self._roots: dict[int, str] = {}
        self._alive: list[Tensor] = []
        self._used: set[str] = set()
        for name, tensor in weights:
            self._name(tensor, f"weight {name}")
        for index, tensor in enumerate(inputs):
            self._name(tensor, f"input {index}")

    def token(self, tensor: Tensor) -> str:
        return self._tokens.get(id(tensor), "unknown")

    def used_input(self, index: int) -> bool:
        return f"input {index}" in self._used

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args)  # asked once per tensor, by whoever comes first: no part of any layer's program
        lifting = "lift_fresh" in str(func)
        described = pytree.tree_map(lambda leaf: self._argument(leaf, func, lifting), (args, kwargs))
        self._note_mutation(func, args, kwargs)
        output = func(*args, **kwargs)
        views = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)] if _makes_views(func) else []
        for index, leaf in enumerate(pytree.tree_leaves(output)):
            if isinstance(leaf, Tensor) and id(leaf) not in self._tokens:
                self._name(leaf, f"value {len(self.stream)}.{index}")
                if views:
                    self._roots[id(leaf)] = self._root(views[0])
        self.stream.append((str(func), described))
        return output

    def _argument(self, leaf: Any, func: Any, lifting: bool) -> Any:
        if not isinstance(leaf, Tensor):
            return str(leaf) if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) else repr(leaf)
        token = self._tokens.get(id(leaf))
        if token is None:
            if type(leaf) is Tensor and (lifting or leaf.dim() == 0):
                with unset_fake_temporarily():
                    return f"constant {leaf.dtype} {leaf.tolist()}"
            self.foreign = self.foreign or f"{func} uses a tensor of shape {tuple(leaf.shape)} from outside the layer"
            return "foreign"
        self._used.add(token)
        return token

    def _note_mutation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor in written_by(func, args, kwargs):
            kind, _, name = self._root(tensor).partition(" ")
            if kind == "input":
                self.foreign = self.foreign or f"{func} writes into an input of the layer"
            if kind == "weight" and name not in self.mutated:
                self.mutated.append(name)

    def _root(self, tensor: Tensor) -> str:
        """The token of what a tensor is a view of, its own where it is none."""
        return self._roots.get(id(tensor), self.token(tensor))

    def _name(self, tensor: Tensor, token: str) -> None:
        self._alive.append(tensor)
        self._tokens.setdefault(id(tensor), token)
