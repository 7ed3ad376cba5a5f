"""The spec of the emitted stage: what must hold of a program's text before anything runs it.

1. It is Python.
2. Every op and function that it calls in `aten`, `moec`, `torch` or `runtime` exists.
3. Every name that a statement reads has a value there: it was assigned, and not deleted since.
4. It has the functions that a step needs.

A failure shows the line, the function, the module that the line comes from, and the lines around it.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

from moec.compiler.errors import PassError
from moec.compiler.spec import AROUND

FUNCTIONS = ("forward", "backward", "update", "step")


def check_emitted(text: str, runtime: ModuleType) -> None:
    """Raise PassError when the text of a step program breaks a rule; `runtime` is the module that it imports."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise _broken(text, error.lineno or 1, "it is Python", error.msg) from error
    known = {"aten": torch.ops.aten, "moec": torch.ops.moec, "torch": torch, "runtime": runtime}
    names = {*dir(builtins), "__file__"}
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            names.add(statement.name)
        else:
            _follow(text, statement, names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (missing := _missing(node, known)):
            raise _broken(text, node.lineno, "every op exists", f"there is no {missing}")
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    absent = [name for name in FUNCTIONS if name not in functions]
    if absent:
        raise _broken(text, 1, "it has the functions of a step", f"there is no {', '.join(absent)}")
    for function in functions.values():
        local = names | {argument.arg for argument in function.args.args}
        for statement in function.body:
            _follow(text, statement, local)


def _follow(text: str, statement: ast.stmt, names: set[str]) -> None:
    """Check what a statement reads against `names`, and add and remove what it assigns and deletes."""
    if isinstance(statement, ast.For):
        _read(text, statement.iter, names)
        names |= _assigned(statement.target)
        for inner in statement.body:
            _follow(text, inner, names)
        return
    _read(text, statement, names)
    if isinstance(statement, ast.Import | ast.ImportFrom):
        names |= {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
    names |= _assigned(statement)
    if isinstance(statement, ast.Delete):
        names -= {target.id for target in statement.targets if isinstance(target, ast.Name)}


def _read(text: str, tree: ast.AST, names: set[str]) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store) and node.id not in names:
            wrong = f"{node.id} has no value there, or has been deleted"
            raise _broken(text, node.lineno, "every name that is read has a value", wrong)


def _assigned(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _missing(node: ast.Attribute, known: Mapping[str, Any]) -> str:
    """The first part of `aten.mul.Tensor` that does not exist, '' where all does or the root is a value."""
    path = list(_path(node))
    value = known.get(path[0])
    for index, name in enumerate(path[1:], 2):
        if value is None:
            return ""
        value = getattr(value, name, None)
        if value is None:
            return ".".join(path[:index])
    return ""


def _path(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        yield from _path(node.value)
        yield node.attr
    else:
        yield node.id if isinstance(node, ast.Name) else ""


def _broken(text: str, line: int, rule: str, wrong: str) -> PassError:
    lines = text.splitlines()
    above = lines[:line]
    function = next((row.split("(")[0].removeprefix("def ") for row in reversed(above) if row.startswith("def ")), "")
    heading = next((row for row in reversed(above) if row.startswith(("    # ", "def "))), "")
    module = heading.removeprefix("    # ") if heading.startswith(" ") else ""
    first = max(0, line - 1 - AROUND // 2)
    around = [f"{number:>5} {row}" for number, row in enumerate(lines, 1)][first : line + AROUND // 2]
    return PassError(
        f"after emission the emitted spec does not hold: {rule}",
        where=f"step.py:{line} in {function or 'the preamble'}, module {module or '?'}",
        why=f"{wrong}; around it:\n    " + "\n    ".join(around),
        hint="report it with the model and the plan: a compilation must not get here",
    )
