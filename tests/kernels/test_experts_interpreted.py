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
QUICK = "interleaved, transposed, biased, clamped"
MORE = (
    "plain",
    "weights before, invented",
    "not gated",
    "gelu, biased",
    "situ, all to one",
    "one token",
    "more experts than rows",
    "odd sizes",
)
COUNTS = ("128 experts, one with 30 times the rows of the others", "60 experts, all to one", "one row")
MANY = ("384 experts", "896 experts, 16 choices")
# Of the norm: float32 sums in another order; float16 rounds what is kept between two products.
BOUNDS = {"float32": 2e-6, "float16": 2e-3}


def test_outputs_and_gradients_are_those_of_a_loop() -> None:
    _check("float32", QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_forms(name: str) -> None:
    _check("float32", name)


@pytest.mark.slow
def test_any_number_of_experts_and_of_rows() -> None:
    _check("float32", *COUNTS)


@pytest.mark.slow
def test_hundreds_of_experts_are_sorted_and_multiplied() -> None:
    assert not _run("float32", *MANY)


@pytest.mark.slow
@pytest.mark.parametrize("name", [QUICK, "weights before, invented", "not gated"])
def test_float16(name: str) -> None:
    _check("float16", name)


@pytest.mark.parametrize("what", ["padding", "placement"])
def test_rows_behind_the_groups_and_bits_wherever_the_experts_are(what: str) -> None:
    assert not _run("float32", what)


def _check(dtype: str, *names: str) -> None:
    cases = _run(dtype, *names)
    assert set(cases) == set(names)
    for name, found in cases.items():
        assert {"y", "x", "weights", "up", "down"} <= set(found)
        for what, (error, _) in found.items():
            assert error <= BOUNDS[dtype], (name, what, error)


def _run(dtype: str, *names: str) -> dict[str, dict[str, tuple[float, float]]]:
    # Triton reads TRITON_INTERPRET once, when a kernel is defined; other tests need kernels that compile.
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "tests" / "kernels" / "check_experts.py"), "cpu", dtype, *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]
