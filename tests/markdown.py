"""Markdown files: their fenced blocks, tables and links, and the directives that say what a block or table must equal.

A fenced block below `<!-- shows: SOURCE | SELECTOR | ... -->` is an excerpt of something real. Each selector picks
lines of the source; left out lines show as "...". Without selectors the block is the whole source.

    lines FIRST .. LAST    from the first line that contains FIRST to the next one that contains LAST
    grep REGEX             every line that matches
    cut N                  picks nothing; lines end after N characters

A table below `<!-- table: NAME -->` is generated, but for cells that its generator leaves to the author.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_SHOWS = re.compile(r"<!-- shows: (.+) -->")
_TABLE = re.compile(r"<!-- table: (.+) -->")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_GAP = "..."
BAR = "\\|"


@dataclass(frozen=True)
class Block:
    """A fenced block. first, last: numbers of its lines without the fences, last excluded. shows: its directive."""

    language: str
    lines: tuple[str, ...]
    first: int
    last: int
    shows: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """The table below a directive, rows of cells, header included and rule left out."""

    name: str
    rows: tuple[tuple[str, ...], ...]
    first: int
    last: int


def blocks(text: str) -> list[Block]:
    """All fenced blocks in order."""
    lines, found, opened = text.splitlines(), [], None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if opened is None:
            opened = number
            continue
        directive = _SHOWS.fullmatch(lines[opened - 1]) if opened else None
        shows = tuple(part.strip() for part in directive[1].split(" | ")) if directive else ()
        inner = tuple(lines[opened + 1 : number])
        found.append(Block(lines[opened].removeprefix("```"), inner, opened + 1, number, shows))
        opened = None
    return found


def tables(text: str) -> list[Table]:
    """All tables that have a directive."""
    lines, found = text.splitlines(), []
    for number, line in enumerate(lines):
        directive = _TABLE.fullmatch(line)
        if directive is None:
            continue
        last = number + 1
        while last < len(lines) and lines[last].startswith("|"):
            last += 1
        rows = [_cells(row) for row in lines[number + 1 : last]]
        found.append(Table(directive[1], tuple(rows[:1] + rows[2:]), number + 1, last))
    return found


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as Markdown, the first row its header."""
    head, *body = [f"| {' | '.join(cell.replace('|', BAR) for cell in row)} |" for row in rows]
    return [head, f"|{' --- |' * len(rows[0])}", *body]


def selected(source: Sequence[str], selectors: Sequence[str]) -> list[str]:
    """The lines that the selectors pick; one that picks nothing raises LookupError."""
    picked: set[int] = set()
    width = None
    for selector in selectors:
        kind, _, argument = selector.partition(" ")
        if kind == "cut":
            width = int(argument)
            continue
        found = _range(source, *argument.split(" .. ")) if kind == "lines" else _matching(source, argument)
        if not found:
            raise LookupError(f"{selector!r} picks no line")
        picked |= set(found)
    order = sorted(picked) if picked else list(range(len(source)))
    result: list[str] = []
    for before, index in zip([None, *order], order, strict=False):
        if before is not None and index != before + 1:
            result.append(_indent(source[index]) + _GAP)
        result.append(source[index])
    return [line if width is None or len(line) <= width else line[:width] + _GAP for line in result]


def spliced(text: str, first: int, last: int, lines: Sequence[str]) -> str:
    """The text with the lines from first to last replaced."""
    old = text.splitlines()
    return "\n".join([*old[:first], *lines, *old[last:]]) + "\n"


def links(text: str) -> list[str]:
    """Targets of all links outside of fenced blocks."""
    return _LINK.findall(prose(text))


def anchors(text: str) -> set[str]:
    """The anchors that a page's headings make."""
    titles = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def prose(text: str) -> str:
    """The text without its fenced blocks."""
    lines = text.splitlines()
    for block in reversed(blocks(text)):
        del lines[block.first - 1 : block.last + 1]
    return "\n".join(lines)


def _cells(row: str) -> tuple[str, ...]:
    inner = row.strip().removeprefix("|").removesuffix("|")
    return tuple(cell.strip().replace(BAR, "|") for cell in re.split(r"(?<!\\)\|", inner))


def _range(source: Sequence[str], first: str, last: str) -> range:
    start = next((i for i, line in enumerate(source) if first in line), len(source))
    end = next((i for i, line in enumerate(source) if i >= start and last in line), -1)
    return range(start, end + 1)


def _matching(source: Sequence[str], pattern: str) -> list[int]:
    return [i for i, line in enumerate(source) if re.search(pattern, line)]


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]
