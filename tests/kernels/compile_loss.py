"""Compile the loss kernels for sm_90 with the launch that `loss_launch` uses; prints one JSON line.

For a vocabulary of 163840 in bfloat16: shared memory in bytes, registers a thread, bytes spilled, and loads of 16
bytes.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moec.codegen.triton.loss_kernels import loss_both, loss_gradient, loss_statistics, scaled_copy
from moec.codegen.triton.loss_launch import LAUNCH

KINDS = {
    "product": "*bf16", "bias": "*bf16", "result": "*bf16", "labels": "*i64", "scale": "fp32", "softcap": "fp32",
    "factor": "fp32", "smoothing": "fp32", "stride": "i32", "count": "i32", "first": "i32", "ignored": "i32",
}  # fmt: skip
PLAIN: dict[str, Any] = {"HAS_BIAS": False, "SMOOTHED": False, "CLASS_WEIGHTS": False, "Z_LOSS": False, "FORM": 0}
FULL = dict.fromkeys(PLAIN, True) | {"FORM": 2}


def build(kernel: Any, warps: int, **constants: Any) -> dict[str, int]:
    """Compile one kernel and read its resources off the machine code."""
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else KINDS.get(name, "*fp32") for name in names}
    aligned = [name for name, kind in signature.items() if kind.startswith("*") or name in ("stride", "count")]
    place = {name: (index,) for index, name in enumerate(names)}
    source = ASTSource(
        kernel,
        signature,
        {place[name]: value for name, value in constants.items()},
        {place[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    return {
        "shared": compiled.metadata.shared,
        "wide loads": len(re.findall(r"ld\.global[^;]*\.v4\.b32", compiled.asm["ptx"])),
    } | usage(compiled.asm["cubin"])


def usage(cubin: bytes) -> dict[str, int]:
    """Registers and stack bytes a thread, by the disassembler that Triton carries."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", text)}
    return {"registers": found["REG"], "stack": found["STACK"]}


def main() -> None:
    block, warps = LAUNCH.block, LAUNCH.warps
    built = {
        f"{kernel.__name__} {name}": build(kernel, warps, BLOCK=block, **options)
        for kernel in (loss_statistics, loss_gradient, loss_both)
        for name, options in (("plain", PLAIN), ("full", FULL))
    }
    built["scaled_copy"] = build(scaled_copy, 8, BLOCK=LAUNCH.copy_block)
    print(json.dumps(built))


if __name__ == "__main__":
    main()
