"""Replay a step without data, and find the most device memory that it holds.

1. Every storage counts from the op that makes it to the deletion of its last name: in forward, in the backward of every
   layer with the values that it saved, and as a sum of gradients until the step ends.
2. A layer's graph is replayed at each of its calls, so that what it shares with others counts once.
3. A step with several microbatches is replayed for two: the second one finds the sums of the first.

The update works in place and holds less than forward and backward, so it is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from moec.compiler.allocations import rounded
from moec.compiler.cache_schedule import END, outside
from moec.compiler.collectives import WAIT
from moec.compiler.dialect.registry import nbytes
from moec.compiler.differentiate import is_getitem
from moec.compiler.liveness import Instruction, Liveness, Lives
from moec.compiler.memory import MemoryPlan, ProgramParts, StateBytes
from moec.compiler.partition import Partitioned
from moec.compiler.storages import Storages, parked_in

_OPS = torch.ops.moec
_REDUCE = torch.ops._c10d_functional.reduce_scatter_tensor.default


def predict_memory(program: ProgramParts, state: StateBytes, lives: Lives | None = None) -> MemoryPlan:
    """Replay one step. lives: of the allocator's granularity, for a program that is replayed in several forms."""
    return _Replay(program, state, lives or Lives()).run()


class _Replay:
    def __init__(self, program: ProgramParts, state: StateBytes, lives: Lives) -> None:
        self._program, self._state, self._granularity = program, state, lives.granularity
        self._memory = Storages(state.total + program.copies)
        self._gradients: dict[str, int] = {}
        self._saved: dict[str, list[Any]] = {}
        parts = {name: layer for name, (_, layer) in program.templates.items()}
        # A function deletes what it was given only in backward.
        self._forward = {
            name: lives.of(layer.forward, [*_outputs(layer.forward), *layer.forward.find_nodes(op="placeholder")])
            for name, layer in parts.items()
        }
        self._backward = {name: lives.of(layer.backward, _outputs(layer.backward)) for name, layer in parts.items()}
        self._own_copies = program.outer.copies()
        self._outer_forward = lives.of(program.outer.forward, _kept(program.outer))
        self._outer_backward = lives.of(program.outer.backward)
        self._times_given = Counter(_outputs(program.outer.backward))

    def run(self) -> MemoryPlan:
        memory, saved = self._memory, 0
        by_template: dict[str, int] = {}
        for _ in range(min(self._program.accumulation, 2)):
            before = memory.held
            self._run_forward()
            saved = max(saved, memory.held - before)
            for name, (template, _) in self._program.templates.items():
                by_template[name] = memory.distinct(self._saved.get(template.paths[0]))
            self._run_backward()
        gradients = sum(self._gradients.values())
        return MemoryPlan(
            self._state,
            gradients,
            saved,
            memory.peak,
            memory.where,
            memory.host_peak,
            by_template,
            self._program.copies,
        )

    # the outer program

    def _run_forward(self) -> None:
        outer, memory = self._program.outer, self._memory
        names = self._names(outer, outer.forward)
        self._walk(self._outer_forward, names, "forward")
        self._release(END)
        outputs = _outputs(outer.forward)
        self._saved[END] = [memory.hold(names[node]) for node in outputs[len(outputs) - len(outer.saved) :]]
        memory.drop(list(names.values()))

    def _run_backward(self) -> None:
        outer = self._program.outer
        names = self._names(outer, outer.backward, saved=self._saved.pop(END))
        self._prefetch(END)
        own = self._own_gradients()
        self._walk(self._outer_backward, names, "backward", own)
        for node, wanted in own.items():
            if node.op != "call_function":
                self._accumulate(wanted, node)

    def _own_gradients(self) -> dict[fx.Node, list[str]]:
        """Gradients that the outer backward adds to the state one by one, not with those of a whole layer."""
        joint = self._program.outer.joint
        found: dict[fx.Node, list[str]] = {}
        for index, node in zip(joint.grads, self._program.outer.backward.output_node().args[0], strict=True):  # type: ignore[arg-type]
            if isinstance(node, fx.Node) and not self._goes_with_layer(node) and not _is_reduced(node):
                found.setdefault(node, []).append(joint.unit.signature.inputs[index].name)
        return found

    # layers

    def _call(self, node: fx.Node, names: dict[fx.Node, Any]) -> list[Any]:
        """Replay the forward of a layer; returns its results, with one reference each."""
        name, path, inputs, *_ = node.args
        _, parts = self._program.templates[str(name)]
        memory = self._memory
        inner = self._names(parts, parts.forward, inputs=[names[i] for i in inputs], weights=self._weights(node, names))  # type: ignore[union-attr, index]
        memory.hold(list(inner.values()))
        self._walk(self._forward[str(name)], inner, f"forward of {path}")
        outputs = _outputs(parts.forward)
        count = len(outputs) - len(parts.saved)
        results = [memory.hold(inner[value]) for value in outputs[:count]]
        by_role = {value.meta["role"]: value for value in parts.forward.find_nodes(op="placeholder")}
        kept = [*outputs[count:], *(by_role[role] for role in _saved_inputs(parts))]
        self._saved[str(path)] = [memory.hold(inner[value]) for value in kept]
        memory.drop(list(inner.values()))
        self._release(str(path))
        return results

    def _call_backward(self, node: fx.Node, names: dict[fx.Node, Any]) -> list[Any]:
        """Replay the backward of a layer; returns the gradients in the order of the op, with one reference each."""
        name, path, *_, tangents = node.args
        template, parts = self._program.templates[str(name)]
        self._prefetch(str(path))
        memory, saved = self._memory, self._saved.pop(str(path))
        given = dict(zip(parts.joint.tangents, (names[t] for t in tangents), strict=True))  # type: ignore[union-attr, index]
        inner = self._names(
            parts, parts.backward, saved=saved[: len(parts.saved)], tangents=given, weights=self._weights(node, names)
        )
        memory.hold([value for n, value in inner.items() if n.meta["role"][0] != "saved"])
        by_role = dict(zip(_saved_inputs(parts), saved[len(parts.saved) :], strict=True))
        inner |= {n: by_role[n.meta["role"]] for n in inner if n.meta["role"] in by_role}
        self._walk(self._backward[str(name)], inner, f"backward of {path}")
        grads = dict(zip(parts.joint.grads, parts.backward.output_node().args[0], strict=True))  # type: ignore[arg-type]
        found = {index: inner.get(value) for index, value in grads.items() if isinstance(value, fx.Node)}
        memory.hold(list(found.values()))
        memory.drop(list(inner.values()))
        weights = len(template.weights)
        order = [
            p - len(template.inputs) if p >= len(template.inputs) else p + weights for p in template.grad_positions
        ]
        values = [found.get(index) for index in order]
        users = {int(user.args[1]): user for user in node.users if is_getitem(user)}  # type: ignore[arg-type]
        for place, index in enumerate(order):
            value = parts.joint.unit.signature.inputs[index]
            if value.kind == "weight" and place in users and self._goes_with_layer(users[place]):
                self._accumulate([f"{path}.{value.name}"], users[place])
        return values

    def _weights(self, node: fx.Node, names: dict[fx.Node, Any]) -> dict[str, Any]:
        """What the outer program hands to a layer by the names of its weights: buckets, and weights that it shares."""
        return {n: names[v] for n, v in zip(node.meta.get("weight_names", ()), node.args[3], strict=False)}  # type: ignore[arg-type]

    def _names(
        self,
        parts: Partitioned,
        graph: fx.Graph,
        *,
        inputs: Sequence[Any] = (),
        saved: Sequence[Any] = (),
        tangents: dict[int, Any] | None = None,
        weights: dict[str, Any] | None = None,
    ) -> dict[fx.Node, Any]:
        """The values of a graph's placeholders; None for what the state holds."""
        signature = parts.joint.unit.signature.inputs
        position = {i: n for n, i in enumerate(i for i, value in enumerate(signature) if value.kind == "input")}
        found: dict[fx.Node, Any] = {}
        for node in graph.find_nodes(op="placeholder"):
            kind, index = node.meta["role"]
            if kind == "saved":
                found[node] = saved[index]
            elif kind == "tangent":
                found[node] = (tangents or {}).get(index)
            elif signature[index].kind == "input":
                found[node] = inputs[position[index]] if inputs else None
            else:
                found[node] = (weights or {}).get(signature[index].name)
        return found

    # statements

    def _walk(
        self, code: Liveness, names: dict[fx.Node, Any], now: str, own: dict[fx.Node, list[str]] | None = None
    ) -> None:
        for instruction in code.instructions:
            node = instruction.node
            self._memory.now = f"{node.target} in {now}"
            names[node] = self._value(instruction, names)
            if own and node in own:
                self._accumulate(own[node], node)
            if _is_reduced(node):
                self._accumulate_shard(node, names)
            for dead in instruction.dies:
                if dead in names:
                    self._memory.drop(names.pop(dead))

    def _value(self, instruction: Instruction, names: dict[fx.Node, Any]) -> Any:
        node, memory = instruction.node, self._memory
        if node.target is _OPS.region.default:
            return self._call(node, names)
        if node.target is _OPS.region_backward.default:
            return self._call_backward(node, names)
        if node.target is _OPS.offload.default:
            parked = memory.park(names[node.args[0]], instruction.sizes)  # type: ignore[index]
            if node in self._own_copies:
                self._saved[outside(self._own_copies[node])] = [parked]
            return parked
        if node.target is _OPS.fetch.default:
            return memory.fetch(names[node.args[0]])  # type: ignore[index]
        if is_getitem(node):
            whole = names[node.args[0]]  # type: ignore[index]
            return memory.hold(whole[int(node.args[1])] if isinstance(whole, list) else whole)  # type: ignore[arg-type]
        if instruction.view or node.target is WAIT:
            return memory.hold(names.get(node.args[0]))  # type: ignore[arg-type]
        made = memory.make(instruction.sizes)
        memory.see(instruction.workspace)
        return made

    def _accumulate(self, names: Sequence[str], node: fx.Node) -> None:
        """The first gradient of a weight is copied into a sum of its own."""
        self._memory.now = f"the sum of gradients of {names[0]}"
        for name in names:
            owner = self._program.tied.get(name, name)
            if owner not in self._gradients:
                self._gradients[owner] = rounded(self._sum_bytes(node), self._granularity)
                self._memory.make(self._gradients[owner])

    def _accumulate_shard(self, node: fx.Node, names: dict[fx.Node, Any]) -> None:
        """The first reduced gradients of a bucket become its sum where they have the dtype of sums."""
        bucket = str(node.meta["bucket"])
        if bucket in self._gradients:
            return
        self._gradients[bucket] = rounded(self._sum_bytes(node), self._granularity)
        if nbytes(node.meta["val"]) == self._sum_bytes(node):
            self._memory.hold(names[node])
        else:
            self._memory.make(self._gradients[bucket])

    def _goes_with_layer(self, node: fx.Node) -> bool:
        """Whether a gradient is added to the state together with its whole layer."""
        if not is_getitem(node) or node.args[0].target is not _OPS.region_backward.default:  # type: ignore[union-attr]
            return False
        return self._times_given[node] <= 1 and all(user.op == "output" for user in node.users)

    def _sum_bytes(self, node: fx.Node) -> int:
        value = node.meta["val"]
        return nbytes(value) // value.element_size() * max(value.element_size(), torch.float32.itemsize)

    def _release(self, path: str) -> None:
        for holder in self._program.schedule.release.get(path, ()):
            for parked in parked_in(self._saved[holder]):
                self._memory.release(parked)

    def _prefetch(self, path: str) -> None:
        self._memory.now = f"prefetch before {path or 'backward'}"
        for holder in self._program.schedule.prefetch.get(path, ()):
            for parked in parked_in(self._saved[holder]):
                self._memory.prefetch(parked)


def _outputs(graph: fx.Graph) -> list[fx.Node]:
    return [value for value in graph.output_node().args[0] if isinstance(value, fx.Node)]  # type: ignore[union-attr]


def _kept(outer: Partitioned) -> list[fx.Node]:
    """What lives until the outer forward ends; new values of buffers are written as soon as a layer gives them."""
    outputs, count = _outputs(outer.forward), len(outer.joint.results)
    written = outputs[count : count + len(outer.joint.buffers)]
    return [*outputs[:count], *(v for v in written if not _of_layer(v)), *outputs[count + len(written) :]]


def _of_layer(node: fx.Node) -> bool:
    return is_getitem(node) and node.args[0].target is _OPS.region.default  # type: ignore[union-attr]


def _is_reduced(node: fx.Node) -> bool:
    return node.target is WAIT and isinstance(node.args[0], fx.Node) and node.args[0].target is _REDUCE


def _saved_inputs(parts: Partitioned) -> list[tuple[str, int]]:
    """Roles of the inputs (not weights) that a backward reads, in the order in which they are saved."""
    signature = parts.joint.unit.signature.inputs
    roles = [node.meta["role"] for node in parts.backward.find_nodes(op="placeholder")]
    return [role for role in roles if role[0] == "input" and signature[role[1]].kind == "input"]
