"""The safetensors format, read and written by byte ranges: no tensor has to be whole in memory.

8 bytes     length of the header, little endian
header      JSON: {"__metadata__": {...}, NAME: {"dtype": "BF16", "shape": [...], "data_offsets": [begin, end]}}
data        all tensors, at their offsets, without gaps
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moec.compiler.errors import CheckpointError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGNMENT = 8
_LARGEST_HEADER = 100_000_000
_AT_ONCE = 1 << 30


@dataclass(frozen=True)
class Entry:
    """One tensor of a file. begin: its first byte in the file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.numel * self.dtype.itemsize

    def read(self, first: int, last: int) -> Tensor:
        """Elements [first, last) in row-major order, a vector with memory of its own."""
        values = torch.empty(last - first, dtype=self.dtype)
        position = self.begin + first * self.dtype.itemsize
        if values.numel():
            with self.file.open("rb", buffering=0) as stream:
                _read_into(stream.fileno(), values.view(torch.uint8).numpy().data, position, self.file)
        return values


def read_entries(file: Path) -> dict[str, Entry]:
    """The tensors of a file by name; raises CheckpointError when it is none of this format."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_ALIGNMENT), "little")
            if not 2 <= length <= _LARGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(stream.read(length))
            size = stream.seek(0, os.SEEK_END)
        start = _ALIGNMENT + length
        entries = {name: _entry(file, start, value) for name, value in header.items() if name != "__metadata__"}
        end = max((entry.begin + entry.nbytes for entry in entries.values()), default=start)
        if end > size:
            raise ValueError(f"it ends at byte {size}, its tensors at byte {end}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is no safetensors file", why=str(error)) from error
    return entries


def preallocate(
    file: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> dict[str, Entry]:
    """Make a file with room for tensors, all zeros, and return where each of them lies."""
    entries, header, length = _laid_out(file, tensors, metadata)
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(_ALIGNMENT, "little") + header)
        stream.truncate(_ALIGNMENT + len(header) + length)
    return entries


def laid_out(
    file: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> dict[str, Entry]:
    """Where `preallocate` puts each tensor."""
    return _laid_out(file, tensors, metadata)[0]


def write(descriptor: int, entry: Entry, first: int, values: Tensor) -> None:
    """Write values of the entry's dtype as its elements from `first` on."""
    data = values.detach().reshape(-1).contiguous().cpu().view(torch.uint8).numpy().data
    position = entry.begin + first * entry.dtype.itemsize
    while data:
        written = os.pwrite(descriptor, data[:_AT_ONCE], position)
        data, position = data[written:], position + written


def _laid_out(
    file: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[dict[str, Entry], bytes, int]:
    fields: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    # Wide types first: then every tensor is aligned to its own, as the format wants it.
    order = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))
    for name in order:
        dtype, shape = tensors[name]
        end = position + math.prod(shape) * dtype.itemsize
        fields[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    header = json.dumps(fields, separators=(",", ":")).encode()
    header = header.ljust(-(-len(header) // _ALIGNMENT) * _ALIGNMENT)
    start = _ALIGNMENT + len(header)
    return {name: _entry(file, start, fields[name]) for name in order}, header, position


def _entry(file: Path, start: int, field: object) -> Entry:
    assert isinstance(field, Mapping)
    if field["dtype"] not in _DTYPES:
        raise ValueError(f"dtype {field['dtype']} is not known")
    entry = Entry(file, _DTYPES[field["dtype"]], tuple(field["shape"]), start + field["data_offsets"][0])
    if field["data_offsets"][1] - field["data_offsets"][0] != entry.nbytes:
        raise ValueError(f"{field} has not the bytes of its shape")
    return entry


def _read_into(descriptor: int, data: memoryview, position: int, file: Path) -> None:
    while data:
        count = os.preadv(descriptor, [data[:_AT_ONCE]], position)
        if not count:
            raise CheckpointError(f"{file} ends at byte {position}", why="it was cut while it was read")
        data, position = data[count:], position + count
