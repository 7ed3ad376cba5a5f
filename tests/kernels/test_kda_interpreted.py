"""The KDA kernels in Triton's interpreter, float32, against the reference in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
# Triton reads TRITON_INTERPRET once, when a kernel is defined; other tests need kernels that compile.
SCRIPT = """
import sys, torch
sys.path.insert(0, {root!r})
torch.set_num_threads(1)
import moec.codegen.triton
from tests.kernels import kda_cases
for length, settings in {cases!r}:
    arguments = kda_cases.inputs(length, **settings)
    grad = kda_cases.grad_for(arguments)
    ops = torch.ops.moec
    found = [ops.kda_triton(*arguments), *ops.kda_triton_backward(grad, *arguments)]
    for name, error in kda_cases.errors(found, kda_cases.reference(arguments, grad)).items():
        # The gradient of A_log is one sum that mostly cancels.
        assert error < ({bound} if name != "A_log" else 1e-3), (length, settings, name, error)
    if length == 15:
        again = [ops.kda_triton(*arguments), *ops.kda_triton_backward(grad, *arguments)]
        assert all(torch.equal(a, b) for a, b in zip(found, again))
print("checked", {count})
"""
CASES: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "lengths": [(15, {}), (65, {"width": 64, "value_width": 32})],
    "packed and grouped": [(66, {"packed": True, "value_heads": 2}), (17, {"gates": "bound", "width": 32})],
    "softplus": [(33, {"kind": "softplus", "packed": True, "conv": False, "norm": False})],
}
MORE: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "lengths": [(1, {}), (2, {}), (16, {}), (63, {}), (64, {}), (127, {}), (130, {"batch": 2})],
    "gates": [(130, {"gates": gates}) for gates in ("bound", "fast", "slow")],
    "a lower bound": [(70, {"lower_bound": -8.0, "gates": "bound", "packed": True})],
    "softplus": [(70, {"kind": "softplus", "gates": "bound"})],
    "grouped": [(66, {"value_heads": 2, "conv": False}), (70, {"heads": 2, "value_heads": 4, "packed": True})],
    "per head": [(66, {"kind": "softplus", "scalar": True, "value_heads": 2, "activation": "silu"})],
}


# Every step is linear in the gradient: at 2^60 times its size, nothing but the exponent may change.
SCALED = """
import sys, torch
sys.path.insert(0, {root!r})
torch.set_num_threads(1)
import moec.codegen.triton
from tests.kernels import kda_cases
arguments = kda_cases.inputs(33, gates="bound")
grad, backward = kda_cases.grad_for(arguments), torch.ops.moec.kda_triton_backward
for small, large in zip(backward(grad, *arguments), backward(grad * 2.0**60, *arguments), strict=True):
    assert torch.isfinite(large).all()
    assert torch.equal(small * 2.0**60, large)
print("checked 1")
"""


def test_gradients_of_any_size_pass_the_steepest_gate() -> None:
    _run(SCALED.format(root=str(ROOT)), 1)


@pytest.mark.parametrize("cases", CASES.values(), ids=list(CASES))
def test_output_and_gradients_are_those_of_the_reference(cases: list[tuple[int, dict[str, Any]]]) -> None:
    _check(cases)


@pytest.mark.slow
@pytest.mark.parametrize("cases", MORE.values(), ids=list(MORE))
def test_more_lengths_and_forms(cases: list[tuple[int, dict[str, Any]]]) -> None:
    _check(cases)


def _check(cases: list[tuple[int, dict[str, Any]]]) -> None:
    _run(SCRIPT.format(root=str(ROOT), cases=cases, bound=5e-5, count=len(cases)), len(cases))


def _run(script: str, count: int) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, cwd="/")
    assert found.stdout.strip() == f"checked {count}", found.stderr[-3000:]
