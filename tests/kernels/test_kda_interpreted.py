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
    found = kda_cases.results(arguments, grad)
    for name, error in kda_cases.errors(found, kda_cases.reference(arguments, grad)).items():
        # The gradient of A_log is one sum that mostly cancels.
        assert error < ({bound} if name != "A_log" else 1e-3), (length, settings, name, error)
    if length == 15:
        again = kda_cases.results(arguments, grad)
        assert all(torch.equal(a, b) for a, b in zip(found, again))
print("checked", {count})
"""
CASES: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "lengths": [(15, {}), (65, {"width": 64, "value_width": 32})],
    "packed, grouped, between states": [
        (66, {"packed": True, "value_heads": 2, "state": True}),
        (17, {"gates": "bound", "width": 32}),
    ],
    "softplus": [(33, {"kind": "softplus", "packed": True, "conv": False, "norm": False})],
}
MORE: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "lengths": [(1, {}), (2, {}), (16, {}), (17, {}), (63, {}), (64, {}), (127, {}), (130, {"batch": 2})],
    "long": [(1000, {"norm": False}), (4096, {"conv": False})],
    "states": [
        (130, {"batch": 2, "state": True, "value_heads": 2, "conv": False}),
        (1, {"state": True}),
        (64, {"state": True, "kind": "softplus", "gates": "slow", "norm": False}),
    ],
    "wide": [
        (20, {"width": 256, "packed": True, "state": True}),
        (20, {"value_width": 256, "value_heads": 2}),
        (66, {"width": 256, "value_width": 256, "norm": False, "conv": False, "gates": "fast"}),
    ],
    "taps": [(35, {"taps": 5, "packed": True}), (9, {"taps": 8, "value_heads": 2}), (9, {"taps": 1}), (9, {"taps": 2})],
    "gates": [(130, {"gates": gates}) for gates in ("bound", "fast", "slow")],
    "a lower bound": [(70, {"lower_bound": -8.0, "gates": "bound", "packed": True})],
    "softplus": [(70, {"kind": "softplus", "gates": "bound"})],
    "grouped": [
        (66, {"value_heads": 2, "conv": False}),
        (70, {"heads": 2, "value_heads": 4, "packed": True}),
        (20, {"heads": 3, "value_heads": 3}),
    ],
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


# Bit for bit: what the first document holds changes nothing of the second, and gets no gradient from there. But a sum
# over the rows of a chunk gives the gradient of the gate: what cancels there leaves a rest in float32.
LEAK = """
import sys, torch
sys.path.insert(0, {root!r})
torch.set_num_threads(1)
import moec.codegen.triton
from tests.kernels import kda_cases
arguments, cut = kda_cases.inputs(50, packed=True, state=True, value_heads=2), 30
arguments[12] = (torch.arange(50) >= cut).long()[None]
grad = kda_cases.grad_for(arguments)
grad[:, :cut] = 0
loud = list(arguments)
for place in (0, 1, 2, 4, 10):
    loud[place] = torch.where(arguments[12][..., None] == 0, 100 * arguments[place], arguments[place])
loud[22] = 100 * arguments[22]
for one, two in zip(kda_cases.results(arguments, grad), kda_cases.results(loud, grad), strict=True):
    if one.dim() == 3:
        one, two = one[:, cut:], two[:, cut:]
    assert torch.equal(one, two)
_, _, q, k, v, gate, beta, *others, initial = kda_cases.results(arguments, grad)
assert not any(bool(value[:, :cut].any()) for value in (q, k, v, beta, others[5])) and not bool(initial.any())
assert float(gate[:, :cut].abs().max()) < 1e-6 * float(gate.abs().max())
print("checked 1")
"""


@pytest.mark.slow
def test_nothing_crosses_a_document_start() -> None:
    _run(LEAK.format(root=str(ROOT)), 1)


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
