"""Printed activations as Triton runs or compiles them; run by test_epilogues.py, in a process of its own."""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl
from torch import Tensor

from moec.codegen.triton.epilogue import functions
from moec.codegen.triton.epilogue_printer import epilogue_of
from tests.kernels.epilogue_cases import CASES, excess, values

BLOCK = 256


@triton.jit
def one_input(x, grad, out, size, forward: tl.constexpr, backward: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    a = tl.load(x + at, inside, 0.0)
    result, grad_a = backward(a, tl.load(grad + at, inside, 0.0))
    tl.store(out + at, forward(a), inside)
    tl.store(out + size + at, result, inside)
    tl.store(out + 2 * size + at, grad_a, inside)


@triton.jit
def two_inputs(x, y, grad, out, size, forward: tl.constexpr, backward: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    a, b = tl.load(x + at, inside, 0.0), tl.load(y + at, inside, 0.0)
    result, grad_a, grad_b = backward(a, b, tl.load(grad + at, inside, 0.0))
    tl.store(out + at, forward(a, b), inside)
    tl.store(out + size + at, result, inside)
    tl.store(out + 2 * size + at, grad_a, inside)
    tl.store(out + 3 * size + at, grad_b, inside)


def run() -> None:
    for name, case in CASES.items():
        given = values(case, torch.float32)
        forward, *found = _launched(case.text, given)
        assert torch.equal(forward, found[0]), name
        assert max(over := excess(case, given, found, 1e-6)) <= 1, (name, over)
    print("checked", len(CASES))


def compile_all() -> None:
    for case in CASES.values():
        epilogue = epilogue_of(case.text)
        kernel = one_input if len(epilogue.inputs) == 1 else two_inputs
        names = kernel.arg_names
        forward, backward = functions(epilogue)
        constants = {"forward": forward, "backward": backward, "BLOCK": BLOCK}
        types = {name: "*fp32" for name in names} | {"size": "i32"} | dict.fromkeys(constants, "constexpr")
        source = triton.compiler.ASTSource(kernel, types, {(names.index(n),): v for n, v in constants.items()})
        triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", 90, 32))
    print("compiled", len(CASES))


def _launched(text: str, given: list[Tensor]) -> list[Tensor]:
    size, count = given[0].numel(), len(given) + 1
    out = torch.full((count, size), torch.nan)
    kernel = one_input if len(given) == 2 else two_inputs
    kernel[(triton.cdiv(size, BLOCK),)](*given, out, size, *functions(epilogue_of(text)), BLOCK)
    return list(out)


if __name__ == "__main__":
    {"run": run, "compile": compile_all}[sys.argv[1]]()
