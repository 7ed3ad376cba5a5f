"""The expert kernels against a loop in float64; run by test_experts_interpreted.py and test_experts_gpu.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from moec.codegen.triton import expert_launch as kernels
from moec.codegen.triton.expert_launch import LAUNCH, Launch, Tile
from tests.kernels.expert_cases import ACTIVATIONS, CASES, LARGE, Case, Operands, operands, reference

TINY = Tile(rows=32, columns=32, depth=16, group=2, stages=1, warps=4)
# Blocks that are cut short, several tiles and slot blocks, even for the sizes an interpreter can do.
SMALL = Launch(up=TINY, linear=TINY, down_backward=TINY, weight_gradient=TINY, wide=TINY, slots=16, row=16)
# Of the largest gradient or output: float32 sums in another order; float16 and bfloat16 round what is kept.
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def ours(case: Case, given: Operands, launch: Launch, gathered: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients by the kernels, rows gathered in the products or before them."""
    form = {"transposed": case.transposed, "interleaved": case.interleaved, "launch": launch}
    epilogue = ACTIVATIONS[case.activation].epilogue
    order, position, offsets = kernels.slots(given.indices, case.experts, launch)
    rows = kernels.gather(given.x, order, case.choices, launch)
    source = (given.x, given.up, offsets, order, case.choices) if gathered else (rows, given.up, offsets, order)
    if not gathered:
        source = (rows, given.up, offsets, None, 1)
    before = given.weights if case.before and gathered else None
    pre, act = kernels.up(*source, given.up_bias, before, epilogue=epilogue, keep_pre=True, **form)
    again = kernels.activate(
        pre, order, given.weights if case.before else None, interleaved=case.interleaved, epilogue=epilogue, launch=launch
    )
    act = act if gathered else again
    bound = BOUNDS[act.dtype]
    assert distance(again, act) <= bound / 2
    plain = {"transposed": case.transposed, "launch": launch}
    results = kernels.linear(act, given.down, offsets, given.down_bias, **plain)
    y = kernels.combine(results, position, None if case.before else given.weights, case.choices, launch)
    grad_pre, weighted, grad_weights = kernels.down_backward(
        given.grad, given.down, offsets, pre, given.weights, order, case.choices, epilogue=epilogue,
        down_bias=None if case.before else given.down_bias, **form,
    )  # fmt: skip
    grad_rows = kernels.gather(given.grad, order, case.choices, launch)
    turned = {"transposed": not case.transposed, "launch": launch}
    grad_x = kernels.combine(kernels.linear(grad_pre, given.up, offsets, **turned), position, None, case.choices, launch)
    found = {
        "x": grad_x,
        "weights": grad_weights,
        "up": kernels.weight_gradient(grad_pre, rows, offsets, **plain),
        "down": kernels.weight_gradient(grad_rows, weighted, offsets, **plain),
    }
    into = torch.ones(given.up.shape, dtype=torch.float32, device=given.up.device)
    added = kernels.weight_gradient(grad_pre, rows, offsets, into=into, **plain)
    assert added is into
    assert distance(added - 1, found["up"]) <= bound
    if given.down_bias is not None:
        found["up_bias"] = kernels.bias_gradient(grad_pre, offsets, launch=launch)
        unweighted = () if case.before else (order, given.weights)
        found["down_bias"] = kernels.bias_gradient(grad_rows, offsets, *unweighted, launch=launch)
    return y, found


def errors(case: Case, dtype: torch.dtype, launch: Launch, device: str = "cpu", gathered: bool = True) -> dict[str, float]:
    """Relative error of the output and of every gradient."""
    given = operands(case, dtype, device)
    y, grads = ours(case, given, launch, gathered)
    wanted, truth = reference(case, given, torch.float64)
    assert grads.keys() == truth.keys()
    return {"y": distance(y, wanted)} | {name: distance(grads[name], truth[name]) for name in truth}


def distance(found: Tensor, truth: Tensor) -> float:
    """|found - truth| / |truth|; infinite for anything that is not finite, or not zero where the truth is zero."""
    assert found.shape == truth.shape, (found.shape, truth.shape)
    scale = float(truth.double().norm())
    error = float((found.double() - truth.double()).norm())
    return error / scale if scale else (0.0 if error == 0 else float("inf"))


def poisoned() -> None:
    """NaN, or the largest integer, in whatever is allocated and not written."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True


def main(device: str, dtype: torch.dtype, names: Sequence[str]) -> None:
    poisoned()
    cases, launch = (CASES, SMALL) if device == "cpu" else (LARGE, LAUNCH)
    found = {}
    for name in names or cases:
        for gathered in (True, False):
            found[f"{name}, {'gathered' if gathered else 'rows'}"] = errors(cases[name], dtype, launch, device, gathered)
    print(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], getattr(torch, sys.argv[2]), [name for name in sys.argv[3].split(";") if name])
