"""How many logits exist at a time: rows times classes, from a budget in bytes.

With all V classes in a chunk of R rows the head takes three products of 2NVD operations, with fewer four. But for every
chunk of rows the sum of the weight's gradient is read and written, 8VD bytes. Fewer classes are worth it when the
second costs more than the fourth product, that is below R = 4 x (operations per byte of the device): about 660 rows on
a card with 690 TFLOP/s and 4.2 TB/s, and only where nothing of the traffic is hidden behind arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moec.compiler.dialect._define import math_dtype

FEWEST_ROWS = 512
GRANULE = 128
LEAST_BYTES = 5 << 28  # 1.25 GiB: 4096 rows of 163840 classes in 16 bits


@dataclass(frozen=True)
class ChunkSizes:
    """The most rows and classes of one chunk."""

    rows: int
    columns: int

    def text(self) -> str:
        return f"{self.rows} x {self.columns} logits at a time"


def chunk_sizes(
    classes: int, size: int, *, memory: int = LEAST_BYTES, rows: int | None = None, columns: int | None = None
) -> ChunkSizes:
    """Chunks of logits of `size` bytes each that fit `memory` bytes; `rows` or `columns` settle one or both.

    All classes while that leaves 512 rows, else 512 rows and as many classes as fit, else a square. ValueError for a
    size below 1.
    """
    if any(count is not None and count < 1 for count in (rows, columns)):
        raise ValueError(f"a chunk of {rows} rows and {columns} classes, expected at least 1 of each")
    logits, classes = max(1, memory // size), max(1, classes)
    if columns is None:
        columns = classes if (rows or FEWEST_ROWS) * classes <= logits else _rounded(logits // (rows or FEWEST_ROWS))
        if rows is None and columns < FEWEST_ROWS:
            columns = _rounded(int(logits**0.5))
    columns = min(columns, classes)
    return ChunkSizes(_rounded(logits // columns) if rows is None else rows, columns)


def head_sizes(
    hidden: Tensor, classes: int, rows: int | None, columns: int | None, memory: int | None = None
) -> ChunkSizes:
    """Chunks for hidden [N, D]; without a budget, what costs no memory beyond 1.25 GiB.

    The gradient of the weight [V, D] is rounded to the dtype it is returned in when all logits are gone: a chunk of its
    size adds nothing to the peak. Of logits in that dtype it holds D rows.
    """
    if memory is None:
        memory = max(LEAST_BYTES, classes * int(hidden.shape[-1]) * hidden.element_size())
    return chunk_sizes(classes, logit_size(hidden), memory=memory, rows=rows, columns=columns)


def logit_size(hidden: Tensor) -> int:
    """Bytes of a logit: the kernels of a GPU keep logits in the dtype of hidden, a CPU in the dtype of the sums."""
    return hidden.element_size() if hidden.device.type == "cuda" else math_dtype(hidden.dtype).itemsize


def _rounded(count: int) -> int:
    """Down to what a matmul likes, but at least 1."""
    return count // GRANULE * GRANULE if count >= GRANULE else max(1, count)
