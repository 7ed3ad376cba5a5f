"""A layer template: one captured region program, the places that use it, and what the region ops ask about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor

from moec.compiler.differentiate import Joint
from moec.compiler.errors import PassError
from moec.compiler.graph import Unit
from moec.compiler.regions import RegionCall


@dataclass(frozen=True)
class ValueSpec:
    """Size, stride, dtype and device of one value; sizes are expressions in the template's own symbols."""

    size: tuple[sympy.Expr, ...]
    stride: tuple[sympy.Expr, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: Tensor, *, requires_grad: bool = False) -> ValueSpec:
        return cls(
            tuple(_expression(size) for size in tensor.size()),
            tuple(_expression(stride) for stride in tensor.stride()),
            tensor.dtype,
            tensor.device,
            requires_grad,
        )

    def fake(self, sizes: dict[sympy.Symbol, int | torch.SymInt]) -> Tensor:
        """An empty tensor of this description, with the template's symbols given as sizes of the caller."""
        return torch.empty_strided(
            [_evaluate(size, sizes) for size in self.size],
            [_evaluate(stride, sizes) for stride in self.stride],
            dtype=self.dtype,
            device=self.device,
        )


@dataclass
class Template:
    """One program shared by all `calls`.

    inputs, weights: descriptions of what the program takes. results: what the region returns, then the new values of
    the buffers it writes (`mutated`). changing: weights and buffers that something in a forward writes, its own writes
    included. grads and the positions: filled in by differentiation.
    """

    name: str
    calls: list[RegionCall]
    weight_names: tuple[str, ...]
    inputs: tuple[ValueSpec, ...]
    weights: tuple[ValueSpec, ...]
    results: tuple[ValueSpec, ...]
    mutated: tuple[str, ...]
    unit: Unit
    changing: tuple[str, ...] = ()
    grads: tuple[ValueSpec, ...] = ()
    tangent_positions: tuple[int, ...] = ()
    grad_positions: tuple[int, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(call.path for call in self.calls)

    def follow_unit(self) -> None:
        """Take over what passes have changed of the values that the unit takes and gives."""
        flags = [spec.requires_grad for spec in self.results[: len(self.results) - len(self.mutated)]]
        outputs: Sequence[Any] = self.unit.graph.output_node().args[0]  # type: ignore[assignment]
        flags += [False] * (len(outputs) - len(flags))
        given = [ValueSpec.of(n.meta["val"], requires_grad=f) for n, f in zip(outputs, flags, strict=True)]
        self.results = (*given, *self.results[len(self.results) - len(self.mutated) :])
        weights = [(node, value) for node, value in self.unit.placeholders() if value.kind != "input"]
        self.weights = tuple(ValueSpec.of(node.meta["val"], requires_grad=v.requires_grad) for node, v in weights)

    def take_gradients(self, joint: Joint) -> None:
        """Take over from differentiation which results pass a gradient back, and what gets one."""
        if tuple(joint.buffers) != self.mutated:
            raise PassError(
                f"template {self.name} writes the buffers {list(joint.buffers)}, the probe saw {list(self.mutated)}",
                where=self.paths[0],
                hint="write buffers with in-place ops on the buffer itself, such as self.count.add_(1)",
            )
        weights = len(self.weights)
        positions = {index: index - weights if index >= weights else index + len(self.inputs) for index in joint.grads}
        ordered = sorted(positions, key=lambda index: positions[index])
        self.tangent_positions = tuple(sorted(joint.tangents))
        self.grad_positions = tuple(positions[index] for index in ordered)
        self.grads = tuple(ValueSpec.of(joint.inputs[index].meta["val"]) for index in ordered)

    def take_buckets(self, joint: Joint) -> None:
        """Take over from sharding which weights now come in buckets; each bucket counts as one weight."""
        specs = dict(zip(self.weight_names, self.weights, strict=True))
        taken = [(v, node) for v, node in zip(joint.unit.signature.inputs, joint.inputs, strict=True)]
        members = [(v, node) for v, node in taken if v.kind != "input"]
        self.weight_names = tuple(v.name for v, _ in members)
        self.weights = tuple(specs.get(v.name) or ValueSpec.of(node.meta["val"]) for v, node in members)
        self.take_gradients(joint)

    @property
    def result_count(self) -> int:
        return len(self.results)

    def fake_forward(self, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        sizes = self._sizes([*inputs, *weights])
        return [spec.fake(sizes) for spec in self.results]

    def fake_backward(self, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        sizes = self._sizes([*inputs, *weights])
        return [spec.fake(sizes) for spec in self.grads]

    def run(self, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """The graph as it stands, on real tensors: results, then the new values of the buffers it writes."""
        buffers = {
            name: value.clone() for name, value in zip(self.weight_names, weights, strict=True) if name in self.mutated
        }
        held = [buffers.get(name, value) for name, value in zip(self.weight_names, weights, strict=True)]
        return [*self.unit.module(*held, *inputs), *(buffers[name] for name in self.mutated)]

    def _sizes(self, tensors: Sequence[Tensor]) -> dict[sympy.Symbol, int | torch.SymInt]:
        found: dict[sympy.Symbol, int | torch.SymInt] = {}
        for spec, tensor in zip((*self.inputs, *self.weights), tensors, strict=True):
            for expression, size in zip(spec.size, tensor.size(), strict=True):
                if isinstance(expression, sympy.Symbol):
                    found.setdefault(expression, size)
        return found


def _expression(size: int | torch.SymInt) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _evaluate(expression: sympy.Expr, sizes: dict[sympy.Symbol, int | torch.SymInt]) -> int | torch.SymInt:
    if expression.is_Integer:
        return int(expression)
    symbols = sorted(expression.free_symbols, key=str)
    value = sympy.lambdify(symbols, expression, modules=[{"FloorDiv": lambda a, b: a // b}, "math"])
    return value(*(sizes[symbol] for symbol in symbols))
