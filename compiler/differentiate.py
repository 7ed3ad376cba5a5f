"""Differentiate a unit: one joint graph that computes results, new buffer values and gradients.

`aot_export_joint_with_descriptors` traces forward and backward; every argument and output is found by its descriptor,
never by position. The joint graph is functional: buffers that the unit writes come back as values.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from moec.compiler._torch_compat import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
    aot_export_joint_with_descriptors,
)
from moec.compiler.errors import PassError
from moec.compiler.fake import fake_like
from moec.compiler.graph import Unit, module_path, tensor_meta
from moec.compiler.unused_gradients import ask_for_used_gradients, leave_to_backward

aten = torch.ops.aten


@dataclass
class Joint:
    """A differentiated unit.

    inputs: one placeholder per entry of the unit's signature. tangents: result index -> placeholder of its gradient.
    results: one node per result. buffers: buffer name -> node with its new value. grads: input index -> node, only
    for inputs that get a gradient.
    """

    unit: Unit
    graph: fx.Graph
    module: fx.GraphModule
    inputs: list[fx.Node]
    tangents: dict[int, fx.Node]
    results: list[fx.Node]
    buffers: dict[str, fx.Node]
    grads: dict[int, fx.Node]


def differentiate(unit: Unit, *, input_flags: list[bool] | None = None) -> Joint:
    """The joint graph of `unit`; inputs marked `requires_grad` in its signature get gradients."""
    flags = [value.requires_grad for value in unit.signature.inputs]
    nodes = [node for node, _ in unit.placeholders()]
    mode = _mode(nodes)
    for node in unit.graph.nodes:
        node.meta.pop("unbacked_bindings", None)
    args = tuple(
        fake_like(node.meta["val"], mode, requires_grad=flag)
        for node, flag in zip(nodes, input_flags or flags, strict=True)
    )
    with _fresh_results(unit), ExitStack() as stack:
        try:
            joint = aot_export_joint_with_descriptors(stack, unit.module, args)
        except Exception as error:  # torch raises many kinds here
            raise _failure(unit, error) from error
        found = _read(unit, joint.graph_module)
    _drop_fresh_results(found)
    _carry_paths(found.graph)
    _clean(found)
    _rebase_sizes(found)
    ask_for_used_gradients(found.graph)
    leave_to_backward(found.graph)
    found.graph.eliminate_dead_code()  # also values of which only the size was used: they would be saved for backward
    return found


def _failure(unit: Unit, error: Exception) -> PassError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return PassError(
        f"unit {unit.name} cannot be differentiated",
        where=unit.instances[0] or "the model outside its layers",
        why=f"{type(error).__name__}: {lines[0] if lines else ''}",
        hint="run forward and backward once in eager mode to see whether it is the model's own",
    )


@contextmanager
def _fresh_results(unit: Unit) -> Iterator[None]:
    """Within the context the unit returns copies of its floating point results.

    AOTAutograd gives a result that shares memory with an input no tangent: it expects its caller to connect the two.
    """
    output = unit.graph.output_node()
    before = output.args
    copies = []
    for node in before[0]:  # type: ignore[union-attr]
        value = tensor_meta(node) if isinstance(node, fx.Node) else None
        if value is not None and value.is_floating_point():
            with unit.graph.inserting_before(output):
                node = unit.graph.call_function(aten.clone.default, (node,))
            node.meta = {"val": value}
        copies.append(node)
    output.args = (tuple(copies),)
    unit.module.recompile()
    try:
        yield
    finally:
        output.args = before
        for copy, node in zip(copies, before[0], strict=True):  # type: ignore[arg-type]
            if copy is not node and isinstance(copy, fx.Node):
                unit.graph.erase_node(copy)
        unit.module.recompile()


def _drop_fresh_results(joint: Joint) -> None:
    for index, node in enumerate(joint.results):
        value = tensor_meta(node)
        if value is not None and value.is_floating_point():
            joint.results[index] = node.args[0]  # type: ignore[assignment]
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            joint.graph.erase_node(node)


def _mode(nodes: list[fx.Node]) -> Any:
    values = [node.meta["val"] for node in nodes]
    symbolic = [v for v in values if any(isinstance(size, torch.SymInt) for size in v.shape)]
    return (symbolic or values)[-1].fake_mode


def _read(unit: Unit, module: fx.GraphModule) -> Joint:
    graph = module.graph
    names = [value.name for value in unit.signature.inputs]
    inputs: list[fx.Node | None] = [None] * len(names)
    tangents: dict[int, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        match node.meta["desc"]:
            case PlainAOTInput(idx=index):
                inputs[index] = node
            case TangentAOTInput(output=PlainAOTOutput(idx=index)):
                tangents[index] = node
            case TangentAOTInput(output=InputMutationAOTOutput()):
                _be_zero(node)  # a step never hands a gradient to the next one through a buffer
            case other:
                raise PassError(f"differentiation of {unit.name} made an argument moec does not know: {other}")
    output = graph.output_node()
    results: dict[int, fx.Node] = {}
    buffers: dict[str, fx.Node] = {}
    grads: dict[int, fx.Node] = {}
    for node, description in zip(output.args[0], output.meta["desc"], strict=True):  # type: ignore[arg-type]
        match description:
            case PlainAOTOutput(idx=index):
                results[index] = node  # type: ignore[assignment]
            case InputMutationAOTOutput(mutated_input=PlainAOTInput(idx=index)):
                if unit.signature.inputs[index].kind != "input":  # a step leaves its batch as it is
                    buffers[names[index]] = node  # type: ignore[assignment]
            case GradAOTOutput(grad_of=PlainAOTInput(idx=index)):
                if node is not None:
                    grads[index] = node  # type: ignore[assignment]
            case None:
                pass
            case other:
                raise PassError(f"differentiation of {unit.name} made an output moec does not know: {other}")
    missing = [name for name, node in zip(names, inputs, strict=True) if node is None]
    if missing:
        raise PassError(f"differentiation of {unit.name} lost the arguments {', '.join(missing)}")
    sparse = [names[index] for index, node in grads.items() if node.meta["val"].layout != torch.strided]
    if sparse:
        raise PassError(
            f"the gradient of {sparse[0]} is sparse",
            where=", ".join(sparse),
            why="a step sums gradients of microbatches in dense float32",
            hint="make the embedding with sparse=False",
        )
    ordered = [results[i] for i in sorted(results)]
    buffers = {name: buffers[name] for name in names if name in buffers}
    tangents = dict(sorted(tangents.items()))
    return Joint(unit, graph, module, [n for n in inputs if n is not None], tangents, ordered, buffers, grads)


def _be_zero(tangent: fx.Node) -> None:
    value = tangent.meta["val"]
    with tangent.graph.inserting_after(tangent.graph.find_nodes(op="placeholder")[-1]):
        zeros = tangent.graph.call_function(
            aten.zeros.default, (list(value.shape),), {"dtype": value.dtype, "device": value.device}
        )
    zeros.meta = {"val": value, "partitioner_tag": "is_backward"}
    tangent.replace_all_uses_with(zeros)


def _carry_paths(graph: fx.Graph) -> None:
    """Give every node the module path of the forward code it came from, under meta["custom"]["path"]."""
    for node in graph.nodes:
        custom = node.meta.get("custom")
        if not custom or "path" not in custom:
            path = module_path(node).removeprefix("body.").removeprefix("body")
            node.meta["custom"] = {**(custom or {}), "path": path}
    for node in graph.nodes:
        if node.meta.get("partitioner_tag") == "is_backward" and not node.meta["custom"]["path"]:
            node.meta["custom"] = {**node.meta["custom"], "path": _common_module(node.all_input_nodes)}


def _common_module(nodes: list[fx.Node]) -> str:
    """The innermost module that all these values come from: where a sum of gradients belongs."""
    paths = [module_path(node).split(".") for node in nodes if node.op == "call_function"]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _clean(joint: Joint) -> None:
    """Drop nodes without meaning in a functional graph, and give every `view` the semantics of `reshape`.

    A real kernel may return other strides than its fake (softplus_backward does), and then `view` would fail.
    """
    replaced: dict[fx.Node, fx.Node] = {}
    for node in list(joint.graph.nodes):
        if node.op != "call_function":
            continue
        if _asserts_a_size(node):
            joint.graph.erase_node(node)
            continue
        source = _value_of(node)
        if source is not None:
            node.replace_all_uses_with(source)
            replaced[node] = replaced.get(source, source)
            joint.graph.erase_node(node)
        elif node.target in _VIEWS:
            node.target = aten.reshape.default
            _skip_inner_reshape(node)
    joint.results = [replaced.get(node, node) for node in joint.results]
    joint.buffers = {name: replaced.get(node, node) for name, node in joint.buffers.items()}
    joint.grads = {index: replaced.get(node, node) for index, node in joint.grads.items()}
    joint.graph.eliminate_dead_code()
    joint.graph.lint()


def _rebase_sizes(joint: Joint) -> None:
    """Compute every size from sizes of the unit's inputs, so that forward and backward both can."""
    homes: dict[sympy.Expr, tuple[fx.Node, int]] = {}
    for node in joint.inputs:
        for dim, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt):
                homes.setdefault(size.node.expr, (node, dim))
    for node in joint.graph.find_nodes(op="call_function", target=aten.sym_size.int):
        expression = node.meta["val"].node.expr
        if expression in homes:
            node.args = homes[expression]
        elif expression.free_symbols <= homes.keys():
            with joint.graph.inserting_before(node):
                node.replace_all_uses_with(_size(joint.graph, expression, homes))
            joint.graph.erase_node(node)


def _size(graph: fx.Graph, expression: sympy.Expr, homes: dict[sympy.Expr, tuple[fx.Node, int]]) -> Any:
    """Nodes that compute a size from those in `homes`; a number where nothing is symbolic."""
    if expression.is_Integer:
        return int(expression)
    if expression in homes:
        return _call(graph, aten.sym_size.int, *homes[expression])
    operation = _SIZE_OPERATIONS.get(type(expression).__name__)
    if operation is None:
        raise PassError(f"a size of the joint graph is {expression}, which moec cannot compute from input sizes")
    parts = [_size(graph, part, homes) for part in expression.args]
    return functools.reduce(lambda one, two: _call(graph, operation, one, two), parts)


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta = {
        "val": target(*(arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args)),
        "custom": {"path": ""},
    }
    return node


def _asserts_a_size(node: fx.Node) -> bool:
    """Whether a node asserts that a size that is data is not negative, which no size is."""
    if node.target is not aten._assert_scalar.default or not isinstance(node.args[0], fx.Node):
        return False
    condition = node.args[0]
    size = condition.args[0] if condition.target is operator.ge and condition.args[1] == 0 else None
    return isinstance(size, fx.Node) and size.target is aten.sym_size.int


def _value_of(node: fx.Node) -> fx.Node | None:
    """The node whose value this one only passes on, or None."""
    if node.target in _NO_OPS:
        source = node.args[0]
    elif node.target is aten.t.default and getattr(node.args[0], "target", None) is aten.t.default:
        source = node.args[0].args[0]  # type: ignore[union-attr]
    elif node.target in {*_VIEWS, aten.reshape.default} and _same_kind(node, node.args[0]):  # type: ignore[arg-type]
        source = node.args[0]
    elif node.target is aten.copy.default:
        source = node.args[1]
        old, new = node.args[0], source
        if not isinstance(old, fx.Node) or not isinstance(new, fx.Node) or not _same_kind(old, new):
            return None
    else:
        return None
    return source if isinstance(source, fx.Node) else None


def _skip_inner_reshape(node: fx.Node) -> None:
    source = node.args[0]
    if isinstance(source, fx.Node) and source.target is aten.reshape.default:
        node.args = (source.args[0], node.args[1])


def _same_kind(one: fx.Node, two: fx.Node) -> bool:
    a, b = one.meta["val"], two.meta["val"]
    return a.dtype == b.dtype and a.shape == b.shape and a.device == b.device


_SIZE_OPERATIONS: dict[str, Callable[..., Any]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "Pow": operator.pow,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
}
_NO_OPS = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default}
_VIEWS = {aten.view.default, aten._unsafe_view.default}


def is_tensor(node: fx.Node) -> bool:
    """Whether a node yields one tensor (not a tuple, not a size)."""
    return isinstance(node.meta.get("val"), Tensor)


def is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem
