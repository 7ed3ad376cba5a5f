"""Compile the expert kernels for sm_90 with the tiles that `expert_launch` uses; prints one JSON line.

In bfloat16 with SwiGLU: shared memory in bytes, registers and stack bytes a thread, matrix instructions of a warpgroup,
and TMA loads.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moec.codegen.triton.epilogue import Epilogue, functions
from moec.codegen.triton.expert_gradients import expert_weight_gradient
from moec.codegen.triton.expert_launch import LAUNCH, Tile
from moec.codegen.triton.expert_products import expert_linear, expert_up
from tests.kernels.compile_loss import usage

SWIGLU = Epilogue(
    ("gate", "up"),
    "result = gate * tl.sigmoid(gate) * up",
    """
    s = tl.sigmoid(gate)
    result = gate * s * up
    grad_gate = grad * up * s * (1 + gate * (1 - s))
    grad_up = grad * gate * s
    """,
)
POINTERS = {
    "offsets": "*i32", "tiles": "*i32", "ranking": "*i32", "order": "*i64", "weights": "*fp32",
}  # fmt: skip
SIZES = ("experts", "rows", "width", "columns", "hidden", "height")
PLAIN: dict[str, Any] = {
    "BIASED": False, "TRANSPOSED": False, "TMA_X": True, "TMA_W": True, "PARTS": 2, "INTERLEAVED": False,
    "KEEP": True, "WEIGHTED": False, "TMA": True, "ADD": False, "PRECISION": "tf32",
    "FORWARD": functions(SWIGLU)[0],
}  # fmt: skip


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "up": (expert_up, {}),
    "up, interleaved and transposed": (expert_up, {"INTERLEAVED": True, "TRANSPOSED": True, "BIASED": True}),
    "linear": (expert_linear, {"TWO": True}),
    "linear, transposed": (expert_linear, {"TRANSPOSED": True, "TWO": False}),
    "weight_gradient": (expert_weight_gradient, {}),
    "weight_gradient, added": (expert_weight_gradient, {"ADD": True}),
}


def build(kernel: Any, options: dict[str, Any], tile: Tile = LAUNCH.narrow) -> dict[str, Any]:
    shape = {
        "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "GROUP": tile.group, "STAGES": tile.stages,
    }  # fmt: skip
    constants = {name: value for name, value in (PLAIN | shape | options).items() if name in kernel.arg_names}
    kinds = {name: _kind(name, kernel, constants, tile) for name in kernel.arg_names}
    place = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    aligned = [name for name, kind in kinds.items() if kind.startswith("*") or (kind == "i32" and name != "experts")]
    source = ASTSource(
        kernel,
        kinds,
        {place[name]: value for name, value in constants.items()},
        {place[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": tile.warps})
    return {
        "shared": compiled.metadata.shared,
        "wgmma": len(re.findall(r"wgmma\.mma_async", compiled.asm["ptx"])),
        "from registers": len(re.findall(r"wgmma\.mma_async[^;]*}, *{", compiled.asm["ptx"])),
        "tma": len(re.findall(r"cp\.async\.bulk\.tensor", compiled.asm["ptx"])),
    } | usage(compiled.asm["cubin"])


def _kind(name: str, kernel: Any, constants: dict[str, Any], tile: Tile) -> str:
    """The type of an argument, as Triton writes it."""
    if name in constants:
        return "constexpr"
    halves = constants.get("TWO", kernel is expert_up and not constants["INTERLEAVED"])
    wide = tile.columns // 2 if halves else tile.columns
    blocks = {
        "x_desc": [tile.rows, tile.depth], "x_small": [tile.rows // 2, tile.depth],
        "w_desc": [1, tile.depth, wide] if constants.get("TRANSPOSED") else [wide, tile.depth],
        "left_desc": [tile.depth, tile.rows], "right_desc": [tile.depth, tile.columns],
    }  # fmt: skip
    if name in blocks:
        return f"tensordesc<bf16{blocks[name]}>"
    if name == "result" and constants["ADD"]:
        return "*fp32"
    return "i32" if name in SIZES else POINTERS.get(name, "*bf16")


if __name__ == "__main__":
    print(json.dumps({name: build(*CASES[name]) for name in sys.argv[1:] or CASES}))
