"""The loss kernels in Triton's interpreter, in float32 and float16, against the reference in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
QUICK = ("plain", "all, chunks of classes", "wrong label")
MORE = ("one block", "chunks of classes", "bias and soft cap", "all", "smoothing", "negative scale", "no label")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_results_are_those_of_the_reference(dtype: str) -> None:
    _check(dtype, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_more_forms(dtype: str) -> None:
    _check(dtype, MORE)


def _check(dtype: str, names: tuple[str, ...]) -> None:
    # Triton reads TRITON_INTERPRET once, when a kernel is defined; other tests need kernels that compile.
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "tests" / "kernels" / "check_loss.py"), dtype, ";".join(names)]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/")
    assert found.stdout.strip() == f"checked {len(names)}", found.stderr[-3000:]
