"""How ops are written: every short form computes bit for bit what the op computes."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from moec.codegen.function import literal
from moec.codegen.operators import _FORMS, call_text, is_binary, wrap
from moec.compiler.errors import UnsupportedOpError
from moec.compiler.size_ops import SIZE_OPS

aten = torch.ops.aten
F = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
G = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
SQUARE = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
INTS = torch.arange(12).reshape(3, 4)
BATCH = torch.stack([SQUARE, SQUARE.t()])

# Arguments that tell the overload from its neighbours: scalars, broadcasts, integer tensors, negative dimensions.
SAMPLES: dict[Any, list[tuple[Any, ...]]] = {
    aten.sym_size.int: [(F, 0), (F, 1)],
    aten.add.Tensor: [(F, G), (F, 2), (INTS, 0.5), (F, INTS)],
    aten.sub.Tensor: [(F, G), (INTS, 1)],
    aten.mul.Tensor: [(F, G), (F, -2.5), (INTS, 0.5), (F, F[0])],
    aten.div.Tensor: [(F, G), (INTS, 3)],
    aten.add.Scalar: [(F, 2), (INTS, 0.5)],
    aten.mul.Scalar: [(F, 2)],
    aten.neg.default: [(F,)],
    aten.mm.default: [(F, SQUARE)],
    aten.bmm.default: [(BATCH, BATCH)],
    aten.addmm.default: [(F[0], G, SQUARE)],
    aten.eq.Tensor: [(F, F), (INTS, F)],
    aten.ne.Tensor: [(F, G)],
    aten.ge.Scalar: [(F, 0.0)],
    aten.gt.Scalar: [(F, -1)],
    aten.le.Scalar: [(F, 0)],
    aten.lt.Scalar: [(F, 0.5)],
    aten.eq.Scalar: [(INTS, 3)],
    aten.ne.Scalar: [(INTS, -100)],
    aten.pow.Tensor_Scalar: [(F, 2), (F, -1), (INTS, 3)],
    aten.reshape.default: [(F, [2, 6]), (F.t(), [-1])],
    aten.expand.default: [(F[:1], [3, 4]), (F[0], [2, -1])],
    aten.permute.default: [(BATCH, [2, 0, 1])],
    aten.transpose.int: [(BATCH, -1, 0)],
    aten.t.default: [(F,), (F[0],)],
    aten.unsqueeze.default: [(F, -1)],
    aten.squeeze.dim: [(F[:1], 0), (F, 0)],
    aten.clone.default: [(F.t(),)],
    aten.sigmoid.default: [(F,), (INTS,)],
    aten.tanh.default: [(F,)],
    aten.exp.default: [(F,)],
    aten.rsqrt.default: [(F.abs(),)],
    aten.cat.default: [([F, G],), ([F, G], -1)],
    aten.where.self: [(F > 0, F, G)],
    aten.sum.default: [(F,), (INTS,)],
    aten.sum.dim_IntList: [(F, [0]), (F, [0, -1], True), (F, [])],
    aten.mean.dim: [(F, [1], True), (F, [])],
    aten.select.int: [(F, -1, 2)],
    aten.slice.Tensor: [
        (F, 1, 1, 3),
        (F, 0, -2),
        (F, 1, 0, 2**63 - 1),
        (F, -1, 1, 3),
        (BATCH, 2, 0, 4, 2),
        (F, 1, None, -1),
        (F,),
    ],
}


def written(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> tuple[str, Any]:
    """The text for a call, with tensors as variables, and what it evaluates to."""
    graph, values = fx.Graph(), {}

    def named(value: Any) -> Any:
        if isinstance(value, Tensor):
            values[f"v{len(values)}"] = value
            return graph.placeholder(f"v{len(values) - 1}")
        return [named(item) for item in value] if isinstance(value, list) else value

    node = graph.call_function(target, tuple(named(arg) for arg in args), kwargs or {})
    text = call_text(node, lambda value: literal(value, lambda source: source.name))
    scope = {"torch": torch, "aten": aten, "moec": torch.ops.moec, "DEVICE": torch.device("cpu"), **values}
    return text, eval(text, scope)


@pytest.mark.parametrize("target", _FORMS, ids=str)
def test_a_short_form_is_the_op(target: Any) -> None:
    for args in SAMPLES[target]:
        text, found = written(target, args)
        wanted = target(*args)
        assert not text.startswith("aten.") or target is aten.slice.Tensor, text
        if isinstance(wanted, Tensor):
            assert (found.dtype, found.shape, found.stride()) == (wanted.dtype, wanted.shape, wanted.stride()), text
            assert torch.equal(found, wanted), text
        else:
            assert found == wanted


def test_a_form_is_not_used_for_arguments_it_has_no_place_for() -> None:
    text, found = written(aten.add.Tensor, (F, G), {"alpha": 2})
    assert text == "aten.add.Tensor(v0, v1, alpha=2)"
    assert torch.equal(found, F + 2 * G)
    text, found = written(aten.sum.dim_IntList, (F, [0]), {"dtype": torch.float64})
    assert text == "aten.sum.dim_IntList(v0, [0], dtype=torch.float64)"
    assert found.dtype == torch.float64
    assert written(aten.clone.default, (F.t(),), {"memory_format": torch.contiguous_format})[1].is_contiguous()


def test_any_other_op_is_called_by_its_overload() -> None:
    assert written(aten.softmax.int, (F, -1))[0] == "aten.softmax.int(v0, -1)"
    text, found = written(aten.full.default, ([2], 0.5), {"dtype": torch.float64, "device": torch.device("cpu")})
    assert text == "aten.full.default([2], 0.5, dtype=torch.float64, device=DEVICE)"
    assert torch.equal(found, torch.full((2,), 0.5, dtype=torch.float64))


def test_dialect_ops_name_their_options_and_leave_out_defaults() -> None:
    from moec.compiler import dialect

    norm = torch.ops.moec.rms_norm.default
    text, found = written(norm, (F, F[0], 1e-6, True, False))
    assert text == "moec.rms_norm(v0, v1, eps=1e-06, zero_centered=True)"
    assert torch.equal(found, dialect.rms_norm(F, F[0], 1e-6, True))


def test_an_absent_tensor_makes_the_rest_keywords() -> None:
    x = torch.randn(1, 5, 4)
    text, found = written(torch.ops.moec.short_conv.default, (x, SQUARE, None, "silu"))
    assert text == 'moec.short_conv(v0, v1, document_ids=None, activation="silu")'
    assert torch.equal(found, torch.ops.moec.short_conv(x, SQUARE, None, "silu"))


@pytest.mark.parametrize("target", SIZE_OPS, ids=lambda target: target.__name__)
def test_arithmetic_on_sizes_is_written_as_python(target: Any) -> None:
    pairs: list[tuple[Any, ...]] = [(7, 2), (2, 7), (3, 3)]
    if "{1}" not in SIZE_OPS[target]:
        pairs = [(True,), (False,)] if target is torch.sym_not else [(7.5,), (-2.5,), (3,)]
    if target is operator.getitem:
        pairs = [([F, G], 0), ([F, G], 1)]
    for args in pairs:
        found, wanted = written(target, args)[1], target(*args)
        assert found is wanted if isinstance(wanted, Tensor) else (found, type(found)) == (wanted, type(wanted))


def _name(target: Any) -> str:
    return str(getattr(target, "__name__", target))


@pytest.mark.parametrize("target", [target for target in SIZE_OPS if target is not operator.getitem], ids=_name)
def test_arithmetic_on_sizes_nests(target: Any) -> None:
    graph = fx.Graph()
    total = graph.call_function(operator.sub, (graph.placeholder("a"), graph.placeholder("b")))
    operands = (total, total) if "{1}" in SIZE_OPS[target] else (total,)
    outer = graph.call_function(operator.mul, (graph.call_function(target, operands), 3))

    def render(value: Any) -> str:
        if isinstance(value, fx.Node) and value.op == "call_function":
            return call_text(value, render)
        return literal(value, lambda source: source.name)

    assert eval(render(outer), {"a": 9, "b": 2.5}) == target(*[6.5] * len(operands)) * 3


def test_nested_operators_get_parentheses() -> None:
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    total = graph.call_function(aten.add.Tensor, (a, b))
    product = graph.call_function(aten.mul.Tensor, (total, total))
    negative = graph.call_function(aten.neg.default, (product,))
    power = graph.call_function(aten.pow.Tensor_Scalar, (negative, 2))
    view = graph.call_function(aten.t.default, (power,))

    def render(value: Any) -> str:
        if isinstance(value, fx.Node) and value.op == "call_function":
            return call_text(value, render)
        return literal(value, lambda source: source.name)

    assert render(view) == "((-((a + b) * (a + b))) ** 2).t()"
    assert torch.equal(eval(render(view), {"a": F, "b": G}), (-((F + G) ** 2)).pow(2).t())


@pytest.mark.parametrize(
    ("text", "binary"),
    [("a + b", True), ("f(a, b)", False), ("x[:, 1:]", False), ("-a", True), ("(a + b)", False), ("a[b + c]", False)],
)
def test_what_needs_parentheses(text: str, binary: bool) -> None:
    assert is_binary(text) is binary
    assert wrap(text) == (f"({text})" if binary else text)


def test_a_python_function_is_refused_with_its_place() -> None:
    node = fx.Graph().call_function(torch.nn.functional.mish, (1,))
    node.meta["custom"] = {"path": "layers.0.act"}
    node.meta["stack_trace"] = '  File "model.py", line 7, in forward\n    return mish(x)\n'
    with pytest.raises(UnsupportedOpError) as caught:
        call_text(node, str)
    assert caught.value.where == "layers.0.act, model.py:7"
    assert "mish" in caught.value.what
    assert "torch.library.custom_op" in caught.value.hint
