"""Every public bug report that moec has to answer (C01 to C37) has a test with its id in its name, or waits by name."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
WAITING = {
    33: "LoRA through peft",
}


def with_tests() -> set[int]:
    """Numbers of the cases that a test function is named after."""
    texts = (path.read_text() for path in TESTS.rglob("test_*.py"))
    return {int(number) for text in texts for number in re.findall(r"^def test_c(\d\d)_", text, re.MULTILINE)}


def test_every_case_has_a_test_or_waits() -> None:
    assert with_tests() | set(WAITING) == set(range(1, 38))


def test_nothing_waits_that_has_a_test() -> None:
    assert not with_tests() & set(WAITING)
