"""A step program that interprets graphs node by node, in place of the emitted text.

It has the functions of an emitted `step.py` (forward, backward, update, step), so that a step can run on the graphs of
any stage, and a pass on them can be judged by its numbers (stage_ranks.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, fx

from moec.codegen.program import Section
from moec.compiler.graph import OutputValue
from moec.compiler.partition import Partitioned
from moec.runtime.sharded_state import ShardedState
from moec.runtime.state import StepState

Saved = dict[str, tuple[list[Any], list[Any]]]
"""Path of a layer, "" for the outer graph -> its saved values, and its inputs."""

Reader = Callable[[str, int], Any]
Around = Callable[[fx.Node, Callable[[], Any]], Any]
Caller = Callable[[fx.Node, tuple[Any, ...]], list[Any]]


@dataclass
class GraphProgram:
    """sections, outer: the partitioned graphs. results: what outer gives. emitted: gives `update`.

    around: runs every op that is no call of a layer, given its node and what runs it.
    """

    sections: Sequence[Section]
    outer: Partitioned
    results: Sequence[OutputValue]
    emitted: ModuleType
    around: Around = field(default=lambda node, run: run())

    def __post_init__(self) -> None:
        self._sections = {section.template.name: section for section in self.sections}
        self.DEVICE: torch.device = self.emitted.DEVICE
        self.__file__ = self.emitted.__file__

    def forward(self, state: StepState, batch: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Saved]:
        """Results of one microbatch by name, and what `backward` needs."""
        saved: Saved = {}

        def layer(node: fx.Node, args: tuple[Any, ...]) -> list[Any]:
            template, path, inputs, weights = args
            parts = self._sections[template].parts
            outputs = self._run(parts, parts.forward, _layer_reader(state, parts, node, path, weights, inputs))
            count = len(outputs) - len(parts.saved)
            saved[path] = outputs[count:], inputs
            return outputs[:count]

        inputs = [batch.get(value.name) for value in self.outer.joint.unit.signature.inputs if value.kind == "input"]
        outputs = self._run(self.outer, self.outer.forward, _outer_reader(state, self.outer, inputs), layer)
        count, written = len(self.outer.joint.results), list(self.outer.joint.buffers)
        saved[""] = outputs[count + len(written) :], inputs
        for name, value in zip(written, outputs[count : count + len(written)], strict=True):
            state.scope("")[name].copy_(value)
        results = {}
        for result, value in zip(self.results, outputs[:count], strict=True):
            if result.kind == "overflow":
                state.note_overflow(result.name, value, capacity=result.capacity)
            else:
                results[result.name] = value
        return results, saved

    def backward(self, state: StepState, saved: Saved) -> None:
        """Add the gradients of one microbatch to the state."""

        def layer(node: fx.Node, args: tuple[Any, ...]) -> list[Any]:
            template, path, _, weights, tangents = args
            known, parts = self._sections[template].template, self._sections[template].parts
            kept, inputs = saved.pop(path)
            given = dict(zip(parts.joint.tangents, tangents, strict=True))
            read = _layer_reader(state, parts, node, path, weights, inputs, kept, given)
            found = dict(zip(parts.joint.grads, self._run(parts, parts.backward, read), strict=True))
            count = len(known.inputs)
            return [found[p - count if p >= count else p + len(known.weights)] for p in known.grad_positions]

        kept, inputs = saved.pop("")
        joint = self.outer.joint
        seeds = {
            index: torch.ones((), dtype=node.meta["val"].dtype, device=self.DEVICE)
            for index, node in joint.tangents.items()
        }
        read = _outer_reader(state, self.outer, inputs, kept, seeds)
        outputs = self._run(self.outer, self.outer.backward, read, layer)
        for index, value in zip(joint.grads, outputs, strict=True):
            wanted = joint.unit.signature.inputs[index]
            if wanted.kind == "shard":
                cast(ShardedState, state).accumulate_shard(wanted.name, value)
            elif value is not None:
                state.accumulate(wanted.name, value)

    def update(self, state: StepState, lr: float) -> Tensor:
        """As the emitted program updates."""
        return self.emitted.update(state, lr)

    def step(
        self, state: StepState, batches: Sequence[Mapping[str, Tensor]], lr: float
    ) -> tuple[dict[str, Tensor], Tensor]:
        """One optimizer step over all microbatches: sums of the results by name, and the gradient norm."""
        totals: dict[str, Tensor] = {}
        for batch in batches:
            results, saved = self.forward(state, batch)
            self.backward(state, saved)
            for name, value in results.items():
                totals[name] = totals[name] + value if name in totals else value
        return totals, self.update(state, lr)

    def _run(self, parts: Partitioned, graph: fx.Graph, read: Reader, layer: Caller | None = None) -> list[Any]:
        return list(_Interpreter(parts.joint.module, graph, read, layer, self.around).run())


def _outer_reader(
    state: StepState,
    parts: Partitioned,
    inputs: Sequence[Any],
    saved: Sequence[Any] = (),
    tangents: Mapping[int, Tensor] | None = None,
) -> Reader:
    def shard(name: str) -> Tensor:
        return cast(ShardedState, state).shard(name)

    return _reader(parts, state.scope(""), shard, inputs, saved, tangents or {})


def _layer_reader(
    state: StepState,
    parts: Partitioned,
    node: fx.Node,
    path: str,
    weights: Sequence[Tensor],
    inputs: Sequence[Any],
    saved: Sequence[Any] = (),
    tangents: Mapping[int, Tensor] | None = None,
) -> Reader:
    names = [value.name for value in parts.joint.unit.signature.inputs if value.kind == "bucket"]
    buckets = dict(zip(names, weights, strict=False))
    shared = dict(zip(node.meta.get("weight_names", ())[len(names) :], weights[len(names) :], strict=False))
    return _reader(parts, {**state.scope(path), **shared}, buckets.__getitem__, inputs, saved, tangents or {})


def _reader(
    parts: Partitioned,
    named: Mapping[str, Tensor],
    bucket: Callable[[str], Tensor],
    inputs: Sequence[Any],
    saved: Sequence[Any],
    tangents: Mapping[int, Tensor],
) -> Reader:
    """What each placeholder of a partitioned graph stands for, by its role."""
    signature = parts.joint.unit.signature
    places = [index for index, value in enumerate(signature.inputs) if value.kind == "input"]

    def read(kind: str, index: int) -> Any:
        if kind == "saved":
            return saved[index]
        if kind == "tangent":
            return tangents[index]
        value = signature.inputs[index]
        if value.kind == "input":
            return inputs[places.index(index)]
        return bucket(value.name) if value.kind in ("bucket", "shard") else named[value.name]

    return read


class _Interpreter(fx.Interpreter):
    def __init__(
        self, module: fx.GraphModule, graph: fx.Graph, read: Reader, layer: Caller | None, around: Around
    ) -> None:
        super().__init__(module, graph=graph)
        self._read, self._layer, self._around = read, layer, around

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "placeholder":
            return self._read(*n.meta["role"])
        if n.target in _CALLS and self._layer is not None:
            args, _ = self.fetch_args_kwargs_from_env(n)
            return self._layer(n, args)
        if n.op != "call_function":
            return super().run_node(n)
        return self._around(n, functools.partial(super().run_node, n))


_CALLS = {torch.ops.moec.region.default, torch.ops.moec.region_backward.default}
