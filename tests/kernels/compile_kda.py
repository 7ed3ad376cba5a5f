"""Compile the KDA kernels for sm_90, with the launch that `kda_launch` uses for K = V = 128; prints one JSON line."""

from __future__ import annotations

import json
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moec.codegen.triton.kda_backward_chunk import kda_backward_chunk
from moec.codegen.triton.kda_backward_conv import kda_backward_conv
from moec.codegen.triton.kda_forward_chunk import kda_forward_chunk
from moec.codegen.triton.kda_launch import LAUNCH
from moec.codegen.triton.kda_output import kda_backward_output, kda_forward_output
from moec.codegen.triton.kda_scan import kda_backward_scan, kda_forward_scan

FLOAT = {"A_log", "dt_bias", "conv_q", "conv_k", "conv_v", "totals", "partials", "norm_weight"}
NUMBERS = {"lower_bound": "fp32", "l2_eps": "fp32", "scale": "fp32", "norm_eps": "fp32"}
INTEGERS = {
    "length", "chunks", "width", "value_width", "rows_of", "columns", "first_column", "blocks", "repeats",
}  # fmt: skip
SIZES = {"K": 128, "V": 128, "C": 64, "VALUE_HEADS": 2, "HEADS": 2}


def build(kernel: Any, warps: int, **constants: Any) -> dict[str, int]:
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
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    return {"shared": compiled.metadata.shared, "wgmma": compiled.asm["ptx"].count("wgmma.mma_async")}


def main() -> None:
    inputs = {
        "LEVELS": 6, "DIAGONAL": 16, "WIDTH": 4, "PACKED": True, "SCALAR": False, "BOUNDED": True, "DTYPE": tl.bfloat16,
    }  # fmt: skip
    first = inputs | {"BK": LAUNCH.chunk_channels, "ROWS": LAUNCH.chunk_rows, "STORE_INVERSE": True}
    last = inputs | {"BK": LAUNCH.backward_chunk_channels, "ROWS": LAUNCH.backward_chunk_rows}
    scan = {"BV": LAUNCH.scan_columns, "STAGES": LAUNCH.scan_stages, "DTYPE": tl.bfloat16}
    output = {"NORM": True, "SILU": False, "DTYPE": tl.bfloat16}
    built = {
        "forward_chunk": build(kda_forward_chunk, LAUNCH.chunk_warps, PRECISION=LAUNCH.inverse_precision, **first),
        "forward_scan": build(kda_forward_scan, LAUNCH.scan_warps, **scan),
        "backward_scan": build(kda_backward_scan, LAUNCH.scan_warps, **scan),
        "backward_output": build(kda_backward_output, LAUNCH.output_warps, **output),
        "backward_chunk": build(kda_backward_chunk, LAUNCH.backward_chunk_warps, **last),
        "backward_conv": build(kda_backward_conv, LAUNCH.conv_warps, ROWS=LAUNCH.conv_rows, WIDTH=4, PACKED=True),
    }
    build(kda_forward_output, LAUNCH.output_warps, **output)
    print(json.dumps(built))


if __name__ == "__main__":
    main()
