"""Compile the KDA kernels for sm_90, with the launch that `kda_launch` uses for K = V = 128; prints one JSON line."""

from __future__ import annotations

import json
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moec.codegen.triton.kda_backward_conv import kda_backward_conv
from moec.codegen.triton.kda_backward_keys import kda_backward_keys
from moec.codegen.triton.kda_backward_rows import kda_backward_rows
from moec.codegen.triton.kda_backward_values import kda_backward_values
from moec.codegen.triton.kda_forward_chunk import kda_forward_chunk
from moec.codegen.triton.kda_launch import LAUNCH
from moec.codegen.triton.kda_output import kda_backward_output, kda_forward_output
from moec.codegen.triton.kda_prepare import kda_prepare
from moec.codegen.triton.kda_scan import kda_backward_scan, kda_forward_scan

FLOAT = {
    "A_log", "dt_bias", "conv_q", "conv_k", "conv_v", "totals", "partials", "norm_weight", "sums", "by_row", "ranges",
    "scalar_grads",
}  # fmt: skip
NUMBERS = {"lower_bound": "fp32", "l2_eps": "fp32", "scale": "fp32", "norm_eps": "fp32"}
INTEGERS = {
    "length", "chunks", "width", "value_width", "rows_of", "columns", "first_column", "blocks", "repeats", "levels",
    "solve_levels",
}  # fmt: skip
SIZES = {"K": 128, "V": 128, "C": 64, "VALUE_HEADS": 2, "HEADS": 2}


def build(kernel: Any, warps: int, registers: int | None = None, **constants: Any) -> dict[str, int]:
    """Compile one kernel; its shared memory in bytes and how many wgmma instructions it has."""
    constants = {name: value for name, value in (SIZES | constants).items() if name in kernel.arg_names}
    signature: dict[str, str] = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in INTEGERS or name in NUMBERS:
            signature[name] = NUMBERS.get(name, "i32")
        else:
            signature[name] = "*i64" if name == "documents" else "*fp32" if name in FLOAT else "*bf16"
    place = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    aligned = {place[name]: [["tt.divisibility", 16]] for name, kind in signature.items() if kind.startswith("*")}
    source = ASTSource(kernel, signature, {place[name]: value for name, value in constants.items()}, aligned)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "maxnreg": registers}
    )
    return {"shared": compiled.metadata.shared, "wgmma": compiled.asm["ptx"].count("wgmma.mma_async")}


def main() -> None:
    inputs = {
        "DIAGONAL": 32, "WIDTH": 4, "PACKED": True, "SCALAR": False, "BOUNDED": True, "DTYPE": tl.bfloat16, "SHARES": 6,
        "PARTS": 4,
    }  # fmt: skip
    scan = {"BV": LAUNCH.scan_columns, "STAGES": LAUNCH.scan_stages, "DTYPE": tl.bfloat16}
    output = {"NORM": True, "SILU": False, "DTYPE": tl.bfloat16}
    chunk = inputs | {"BK": LAUNCH.chunk_channels, "STORE_INVERSE": True, "PRECISION": LAUNCH.inverse_precision}
    keys = inputs | {"BK": LAUNCH.keys_channels}
    built = {
        "forward_chunk": build(kda_forward_chunk, LAUNCH.chunk_warps, LAUNCH.chunk_registers, **chunk),
        "forward_scan": build(kda_forward_scan, LAUNCH.scan_warps, **scan),
        "backward_scan": build(kda_backward_scan, LAUNCH.scan_warps, **scan),
        "backward_output": build(kda_backward_output, LAUNCH.output_warps, **output),
        "backward_values": build(kda_backward_values, LAUNCH.values_warps, BK=LAUNCH.values_channels, **inputs),
        "backward_keys": build(kda_backward_keys, LAUNCH.keys_warps, LAUNCH.keys_registers, **keys),
    }
    build(kda_backward_keys, LAUNCH.keys_warps, **(keys | {"DIAGONAL": 1, "BOUNDED": False}))
    build(kda_prepare, LAUNCH.prepare_warps, BK=LAUNCH.prepare_channels, ROWS=LAUNCH.prepare_rows, **inputs)
    build(kda_backward_rows, LAUNCH.rows_warps, ROWS=LAUNCH.rows_rows, **inputs)
    build(kda_backward_conv, LAUNCH.conv_warps, ROWS=LAUNCH.conv_rows, WIDTH=4, PACKED=True)
    build(kda_forward_output, LAUNCH.output_warps, **output)
    print(json.dumps(built))


if __name__ == "__main__":
    main()
