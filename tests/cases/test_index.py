"""Every public bug report that moec has to answer (C01 to C37) has a test with its id in its name, or waits by name.

And every case has a test whose name ends in `_is_seen` or `_are_seen`: an error of the kind that the case is about,
planted where it would arise, which the very check of the case's other tests rejects.
"""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
CASES = set(range(1, 38))
WAITING: dict[int, str] = {}
"""Number of a case -> what it waits for."""


def cases_of(pattern: str) -> set[int]:
    """Numbers of the cases that a test function is named after whose name ends as the pattern says."""
    texts = (path.read_text() for path in TESTS.rglob("test_*.py"))
    names = re.compile(rf"^def test_c(\d\d)_\w*{pattern}\(", re.MULTILINE)
    return {int(number) for text in texts for number in names.findall(text)}


def test_every_case_has_a_test_or_waits() -> None:
    assert cases_of("") | set(WAITING) == CASES


def test_nothing_waits_that_has_a_test() -> None:
    assert not cases_of("") & set(WAITING)


def test_every_case_has_been_seen_to_fail() -> None:
    assert CASES - set(WAITING) - cases_of("_(?:is|are)_seen") == set()
