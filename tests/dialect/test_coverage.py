"""Every op of the dialect has a test of its contract: `check_op`, or torch's `opcheck` and a check of its gradient."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from moec.compiler.dialect import DEFINITIONS

CHECKS, GRADIENTS = {"check_op", "opcheck"}, {"check_op", "gradcheck", "check_gradients"}


@pytest.mark.parametrize("name", sorted(DEFINITIONS))
def test_every_op_is_checked(name: str) -> None:
    assert _tests_with(CHECKS, name), f"no test in tests/dialect calls opcheck on moec::{name}"
    if DEFINITIONS[name].backward is not None:
        assert _tests_with(GRADIENTS, name), f"no test in tests/dialect compares the gradients of moec::{name}"


def test_an_op_without_a_test_would_be_seen() -> None:
    assert not _tests_with(CHECKS, "no_such_op")


def _tests_with(calls: set[str], name: str) -> list[str]:
    """Files with a test that makes one of the calls and names the op."""
    word = re.compile(rf"\b{name}\b")
    return [file for file, text, made in _functions() if made & calls and word.search(text)]


@cache
def _functions() -> list[tuple[str, str, set[str]]]:
    """(file, text, names of what it calls) of every function of the tests of the dialect.

    The text includes its decorators, and functions of the same file that it calls.
    """
    found = []
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        functions = {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        for function in functions.values():
            called = _called(function)
            text = "\n".join(ast.unparse(functions[name]) for name in [function.name, *sorted(called & set(functions))])
            found.append((path.name, text, called))
    return found


def _called(function: ast.FunctionDef) -> set[str]:
    calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    return {call.id if isinstance(call, ast.Name) else getattr(call, "attr", "") for call in calls}
