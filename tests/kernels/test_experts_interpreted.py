"""The expert kernels in Triton's interpreter, in float32 and float16, against a loop over the experts in float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
QUICK = ("interleaved, transposed, biased, clamped", "weights before, invented")
MORE = (
    "plain",
    "not gated",
    "gelu, biased",
    "situ, all to one",
    "one token",
    "more experts than rows",
    "odd sizes",
)
# Of the norm: float32 sums in another order; float16 rounds what is kept between two products.
BOUNDS = {"float32": 2e-6, "float16": 2e-3}


@pytest.mark.parametrize("name", QUICK)
def test_outputs_and_gradients_are_those_of_a_loop(name: str) -> None:
    _check("float32", [name])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_more_forms(dtype: str) -> None:
    _check(dtype, [*MORE, *QUICK] if dtype == "float16" else [*MORE])


def _check(dtype: str, names: list[str]) -> None:
    # Triton reads TRITON_INTERPRET once, when a kernel is defined; other tests need kernels that compile.
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "tests" / "kernels" / "check_experts.py"), "cpu", dtype, ";".join(names)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert list(found) == names
    for name, errors in found.items():
        for what, (error, _) in errors.items():
            assert error <= BOUNDS[dtype], (name, what, error)
