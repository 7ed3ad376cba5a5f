"""Units and programs: what nodes know of themselves."""

from __future__ import annotations

import operator

import torch
from torch import fx, nn

from moec.compiler.graph import OUTER, Program, module_path, op_histogram, source_line, tensor_meta

from .units import unit_of


def node_with(**meta: object) -> fx.Node:
    node = fx.Graph().call_function(torch.ops.aten.exp.default, (1,))
    node.meta.update(meta)
    return node


def test_paths_come_from_our_tag_before_torchs_stack() -> None:
    stack = {"1": ("L['self'].layers", None), "2": ("L['self'].layers.0.norm", None)}
    assert module_path(node_with(nn_module_stack=stack)) == "layers.0.norm"
    assert module_path(node_with(fwd_nn_module_stack=stack)) == "layers.0.norm"
    assert module_path(node_with(nn_module_stack={"1": ("L['self']", None)})) == ""
    assert module_path(node_with(nn_module_stack=stack, custom={"path": "mine"})) == "mine"
    assert module_path(node_with(nn_module_stack=stack, custom={"other": 1})) == "layers.0.norm"
    assert module_path(node_with()) == ""


def test_lines_are_those_of_the_innermost_frame() -> None:
    trace = '  File "outer.py", line 3, in forward\n    x = f(x)\n  File "/a b/inner.py", line 12, in f\n    return x\n'
    assert source_line(node_with(stack_trace=trace)) == "/a b/inner.py:12"
    assert source_line(node_with(stack_trace="")) == ""
    assert source_line(node_with()) == ""


def test_units_pair_placeholders_with_their_signature() -> None:
    unit = unit_of(nn.Linear(4, 4), torch.randn(2, 4))
    pairs = [(value.name, tuple(node.meta["val"].shape)) for node, value in unit.placeholders()]
    assert pairs == [("weight", (4, 4)), ("bias", (4,)), ("input", (2, 4))]
    assert unit.signature.names("weight") == ["weight", "bias"]
    assert op_histogram(unit.graph) == {"aten.linear.default": 1}
    graph = fx.Graph()
    graph.call_function(operator.getitem, (graph.placeholder("pair"), 0))
    assert op_histogram(graph) == {"getitem": 1}
    assert tensor_meta(unit.graph.find_nodes(op="placeholder")[2]) is not None
    assert tensor_meta(node_with(val=(1, 2))) is None


def test_the_outer_unit_is_apart_from_the_templates() -> None:
    layer, outer = unit_of(nn.Tanh(), torch.randn(2), name="layer"), unit_of(nn.Tanh(), torch.randn(2), name=OUTER)
    program = Program({"layer": layer, OUTER: outer})
    assert program.outer is outer
    assert program.templates() == [layer]
    assert (outer.is_outer, layer.is_outer) == (True, False)
