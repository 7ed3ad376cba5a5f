"""A Dynamo graph as a unit, and back: the capture of the torch.compile backend.

1. The graph runs once on the fakes that Dynamo left on its placeholders, under `make_fx(pre_dispatch=True)`. The
   result holds the ops that torch.export gives too, above autograd and not decomposed, with module paths and source
   lines. Sizes stay symbols of Dynamo's shape environment: what the trace assumes of them becomes a guard.
2. A call of a higher-order op (an autograd.Function, a checkpoint, a branch) is held out of the trace, which would keep
   its forward and lose its backward, and put back afterwards. What a checkpoint runs becomes a unit of its own.
3. Ops under no_grad stay where they are; their results are detached where something outside uses them, so that no
   pattern reaches across the border.
4. Under autocast or a functorch transform an op is not what it says; such a graph is left alone.
5. After the passes, `runnable` gives the graph back the marks by which AOTAutograd knows a graph of Dynamo's.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from moec.compiler._torch_compat import (
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    enable_python_dispatcher,
    make_fx,
    pytree,
    set_grad_enabled_op,
)
from moec.compiler.grad_modes import detach_at_border
from moec.compiler.graph import InputKind, InputValue, OutputValue, Signature, Unit, source_line


def dynamo_units(dynamo: fx.GraphModule, name: str, notes: list[str]) -> list[Unit]:
    """The unit of a graph as Dynamo gives it to a backend, then those of its checkpoints, whose modules it calls.

    A unit has one placeholder per placeholder of its graph. Weights and buffers are named by their path below the
    compiled module or function, as far as Dynamo knows it. No unit for a graph that passes cannot read; `notes` gets
    the reason for that, and for every part that stays as it is.
    """
    reason = _unreadable(dynamo.graph)
    if reason:
        notes.append(f"{name} is left as it is: {reason}")
        return []
    placeholders = dynamo.graph.find_nodes(op="placeholder")
    fakes = [node.meta["example_value"] for node in placeholders]
    traced, calls = _trace(dynamo, fakes)
    inner: list[Unit] = []
    for index, call in enumerate(calls):
        kind = str(call.target)
        if call.target is not torch.ops.higher_order.tag_activation_checkpoint:
            notes.append(f"{name}: {kind} {source_line(call)} is left as it is")
            continue
        units = dynamo_units(traced.get_submodule(call.args[0].target), f"{name} checkpoint {index}", notes)  # type: ignore[union-attr,arg-type]
        if units:
            _call_unit(traced, call, units[0])
        inner += units
    for node in traced.graph.nodes:
        node.meta["custom"] = {**(node.meta.get("custom") or {}), "path": path_in(node), "line": source_line(node)}
    _detach_no_grad(traced.graph)
    traced.graph.lint()
    traced.recompile()
    inputs = tuple(_input(node, fake) for node, fake in zip(placeholders, fakes, strict=True))
    count = len(traced.graph.output_node().args[0])  # type: ignore[arg-type]
    outputs = tuple(OutputValue("result", f"result{index}") for index in range(count))
    return [Unit(name, traced, Signature(inputs, outputs)), *inner]


def runnable(unit: Unit, dynamo: fx.GraphModule) -> tuple[fx.GraphModule, list[Tensor]]:
    """The unit's module ready for AOTAutograd, and tensors to pass to it after the arguments of `dynamo`.

    Those tensors are the constants of the graph: AOTAutograd takes no tensor that is not an argument.
    """
    module = unit.module
    constants = _lift_constants(module)
    for node, original in zip(
        module.graph.find_nodes(op="placeholder"),
        [*dynamo.graph.find_nodes(op="placeholder"), *[None] * len(constants)],
        strict=True,
    ):
        node._dynamo_source = getattr(original, "_dynamo_source", None)
    module.meta.update(dynamo.meta)
    setattr(module, "_param_name_to_source", getattr(dynamo, "_param_name_to_source", {}))  # noqa: B010 (a dict)
    return module, constants


def path_in(node: fx.Node) -> str:
    """The path of the module that a node of a Dynamo graph came from, below the compiled module or function."""
    stack = node.meta.get("nn_module_stack")
    return _ROOT.sub("", str(list(stack.values())[-1][0])) if stack else ""


def _unreadable(graph: fx.Graph) -> str:
    """Why the ops of a Dynamo graph are not what they say, '' when they are."""
    values = [node.meta.get("example_value") for node in graph.nodes]
    devices = {value.device.type for value in values if isinstance(value, Tensor)}
    if any(torch.is_autocast_enabled(device) for device in devices - {"meta"}):
        return "it runs under autocast, which changes dtypes behind the ops"
    for node in graph.nodes:
        if node.target is torch.amp.autocast_mode._enter_autocast:
            return "it enters autocast, which changes dtypes behind the ops"
        if str(getattr(node.target, "__module__", "")).startswith(("torch._functorch", "torch._C._functorch")):
            return f"it runs under a functorch transform ({node.target.__name__}), which hides dimensions from the ops"
    return ""


def _trace(dynamo: fx.GraphModule, fakes: list[Any]) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The graph in ATen, and its calls of higher-order ops."""
    interpreter = _HoldingInterpreter(dynamo)

    def run(*args: Any) -> Any:
        with fx.traceback.preserve_node_meta():
            return interpreter.run(*args)

    mode = next((fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor)), None) or FakeTensorMode()
    enabled = torch.is_grad_enabled()
    try:
        with mode, enable_python_dispatcher():
            traced = make_fx(run, pre_dispatch=True, _allow_non_fake_inputs=True)(*fakes)
    finally:
        torch.set_grad_enabled(enabled)
    held = traced.graph.find_nodes(op="call_function", target=torch.ops.moec.held.default)
    return traced, [_put_back(traced, node, dynamo, interpreter.held[node.args[0]]) for node in held]


class _HoldingInterpreter(fx.Interpreter):
    """Runs every higher-order op as `moec::held`, which the trace records without looking inside."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.held: list[fx.Node] = []

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function" or not isinstance(n.target, HigherOrderOperator):
            return super().run_node(n)
        values, spec = pytree.tree_flatten(n.meta["example_value"])
        tensors, sizes = (list(map(self.env.get, nodes)) for nodes in _held_arguments(n))
        _promised[:] = [value for value in values if isinstance(value, Tensor)]
        self.held.append(n)
        with fx.traceback.set_current_meta(n):
            results = iter(torch.ops.moec.held(len(self.held) - 1, tensors, sizes))
        return pytree.tree_unflatten([next(results) if isinstance(v, Tensor) else v for v in values], spec)


@torch.library.custom_op(
    "moec::held", mutates_args=(), schema="(int key, Tensor[] tensors, SymInt[] sizes) -> Tensor[]"
)
def held(key: int, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Stands for a higher-order op while a Dynamo graph is traced; never runs."""
    raise AssertionError("moec::held is put back before a graph runs")


@held.register_fake
def _held_fake(key: int, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    return [torch.empty_strided(v.size(), v.stride(), dtype=v.dtype, device=v.device) for v in _promised]


# What the call of `moec::held` that is being traced has to return.
_promised: list[Tensor] = []


def _held_arguments(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The tensors and the sizes that a call takes; what remains of its inputs are graphs."""
    sources = [source for source in node.all_input_nodes if source.op != "get_attr" or "example_value" in source.meta]
    tensors = [source for source in sources if isinstance(source.meta.get("example_value"), Tensor)]
    return tensors, [source for source in sources if source not in tensors]


def _put_back(traced: fx.GraphModule, node: fx.Node, dynamo: fx.GraphModule, original: fx.Node) -> fx.Node:
    """Replace a call of `moec::held` by the one it stood for."""
    tensors, sizes = _held_arguments(original)
    new = dict(zip([*tensors, *sizes], [*node.args[1], *node.args[2]], strict=True))  # type: ignore[misc]
    with traced.graph.inserting_before(node):
        for source in original.all_input_nodes:
            if source not in new:
                name = f"{source.target}_{node.name}".replace(".", "_")
                setattr(traced, name, dynamo.get_submodule(str(source.target)))
                new[source] = traced.graph.get_attr(name)
        args, kwargs = fx.map_arg((original.args, original.kwargs), lambda source: new[source])
        call = traced.graph.call_function(original.target, args, kwargs)  # type: ignore[arg-type]
        call.meta = {**node.meta, "val": original.meta["example_value"]}
        results = [path for path, v in pytree.tree_flatten_with_path(call.meta["val"])[0] if isinstance(v, Tensor)]
        for user in list(node.users):
            value = call
            keys: Any = results[user.args[1]]  # type: ignore[index]
            for key in keys:
                value = traced.graph.call_function(operator.getitem, (value, key.idx))
                value.meta = dict(user.meta)
            user.replace_all_uses_with(value)
            traced.graph.erase_node(user)
    traced.graph.erase_node(node)
    return call


def _call_unit(outer: fx.GraphModule, call: fx.Node, unit: Unit) -> None:
    """Let a checkpoint run `unit`, with the constants of the unit as further arguments."""
    name = str(call.args[0].target)  # type: ignore[union-attr]
    constants = _lift_constants(unit.module)
    setattr(outer, name, unit.module)
    with outer.graph.inserting_before(call):
        for index, value in enumerate(constants):
            outer.register_buffer(f"{name}_constant_{index}", value)
            call.args = (*call.args, outer.graph.get_attr(f"{name}_constant_{index}"))
    added = tuple(InputValue("input", f"constant_{index}") for index in range(len(constants)))
    unit.signature = Signature((*unit.signature.inputs, *added), unit.signature.outputs)


def _detach_no_grad(graph: fx.Graph) -> None:
    """Take out the switches of the gradient mode, unless a region without gradient writes into something outside.

    Where the mode is off around the whole graph nothing has a gradient anyway, and the switches stay.
    """
    switches = [node for node in graph.nodes if node.target is set_grad_enabled_op]
    if not switches or not torch.is_grad_enabled():
        return
    inside: dict[fx.Node, None] = {}
    enabled = True
    for node in graph.nodes:
        if node in switches:
            enabled = bool(node.args[0])
        elif not enabled and node.op != "output":
            inside[node] = None
    if any(_writes_outside(node, inside) for node in inside):
        return
    detach_at_border(graph, inside)
    for node in switches:
        graph.erase_node(node)


def _writes_outside(node: fx.Node, inside: dict[fx.Node, None]) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return False
    return any(
        argument.alias_info is not None and argument.alias_info.is_write and not _made_inside(value, inside)
        for argument, value in zip(schema.arguments, node.args, strict=False)
    )


def _made_inside(value: Any, inside: dict[fx.Node, None]) -> bool:
    """Whether the memory of a value was allocated inside: its chain of views starts at an op there."""
    while isinstance(value, fx.Node) and value in inside:
        schema = getattr(value.target, "_schema", None)
        if schema is None or not any(result.alias_info is not None for result in schema.returns):
            return value.op == "call_function"
        value = value.args[0]
    return False


def _lift_constants(module: fx.GraphModule) -> list[Tensor]:
    constants: list[Tensor] = []
    placeholders = module.graph.find_nodes(op="placeholder")
    after = placeholders[-1] if placeholders else None
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target))
        if not isinstance(value, Tensor):
            continue
        with module.graph.inserting_after(after) if after else module.graph.inserting_before():
            after = module.graph.placeholder(f"constant_{len(constants)}")
        after.meta = dict(node.meta)
        node.replace_all_uses_with(after)
        module.graph.erase_node(node)
        constants.append(value)
    for name in list(module._buffers):
        delattr(module, name)
    module.recompile()
    return constants


def _input(node: fx.Node, fake: Any) -> InputValue:
    requires_grad = isinstance(fake, Tensor) and fake.requires_grad
    source = getattr(getattr(node, "_dynamo_source", None), "name", "")
    text = source() if callable(source) else source  # a method until torch 2.11
    kind = next((kind for table, kind in _TABLES.items() if table in text), None)
    if kind is None:
        return InputValue("input", node.name.removeprefix("l_").strip("_"), requires_grad)
    _, *path = re.findall(r"\['([^']+)'\]", text)
    return InputValue(kind, ".".join(path), requires_grad)


_TABLES: dict[str, InputKind] = {"._parameters[": "weight", "._buffers[": "buffer"}

# L['self'] or G['model'], and what a closure adds: what paths of modules are relative to.
_ROOT = re.compile(r"^[LG]\['[^']*'\](\.__closure__\[\d+\]\.cell_contents)?\.?")
