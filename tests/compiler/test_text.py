"""Names of any characters as literals, comments and docstrings: what Python reads back is what was written."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.compiler.text import in_docstring, printable, quoted, without_strings

TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('"\\\n\r\t\0\x85\u2028\u202e\U0001f600'))


@given(TEXTS)
def test_a_literal_is_read_back_and_stays_on_its_line(text: str) -> None:
    literal = quoted(text)
    assert ast.literal_eval(literal) == text
    assert len(literal.splitlines()) == 1
    assert literal.isprintable()


@given(TEXTS)
def test_a_docstring_is_read_back(text: str) -> None:
    source = f'def f():\n    """{in_docstring(text)}."""\n'
    assert ast.get_docstring(ast.parse(source).body[0], clean=False) == f"{text}."  # type: ignore[arg-type]


@given(TEXTS)
def test_a_comment_stays_on_its_line(text: str) -> None:
    assert [type(node) for node in ast.parse(f"# {printable(text)}\nx = 1").body] == [ast.Assign]


def test_what_can_be_read_is_left_as_it_is() -> None:
    assert quoted("layers.0.größe-名 é") == '"layers.0.größe-名 é"'
    assert printable("a\nb\u202ec") == "a\\nb\\u202ec"


@pytest.mark.parametrize("name", ["a, b", "a(b", "x = 1", '"', '\\"', "]"])
def test_strings_are_blanked_and_code_is_not(name: str) -> None:
    text = f"w[{quoted(name)}] = f(a, [b])"
    blanked = without_strings(text)
    assert len(blanked) == len(text)
    assert blanked.endswith("] = f(a, [b])")
    assert set(blanked[3 : blanked.rindex('"')]) == {"_"}
