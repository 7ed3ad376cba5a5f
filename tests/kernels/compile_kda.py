"""Compile the KDA kernels for sm_90 with the launch of K = V = 128; prints one JSON line: kernel -> what it needs.

python tests/kernels/compile_kda.py K V    for other head dimensions
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moec.codegen.triton.kda_arguments import CHUNK, launch_for
from moec.codegen.triton.kda_backward_conv import kda_backward_conv
from moec.codegen.triton.kda_backward_keys import kda_backward_keys
from moec.codegen.triton.kda_backward_rows import kda_backward_rows
from moec.codegen.triton.kda_backward_values import kda_backward_values
from moec.codegen.triton.kda_forward_chunk import kda_forward_chunk
from moec.codegen.triton.kda_output import kda_backward_output, kda_forward_output
from moec.codegen.triton.kda_prepare import kda_prepare
from moec.codegen.triton.kda_scan import kda_backward_scan, kda_forward_scan
from moec.codegen.triton.kda_sums import SUM_COLUMNS, SUM_ROWS, kda_sums

FLOAT = {
    "A_log", "dt_bias", "conv_q", "conv_k", "conv_v", "totals", "partials", "norm_weight", "sums", "by_row", "ranges",
    "scalar_grads", "initial_state", "final_state", "grad_initial", "grad_final", "tap_partials", "grad_A_log",
    "grad_dt_bias", "grad_norm", "grad_conv_q", "grad_conv_k", "grad_conv_v",
}  # fmt: skip
NUMBERS = {"lower_bound": "fp32", "l2_eps": "fp32", "scale": "fp32", "norm_eps": "fp32"}
INTEGERS = {
    "length", "chunks", "width", "value_width", "rows_of", "columns", "first_column", "blocks", "repeats", "levels",
    "solve_levels", "rows", "tap_rows",
}  # fmt: skip
# Everything that a layer of Kimi K3 has, packed, and between two states.
CONSTANTS = {
    "C": CHUNK, "VALUE_HEADS": 2, "HEADS": 2, "DIAGONAL": 32, "WIDTH": 4, "PACKED": True, "SCALAR": False,
    "BOUNDED": True, "DTYPE": tl.bfloat16, "NORM": True, "SILU": False, "INITIAL": True, "FINAL": True,
    "STORE_INVERSE": True,
}  # fmt: skip


def build(kernel: Any, warps: int, registers: int | None = None, **constants: Any) -> dict[str, int]:
    """Compile one kernel: bytes of shared memory, registers and bytes of stack a thread, wgmma instructions."""
    constants = {name: value for name, value in (CONSTANTS | constants).items() if name in kernel.arg_names}
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
    used = _resources(compiled.asm["cubin"])
    wgmma = compiled.asm["ptx"].count("wgmma.mma_async")
    return {"shared": compiled.metadata.shared, "registers": used["REG"], "stack": used["STACK"], "wgmma": wgmma}


def _resources(cubin: bytes) -> dict[str, int]:
    """What the machine code of the one kernel in a cubin uses, by the names of `cuobjdump -res-usage`."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", text)}


def kernels(width: int, value_width: int) -> dict[str, dict[str, int]]:
    """All kernels for K = width and V = value_width, as `kda_launch` launches them."""
    launch = launch_for(width, value_width, CONSTANTS["WIDTH"])
    channels = min(launch.keys_channels, width)
    sizes = {"K": width, "V": value_width, "PARTS": width // channels, "SHARES": 2 + width // channels}
    scan = sizes | {"BV": min(launch.scan_columns, value_width), "STAGES": launch.scan_stages}
    keys = sizes | {"BK": channels, "BV": min(launch.keys_columns, value_width)}
    chunk = sizes | {"BK": min(launch.chunk_channels, width, value_width), "PRECISION": launch.inverse_precision}
    back_output = sizes | {"BV": min(launch.back_output_columns, value_width)}
    prepare = sizes | {"BK": min(launch.prepare_channels, width), "ROWS": launch.prepare_rows}
    values = sizes | {"BK": min(launch.values_channels, value_width)}
    sums = sizes | {"GATES": 2 * width, "COLUMNS": SUM_COLUMNS, "ROWS": SUM_ROWS}
    unbounded = {"DIAGONAL": 1, "BOUNDED": False}
    return {
        "kda_prepare": build(kda_prepare, launch.prepare_warps, **prepare),
        "kda_forward_chunk": build(kda_forward_chunk, launch.chunk_warps, launch.chunk_registers, **chunk),
        "kda_forward_scan": build(kda_forward_scan, launch.scan_warps, **scan),
        "kda_forward_output": build(kda_forward_output, launch.output_warps, **sizes),
        "kda_backward_output": build(kda_backward_output, launch.back_output_warps, **back_output),
        "kda_backward_scan": build(kda_backward_scan, launch.scan_warps, **scan),
        "kda_backward_values": build(kda_backward_values, launch.values_warps, **values),
        "kda_backward_keys": build(kda_backward_keys, launch.keys_warps, launch.keys_registers, **keys),
        "kda_backward_keys unbounded": build(
            kda_backward_keys, launch.keys_warps, launch.keys_registers, **keys | unbounded
        ),
        "kda_backward_rows": build(kda_backward_rows, launch.rows_warps, **sizes, ROWS=launch.rows_rows),
        "kda_backward_conv": build(kda_backward_conv, launch.conv_warps, **sizes, ROWS=launch.conv_rows),
        "kda_sums": build(kda_sums, 8, **sums),
    }


if __name__ == "__main__":
    print(json.dumps(kernels(*(int(size) for size in sys.argv[1:3] or (128, 128)))))
