"""Compile the kernels of the counts for quantile balancing for sm_90; prints one JSON line, shared memory and stack."""

from __future__ import annotations

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moec.codegen.triton.route_histogram import route_count, route_threshold
from tests.kernels.compile_loss import usage

KINDS = {
    "logits": "*fp32", "bias": "*fp32", "threshold": "*fp32", "counts": "*i64", "tokens": "i32", "experts": "i32",
    "bins": "i32",
}  # fmt: skip
# 896 experts, 16 of a token, 1000 bins.
CASES: dict[str, tuple[Any, dict[str, int], int]] = {
    "threshold": (route_threshold, {"RANK": 17, "BLOCK": 1024}, 1),
    "count": (route_count, {"BLOCK": 1024, "BINS": 1024, "EXPERTS": 8, "TOKENS": 512}, 8),
}


def build(kernel: Any, constants: dict[str, int], warps: int) -> dict[str, Any]:
    place = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        kernel,
        {name: KINDS.get(name, "constexpr") for name in kernel.arg_names},
        {place[name]: value for name, value in constants.items()},
        {place[name]: [["tt.divisibility", 16]] for name in kernel.arg_names if KINDS.get(name, "")[:1] == "*"},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    global_atomics = compiled.asm["ptx"].count("atom.global") + compiled.asm["ptx"].count("red.global")
    return {"shared": compiled.metadata.shared, "atomics": global_atomics} | usage(compiled.asm["cubin"])


if __name__ == "__main__":
    print(json.dumps({name: build(*case) for name, case in CASES.items()}))
