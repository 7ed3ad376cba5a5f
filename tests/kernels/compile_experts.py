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
from moec.codegen.triton.expert_products import expert_down_backward, expert_linear, expert_up
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
    "offsets": "*i32", "tiles": "*i32", "ranking": "*i32", "order": "*i64", "weights": "*fp32", "parts": "*fp32",
}  # fmt: skip
SIZES = ("experts", "rows", "width", "columns", "hidden", "choices", "height")
PLAIN: dict[str, Any] = {
    "BIASED": False, "TRANSPOSED": False, "TMA_X": True, "TMA_W": True, "GATHERED": False, "PARTS": 2,
    "INTERLEAVED": False, "KEEP": True, "WEIGHTED": False, "TMA": True, "ADD": False, "PRECISION": "tf32",
    "FORWARD": functions(SWIGLU)[0], "BACKWARD": functions(SWIGLU)[1],
}  # fmt: skip


def build(kernel: Any, tile: Tile, **options: Any) -> dict[str, Any]:
    constants = PLAIN | {
        "SMALL": tile.small, "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "GROUP": tile.group,
        "STAGES": tile.stages, "FLATTEN": tile.flatten,
    } | options  # fmt: skip
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    halves = kernel is expert_up and constants["PARTS"] == 2 and not constants["INTERLEAVED"]
    wide = tile.columns // 2 if halves else tile.columns
    blocks = {
        "x_desc": (tile.rows, tile.depth), "x_small": (tile.rows // 2, tile.depth),
        "w_desc": (1, tile.depth, wide) if constants.get("TRANSPOSED") else (wide, tile.depth),
        "left_desc": (tile.depth, tile.rows), "right_desc": (tile.depth, tile.columns),
    }  # fmt: skip
    described = {"x_desc": "TMA_X", "x_small": "TMA_X", "w_desc": "TMA_W", "left_desc": "TMA", "right_desc": "TMA"}
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in described and constants[described[name]]:
            signature[name] = f"tensordesc<bf16{list(blocks[name])}>"
        else:
            signature[name] = "i32" if name in SIZES else POINTERS.get(name, "*fp32" if name == "result" and constants["ADD"] else "*bf16")
    place = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    divisible = [n for n, kind in signature.items() if kind.startswith("*") or (n in SIZES and n not in ("experts", "choices"))]
    source = ASTSource(
        kernel,
        signature,
        {place[name]: value for name, value in constants.items()},
        {place[name]: [["tt.divisibility", 16]] for name in divisible},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": tile.warps})
    return {
        "shared": compiled.metadata.shared,
        "wgmma": len(re.findall(r"wgmma\.mma_async", compiled.asm["ptx"])),
        "tma": len(re.findall(r"cp\.async\.bulk\.tensor", compiled.asm["ptx"])),
    } | usage(compiled.asm["cubin"])


CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "up": (expert_up, "up", {}),
    "up, gathered": (expert_up, "up", {"GATHERED": True, "TMA_X": False}),
    "up, interleaved and transposed": (expert_up, "up", {"INTERLEAVED": True, "TRANSPOSED": True, "BIASED": True}),
    "linear": (expert_linear, "linear", {}),
    "linear, transposed": (expert_linear, "linear", {"TRANSPOSED": True}),
    "down_backward": (expert_down_backward, "down_backward", {"TRANSPOSED": True, "WEIGHTED": True}),
    "weight_gradient": (expert_weight_gradient, "weight_gradient", {}),
    "weight_gradient, added": (expert_weight_gradient, "weight_gradient", {"ADD": True}),
}


def main(names: list[str]) -> None:
    print(
        json.dumps(
            {name: build(CASES[name][0], getattr(LAUNCH, CASES[name][1]), **CASES[name][2]) for name in names or CASES}
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
