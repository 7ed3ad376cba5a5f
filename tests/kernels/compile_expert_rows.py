"""Compile the kernels over the rows of tokens and experts for sm_90; prints one JSON line, shared memory and stack."""

from __future__ import annotations

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moec.codegen.triton.epilogue import functions
from moec.codegen.triton.expert_rows import (
    activate_rows,
    activation_gradient_rows,
    combine_gradient_rows,
    combine_rows,
    spread_rows,
)
from tests.kernels.compile_experts import SWIGLU
from tests.kernels.compile_loss import usage

KINDS = {
    "position": "*i64", "order": "*i64", "weights": "*fp32", "grad_weights": "*fp32", "experts_of": "*i32",
    "width": "i32", "bias_width": "i32", "choices": "i32",
}  # fmt: skip
FORWARD, BACKWARD = functions(SWIGLU)
# 8 of a token; rows of two parts.
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "spread": (spread_rows, {"CHOICES": 8, "WEIGHTED": False}),
    "spread, weighted": (spread_rows, {"CHOICES": 8, "WEIGHTED": True}),
    "combine": (combine_rows, {"CHOICES": 8, "WEIGHTED": True}),
    "combine_gradient": (combine_gradient_rows, {"KEEP": True}),
    "token weights": (combine_gradient_rows, {"KEEP": False}),
    "activate": (activate_rows, {"FORWARD": FORWARD, "PARTS": 2, "INTERLEAVED": False, "WEIGHTED": False}),
    "activate, weighted": (activate_rows, {"FORWARD": FORWARD, "PARTS": 2, "INTERLEAVED": True, "WEIGHTED": True}),
    "activation_gradient": (
        activation_gradient_rows,
        {"BACKWARD": BACKWARD, "PARTS": 2, "INTERLEAVED": False, "WEIGHTED": True, "BIASED": True, "KEEP": True},
    ),
}


def build(kernel: Any, options: dict[str, Any]) -> dict[str, Any]:
    constants = options | {"BLOCK": 1024}
    place = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    kinds = {name: "constexpr" if name in constants else KINDS.get(name, "*bf16") for name in kernel.arg_names}
    source = ASTSource(
        kernel,
        kinds,
        {place[name]: value for name, value in constants.items()},
        {place[name]: [["tt.divisibility", 16]] for name, kind in kinds.items() if kind != "constexpr"},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    atomics = compiled.asm["ptx"].count("atom.global") + compiled.asm["ptx"].count("red.global")
    return {"shared": compiled.metadata.shared, "atomics": atomics} | usage(compiled.asm["cubin"])


if __name__ == "__main__":
    print(json.dumps({name: build(*case) for name, case in CASES.items()}))
