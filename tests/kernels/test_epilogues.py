"""Printed activations and derivatives beside autograd in float64: as Python, in Triton's interpreter, compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from moec.codegen.triton.epilogue_printer import FORMS, TEXTS, epilogue_of
from moec.compiler.expression import parse
from moec.compiler.expression_ops import OPS

from .epilogue_cases import CASES, excess, values

ROOT = Path(__file__).parents[2]

# What the printed lines may call, on tensors in place of tiles.
TILES = SimpleNamespace(
    where=lambda condition, *pair: torch.where(condition, *(torch.as_tensor(v, dtype=torch.float64) for v in pair)),
    abs=torch.abs, exp=torch.exp, log=torch.log, sqrt=torch.sqrt, rsqrt=torch.rsqrt, sin=torch.sin, cos=torch.cos,
    erf=torch.erf, sigmoid=torch.sigmoid, zeros_like=torch.zeros_like,
)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_lines_are_the_activation_and_its_derivative(name: str) -> None:
    case = CASES[name]
    given = values(case, torch.float64)
    epilogue = epilogue_of(case.text)
    scope = dict(zip(epilogue.inputs, given, strict=False)) | {"grad": given[-1]}
    forward, backward = _run(epilogue.forward, scope), _run(epilogue.backward, scope)
    found = [backward["result"], *(backward[f"grad_{name}"] for name in epilogue.inputs)]
    # The series of tanh is as good as float32 needs it.
    assert max(excess(case, given, found, 5e-9)) <= 1
    assert torch.equal(forward["result"], backward["result"])


def test_a_wrong_derivative_is_seen() -> None:
    case = CASES["swiglu"]
    given = values(case, torch.float64)
    epilogue = epilogue_of(case.text)
    wrong = epilogue.backward.replace("1.0 - sigmoid", "0.999 - sigmoid")
    assert wrong != epilogue.backward
    found = _run(wrong, dict(zip(epilogue.inputs, given, strict=False)) | {"grad": given[-1]})
    assert excess(case, given, [found["result"], found["grad_gate"], found["grad_up"]], 5e-9)[1] > 1


@pytest.mark.parametrize("name", CASES)
def test_the_text_is_read_back(name: str) -> None:
    expression = parse(CASES[name].text)
    assert parse(expression.text) == expression
    derivative = expression.derivative()
    assert parse(derivative.text) == derivative
    *inputs, grad = values(CASES[name], torch.float64)
    assert max(excess(CASES[name], [*inputs, grad], list(derivative(*inputs, grad)), 1e-13)) <= 1


def test_what_is_no_number_stays_so() -> None:
    """A clamp that made a number of NaN would hide it."""
    nan = torch.full((3,), torch.nan, dtype=torch.float64)
    for name, case in CASES.items():
        epilogue = epilogue_of(case.text)
        for bad in epilogue.inputs:
            scope = {other: nan if other == bad else torch.ones_like(nan) for other in epilogue.inputs}
            assert _run(epilogue.forward, scope)["result"].isnan().all(), (name, bad)


def test_every_op_can_be_printed() -> None:
    for name, op in OPS.items():
        assert name in TEXTS or name in FORMS or op.symbol or op.expansion, name


def test_swiglu_reads_as_one_would_write_it() -> None:
    epilogue = epilogue_of("gate, up: silu(gate) * up")
    assert epilogue.forward == "result = gate * tl.sigmoid(gate) * up"
    assert epilogue.backward.splitlines() == [
        "sigmoid = tl.sigmoid(gate)",
        "mul = gate * sigmoid",
        "result = mul * up",
        "mul_3 = grad * up",
        "grad_gate = mul_3 * sigmoid + mul_3 * gate * (sigmoid * (1.0 - sigmoid))",
        "grad_up = grad * mul",
    ]


@pytest.mark.parametrize("text", ["gate, up", "x: x +", "x: y", "x: tan(x)", "x: x if x else x", "x: x ** 2"])
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no expression"):
        parse(text)


def test_in_the_interpreter() -> None:
    assert _check({"TRITON_INTERPRET": "1"}, "run") == f"checked {len(CASES)}"


@pytest.mark.slow
def test_compiled_for_sm_90(tmp_path: Path) -> None:
    assert _check({"TRITON_CACHE_DIR": str(tmp_path)}, "compile") == f"compiled {len(CASES)}"


def _run(lines: str, scope: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {"tl": TILES, **scope}
    exec(lines, found)
    return found


def _check(settings: dict[str, str], what: str) -> str:
    pytest.importorskip("triton")
    # Triton reads TRITON_INTERPRET once, when a kernel is defined; other tests need kernels that compile.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | settings
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, str(ROOT / "tests" / "kernels" / "check_epilogues.py"), what]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", timeout=280)
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout.strip()
