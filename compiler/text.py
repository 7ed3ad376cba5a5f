"""Names of any characters in a program's text: string literals, comments and docstrings that say what the model says.

What can be printed stays as it is. Everything else, line ends included, is written as Python escapes it.
"""

from __future__ import annotations

import re

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def quoted(text: str) -> str:
    """A string literal, in double quotes."""
    return '"' + printable(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def printable(text: str) -> str:
    """The text with escapes in the place of what cannot be printed, so that it stays on its line."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def in_docstring(text: str) -> str:
    """What to write between triple quotes; line ends stay."""
    return "\n".join(printable(line.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')) for line in text.split("\n"))


def without_strings(text: str) -> str:
    """Code of the same length in which the string literals are blanked, to look for brackets and signs in."""
    return _STRING.sub(lambda match: '"' + "_" * (len(match[0]) - 2) + '"', text) if '"' in text else text
