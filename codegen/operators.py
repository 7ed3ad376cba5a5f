"""How each op is written in the emitted program: a table from ATen overload to Python text.

Only ops whose short form calls the very same kernel are in the table; everything else is written as
`aten.NAME.OVERLOAD(...)`, and dialect ops as `moec.NAME(...)` with their options by keyword.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from moec.compiler._torch_compat import OpOverload
from moec.compiler.errors import UnsupportedOpError
from moec.compiler.graph import module_path, source_line
from moec.compiler.size_ops import SIZE_OPS
from moec.compiler.text import without_strings

aten = torch.ops.aten

Render = Callable[[Any], str]
Form = Callable[[Sequence[str]], str]


def call_text(node: fx.Node, render: Render) -> str:
    """The expression that computes `node`; `render` gives the text of an argument.

    Raises UnsupportedOpError for a target that is neither an op overload nor arithmetic on sizes.
    """
    if node.target in SIZE_OPS:
        return SIZE_OPS[node.target].format(*(wrap(render(argument)) for argument in node.args))  # type: ignore[index]
    if not isinstance(node.target, OpOverload):
        raise UnsupportedOpError(
            f"moec cannot write the call of {node.target!r}",
            where=", ".join(filter(None, (module_path(node), source_line(node)))),
            why="the step program may only call registered ops",
            hint="register it with torch.library.custom_op, or add a form to codegen/operators.py",
        )
    form = _FORMS.get(node.target)
    if form is not None and not node.kwargs and len(node.args) <= form[1]:
        return form[0]([render(argument) for argument in node.args])
    return _plain_call(node, node.target, render)


def is_binary(text: str) -> bool:
    """Whether an expression needs parentheses inside another one."""
    depth = 0
    code = without_strings(text)
    for index, char in enumerate(code):
        depth += char in "([{"
        depth -= char in ")]}"
        if depth == 0 and char == " " and index and code[index - 1] not in ",:":
            return True
    return text.startswith("-")


def wrap(text: str) -> str:
    return f"({text})" if is_binary(text) else text


def _plain_call(node: fx.Node, op: OpOverload, render: Render) -> str:
    namespace, name = op._schema.name.split("::")
    keywords = [f"{name}={render(value)}" for name, value in node.kwargs.items() if name not in _IMPLIED_KEYWORDS]
    if namespace == "moec":
        return f"moec.{name}({', '.join([*_named_after_gap(node, op._schema.arguments, render), *keywords])})"
    if namespace == "_c10d_functional":
        return f"c10d.{name}({', '.join([*(render(value) for value in node.args), *keywords])})"
    prefix = "aten" if namespace == "aten" else f"torch.ops.{namespace}"
    parts = [*(render(value) for value in node.args), *keywords]
    return f"{prefix}.{name}.{op._overloadname}({', '.join(parts)})"


def _named_after_gap(node: fx.Node, arguments: Sequence[Any], render: Render) -> list[str]:
    """Tensors by position while they come first, then everything by keyword, defaults left out."""
    parts, positional = [], True
    for argument, value in zip(arguments, node.args, strict=False):
        if argument.has_default_value() and argument.default_value == value:
            positional = False
            continue
        positional = positional and _is_tensor_argument(argument) and value is not None
        parts.append(render(value) if positional else f"{argument.name}={render(value)}")
    return parts


def _is_tensor_argument(argument: Any) -> bool:
    return "Tensor" in str(argument.type)


def _infix(sign: str) -> Form:
    return lambda a: f"{wrap(a[0])} {sign} {wrap(a[1])}"


def _method(name: str) -> Form:
    return lambda a: f"{wrap(a[0])}.{name}({', '.join(a[1:])})"


def _function(name: str) -> Form:
    return lambda a: f"torch.{name}({', '.join(a)})"


def _slice_text(arguments: Sequence[str]) -> str:
    """x[:, 0:64] where the dimension counts from the front; a form that indexes the same dimension otherwise."""
    value, dim, start, end, *step = [*arguments, *("0", "None", "None", "1")[len(arguments) - 1 :]]
    if not dim.isdigit():
        return f"aten.slice.Tensor({', '.join(arguments)})"
    bounds = f"{'' if start in ('0', 'None') else start}:{'' if end in ('None', str(2**63 - 1)) else end}"
    bounds += f":{step[0]}" if step and step[0] != "1" else ""
    return f"{wrap(value)}[{':, ' * int(dim)}{bounds}]"


# Keywords that only repeat what the op does anyway.
_IMPLIED_KEYWORDS = {"layout", "pin_memory"}

# overload -> (form, most positional arguments the form is right for)
_FORMS: dict[OpOverload, tuple[Form, int]] = {
    aten.sym_size.int: (lambda a: f"{wrap(a[0])}.shape[{a[1]}]", 2),
    aten.add.Tensor: (_infix("+"), 2),
    aten.sub.Tensor: (_infix("-"), 2),
    aten.mul.Tensor: (_infix("*"), 2),
    aten.div.Tensor: (_infix("/"), 2),
    aten.add.Scalar: (_infix("+"), 2),
    aten.mul.Scalar: (_infix("*"), 2),
    aten.neg.default: (lambda a: f"-{wrap(a[0])}", 1),
    aten.mm.default: (_infix("@"), 2),
    aten.bmm.default: (_function("bmm"), 2),
    aten.addmm.default: (_function("addmm"), 3),
    aten.eq.Tensor: (_infix("=="), 2),
    aten.ne.Tensor: (_infix("!="), 2),
    aten.ge.Scalar: (_infix(">="), 2),
    aten.gt.Scalar: (_infix(">"), 2),
    aten.le.Scalar: (_infix("<="), 2),
    aten.lt.Scalar: (_infix("<"), 2),
    aten.eq.Scalar: (_infix("=="), 2),
    aten.ne.Scalar: (_infix("!="), 2),
    aten.pow.Tensor_Scalar: (_infix("**"), 2),
    aten.reshape.default: (_method("reshape"), 2),
    aten.expand.default: (_method("expand"), 2),
    aten.permute.default: (_method("permute"), 2),
    aten.transpose.int: (_method("transpose"), 3),
    aten.t.default: (_method("t"), 1),
    aten.unsqueeze.default: (_method("unsqueeze"), 2),
    aten.squeeze.dim: (_method("squeeze"), 2),
    aten.clone.default: (_method("clone"), 1),
    aten.sigmoid.default: (_function("sigmoid"), 1),
    aten.tanh.default: (_function("tanh"), 1),
    aten.exp.default: (_function("exp"), 1),
    aten.rsqrt.default: (_function("rsqrt"), 1),
    aten.cat.default: (_function("cat"), 2),
    aten.where.self: (_function("where"), 3),
    aten.sum.default: (_method("sum"), 1),
    aten.sum.dim_IntList: (lambda a: f"{wrap(a[0])}.sum({', '.join(a[1:])})", 3),
    aten.mean.dim: (lambda a: f"{wrap(a[0])}.mean({', '.join(a[1:])})", 3),
    aten.select.int: (_method("select"), 3),
    aten.slice.Tensor: (lambda a: _slice_text(a), 5),
}
