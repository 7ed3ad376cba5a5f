"""Run a recorded initialisation (`compiler/deferred.py`) for some of its tensors, with little memory.

1. From the end to the beginning: an operation counts when what it writes is wanted, or read by one that counts. What is
   overwritten as a whole later need not be computed.
2. From the beginning to the end: those that count run, on storages that are allocated when they are first written.
   Random ones that do not count draw into memory that is dropped, where another one that counts stands behind them in
   the same stream of numbers.
3. A tensor is handed over after the last write to its storage, and a storage is freed after its last use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from moec.compiler._torch_compat import pytree
from moec.compiler.default_dtype import default_dtype
from moec.compiler.deferred import Draw, Operation, Recording, View, digest_of
from moec.compiler.errors import UnsupportedModelError

Take = Callable[[str, Tensor], None]


@torch.no_grad()
def replay(recording: Recording, wanted: Mapping[str, View], take: Take, *, finish: bool) -> None:
    """Call `take(name, value)` for the wanted tensors, each as soon as it is final.

    finish: draw to the end of the record, and leave the generators where the initialisation itself would have left
    them; otherwise they stay as they are.
    """
    names: dict[int, list[tuple[str, View]]] = {}
    for name, view in wanted.items():
        names.setdefault(view.storage, []).append((name, view))
    operations = recording.operations
    counting = _counting(operations, names.keys())
    drawing = _drawing(recording, counting, finish)
    chosen = [(op, i in counting) for i, op in enumerate(operations) if i in counting or i in drawing]
    last_write, last_use = _last(chosen)
    memory = _Memory(recording)
    streams = _Streams(recording, [op.draw for op, _ in chosen if op.draw], finish=finish)

    def hand_over(storage: int, index: int) -> None:
        for name, view in names.get(storage, ()):
            take(name, memory.tensor(view))
        if last_use.get(storage, index) == index:
            memory.free(storage)

    for storage in names.keys() - last_write.keys():
        hand_over(storage, -1)  # nothing writes to it: torch.empty and no more
    with streams.restored():
        for index, (operation, counts) in enumerate(chosen):
            with streams.at(operation.draw):
                if not counts:
                    memory.draw_only(operation)
                    continue
                memory.run(operation)
            for storage in operation.writes | operation.reads:
                if last_write.get(storage) == index:
                    hand_over(storage, index)
                elif last_use[storage] == index:
                    memory.free(storage)


class _Memory:
    """The storages that have values at the moment."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._storages: dict[int, torch.UntypedStorage] = {}

    def tensor(self, view: View) -> Tensor:
        nbytes, device = self._recording.storages[view.storage]
        if view.storage not in self._storages:
            self._storages[view.storage] = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
        empty = torch.empty(0, dtype=view.dtype, device=device)
        return empty.set_(self._storages[view.storage], view.offset, view.size, view.stride)  # type: ignore[call-overload, no-any-return]

    def free(self, storage: int) -> None:
        self._storages.pop(storage, None)

    def run(self, operation: Operation) -> None:
        args, kwargs = pytree.tree_map(self._real, (operation.args, operation.kwargs))
        with default_dtype(operation.default):
            result = operation.function(*args, **kwargs)
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        for view, tensor in zip(operation.results, made if operation.results else (), strict=True):
            found = tensor.dtype, tuple(tensor.size()), tensor.stride(), tensor.storage_offset()
            expected = view.dtype, view.size, view.stride, view.offset
            if found != expected:
                raise UnsupportedModelError(
                    f"{operation.function} gives {_described(found)}, and gave {_described(expected)} without values",
                    why="the model was built without its weights, which are made now",
                    hint="build the model outside of deferred_init()",
                )
            self._storages.setdefault(view.storage, tensor.untyped_storage())

    def draw_only(self, operation: Operation) -> None:
        def scratch(leaf: Any) -> Any:
            if not isinstance(leaf, View):
                return leaf
            device = self._recording.storages[leaf.storage][1]
            return torch.empty_strided(leaf.size, leaf.stride, dtype=leaf.dtype, device=device)

        args, kwargs = pytree.tree_map(scratch, (operation.args, operation.kwargs))
        with default_dtype(operation.default):
            operation.function(*args, **kwargs)

    def _real(self, leaf: Any) -> Any:
        return self.tensor(leaf) if isinstance(leaf, View) else leaf


class _Streams:
    """The true states of the generators, by the tokens that stand for them in the record."""

    def __init__(self, recording: Recording, draws: Sequence[Draw], *, finish: bool) -> None:
        self._known, self._finish = recording.states, finish
        self._ends = {id(generator): token for generator, token in recording.ends}
        self._generators = list({id(draw.generator): draw.generator for draw in draws}.values())
        self._left: dict[bytes, int] = {}
        for token in [*(draw.before for draw in draws), *(self._ends.values() if finish else ())]:
            self._left[token] = self._left.get(token, 0) + 1
        self._true = {token: state for token, state in recording.states.items() if token in self._left}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Afterwards the generators stand where they stood, or where the initialisation leaves them."""
        before = [(generator, generator.get_state()) for generator in self._generators]
        try:
            yield
        finally:
            for generator, state in before:
                token = self._ends.get(id(generator))
                # A generator that was moved since the model was built is the caller's.
                moves = self._finish and token in self._true and digest_of(state) == token
                generator.set_state(self._true[token] if moves else state)  # type: ignore[index]

    @contextmanager
    def at(self, draw: Draw | None) -> Iterator[None]:
        """Within the context a generator stands at the place of one operation."""
        if draw is None:
            yield
            return
        draw.generator.set_state(self._true[draw.before])
        yield
        self._left[draw.before] -= 1
        if not self._left[draw.before]:
            del self._true[draw.before]
        if self._left.get(draw.after):
            self._true[draw.after] = draw.generator.get_state()
        elif not self._finish:
            self._known[draw.after] = draw.generator.get_state()  # the next look need not draw all this again


def _counting(operations: Sequence[Operation], wanted: Iterable[int]) -> set[int]:
    """The numbers of the operations whose results matter."""
    needed, found = set(wanted), set[int]()
    for index in range(len(operations) - 1, -1, -1):
        operation = operations[index]
        # A random operation on other values cannot draw without them.
        if operation.writes & needed or (operation.draw is not None and operation.reads - operation.writes):
            found.add(index)
            needed -= operation.fresh
            needed |= operation.reads
    return found


def _drawing(recording: Recording, counting: set[int], finish: bool) -> set[int]:
    """The numbers of the random operations that lead to the places in the streams that are needed."""
    makers = {op.draw.after: (i, op.draw) for i, op in enumerate(recording.operations) if op.draw}
    found = set[int]()
    tokens = [draw.before for i in counting if (draw := recording.operations[i].draw)]
    tokens += [token for _, token in recording.ends] if finish else []
    while tokens:
        token = tokens.pop()
        if token not in recording.states:
            index, draw = makers[token]
            if index not in found:
                found.add(index)
                tokens.append(draw.before)
    return found


def _last(chosen: Sequence[tuple[Operation, bool]]) -> tuple[dict[int, int], dict[int, int]]:
    """For each storage, the numbers of the last operation that writes it and of the last that uses it."""
    writes: dict[int, int] = {}
    uses: dict[int, int] = {}
    for index, (operation, counts) in enumerate(chosen):
        if counts:
            writes |= dict.fromkeys(operation.writes, index)
            uses |= dict.fromkeys(operation.reads | operation.writes, index)
    return writes, uses


def _described(layout: tuple[Any, ...]) -> str:
    dtype, size, stride, _ = layout
    return f"{dtype} {list(size)} with strides {list(stride)}"
