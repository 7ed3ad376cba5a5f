"""Storages without data, counted by references: what a program holds on the device, and the most it ever held.

A value is a storage's number, a `Parked` one, None for what is not counted, or a list of values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


class Storages:
    """Storages with their references, what they take together, and the most that they took."""

    def __init__(self, held: int) -> None:
        self.held = self.peak = held
        self.host = self.host_peak = 0
        self.where = self.now = "the state alone"
        self._sizes: dict[int, int] = {}
        self._references: dict[int, int] = {}

    def make(self, sizes: Any) -> Any:
        """New storages of these sizes, nested as they are, with one reference each."""
        if isinstance(sizes, list):
            return [self.make(size) for size in sizes]
        if sizes is None:
            return None
        storage = len(self._sizes)
        self._sizes[storage], self._references[storage] = sizes, 1
        self.held += sizes
        self.see(0)
        return storage

    def see(self, workspace: int) -> None:
        """Note the peak, with a workspace on top."""
        if self.held + workspace > self.peak:
            self.peak, self.where = self.held + workspace, self.now

    def hold(self, value: Any) -> Any:
        """One reference more to everything in a value; returns it."""
        for leaf in leaves(value):
            if isinstance(leaf, Parked):
                leaf.references += 1
            else:
                self._references[leaf] += 1
        return value

    def drop(self, value: Any) -> None:
        """One reference less."""
        for leaf in leaves(value):
            if isinstance(leaf, Parked):
                self._drop_parked(leaf)
                continue
            self._references[leaf] -= 1
            if self._references[leaf] == 0:
                self.held -= self._sizes[leaf]

    def park(self, source: Any, size: int) -> Parked:
        """Start the copy of a value to host memory."""
        self.host += size
        self.host_peak = max(self.host_peak, self.host)
        return Parked(size, self.hold(source))

    def _drop_parked(self, parked: Parked) -> None:
        parked.references -= 1
        if parked.references == 0:
            self.host -= parked.size
            self.drop([parked.source, parked.back])

    def release(self, parked: Parked) -> None:
        """The copy to host memory is done."""
        self.drop(parked.source)
        parked.source = None

    def prefetch(self, parked: Parked) -> None:
        """Start the copy back, into memory of its own; a value that is still here needs none."""
        if parked.source is None and parked.back is None:
            parked.back = self.make(parked.size)

    def fetch(self, parked: Parked) -> Any:
        """The value back on the device, with one reference more."""
        self.prefetch(parked)
        return self.hold(parked.back if parked.back is not None else parked.source)

    def distinct(self, value: Any) -> int:
        """Bytes of the storages in a value, each once."""
        return sum(self._sizes[leaf] for leaf in {leaf for leaf in leaves(value) if not isinstance(leaf, Parked)})


@dataclass(eq=False)
class Parked:
    """A value on its way to host memory and back. source, back: on the device, while they are there."""

    size: int
    source: Any
    back: Any = None
    references: int = 1


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for item in value:
            yield from leaves(item)
    elif value is not None:
        yield value


def parked_in(value: Any) -> list[Parked]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, Parked)]
