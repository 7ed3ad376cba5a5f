"""What the KDA launches are given: the arguments of the op, and the warps and tile widths of every kernel."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

CHUNK = 64
# Pairs of a block of rows meet at its middle while half the block decays by no more than this, base e: e^80 is finite.
MIDDLE_LIMIT = 80.0


@dataclass(frozen=True)
class Launch:
    """Warps and tile widths of every kernel, chosen on an H200 for K and V up to 128; they change speed only."""

    prepare_warps: int = 4
    prepare_channels: int = 64
    prepare_rows: int = 32
    chunk_warps: int = 8
    chunk_channels: int = 32
    chunk_registers: int | None = 128
    scan_columns: int = 32
    scan_warps: int = 4
    scan_stages: int = 3
    output_warps: int = 4
    back_output_warps: int = 4
    back_output_columns: int = 128
    values_warps: int = 8
    values_channels: int = 64
    keys_warps: int = 8
    keys_channels: int = 32
    keys_columns: int = 128
    keys_registers: int | None = 128
    rows_warps: int = 4
    rows_rows: int = 32
    conv_rows: int = 32
    conv_repeats: int = 16
    conv_warps: int = 4
    inverse_precision: str = "tf32"


LAUNCH = Launch()


def launch_for(width: int, value_width: int, taps: int) -> Launch:
    """The settings for head dimensions K and V and convolutions of so many taps.

    Those for 256 and for more than four taps keep tiles in registers and shared memory, untimed.
    """
    launch = LAUNCH
    if max(width, value_width) > 128:
        launch = dataclasses.replace(launch, prepare_rows=16, rows_rows=16)
    if max(width, value_width) > 128 or taps > 4:
        launch = dataclasses.replace(launch, conv_rows=8, conv_repeats=64)
    if width > 128:
        launch = dataclasses.replace(launch, scan_stages=2)
    if value_width > 128:
        launch = dataclasses.replace(
            launch, output_warps=8, back_output_columns=64, keys_columns=64, keys_registers=None
        )
    return launch


class Inputs(NamedTuple):
    """Arguments of `moec::kda`, in the order of its schema, and the state that `moec::kda_with_state` starts from."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    beta: Tensor
    A_log: Tensor
    dt_bias: Tensor
    conv_q: Tensor | None
    conv_k: Tensor | None
    conv_v: Tensor | None
    output_gate: Tensor | None
    norm_weight: Tensor | None
    document_ids: Tensor | None
    heads: int
    value_heads: int
    gate_kind: str
    lower_bound: float
    l2_eps: float
    norm_eps: float
    output_activation: str
    scale: float
    chunk: int
    initial_state: Tensor | None = None

    @property
    def key_width(self) -> int:
        return self.q.shape[2] // self.heads

    @property
    def value_width(self) -> int:
        return self.v.shape[2] // self.value_heads

    @property
    def chunks(self) -> int:
        return -(-self.q.shape[1] // CHUNK)

    @property
    def taps(self) -> int:
        return 0 if self.conv_q is None else self.conv_q.shape[1]

    @property
    def scalar(self) -> bool:
        return self.gate.shape[2] == self.value_heads

    @property
    def launch(self) -> Launch:
        return launch_for(self.key_width, self.value_width, self.taps)

    def contiguous(self) -> Inputs:
        return Inputs._make(value.contiguous() if isinstance(value, Tensor) else value for value in self)

    def states(self) -> Tensor:
        """Room for a state of every batch row and value head, [B, HV, K, V], float32."""
        shape = (self.q.shape[0], self.value_heads, self.key_width, self.value_width)
        return torch.empty(shape, device=self.q.device, dtype=torch.float32)


def constants_for(kernel: Any, inputs: Inputs) -> dict[str, Any]:
    """The constants of a kernel that follow from the arguments, by the names of its parameters."""
    known = {
        "HEADS": inputs.heads,
        "VALUE_HEADS": inputs.value_heads,
        "K": inputs.key_width,
        "V": inputs.value_width,
        "C": CHUNK,
        "DIAGONAL": diagonal(inputs),
        "WIDTH": inputs.taps,
        "PACKED": inputs.document_ids is not None,
        "SCALAR": inputs.scalar,
        "BOUNDED": inputs.gate_kind == "bounded",
        "NORM": inputs.norm_weight is not None,
        "SILU": inputs.output_activation == "silu",
        "INITIAL": inputs.initial_state is not None,
        "DTYPE": triton_dtype(inputs.q),
    }
    return {name: value for name, value in known.items() if name in kernel.arg_names}


def diagonal(inputs: Inputs) -> int:
    """Rows of the blocks whose pairs meet at the middle row, 1 for none."""
    if inputs.gate_kind != "bounded":
        return 1
    return next((rows for rows in (32, 16) if rows // 2 * abs(inputs.lower_bound) <= MIDDLE_LIMIT), 1)


def levels_above(inputs: Inputs) -> int:
    """Levels of halves above those blocks."""
    return (CHUNK // diagonal(inputs)).bit_length() - 1


def present(value: Tensor | None, other: Tensor) -> Tensor:
    """`value`, or `other` in its place for a kernel that does not read it."""
    return other if value is None else value


def triton_dtype(value: Tensor) -> tl.dtype:
    return {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[value.dtype]
