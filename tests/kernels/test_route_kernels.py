"""The routing kernels: in Triton's interpreter, on a GPU, and when the lowering chooses them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import moec.codegen.triton  # noqa: F401  registers the kernels
from moec.compiler.lower import lower
from moec.compiler.workspace import Workspaces
from tests.kernels.sm_90 import compiled_for_sm_90

ROOT = Path(__file__).parents[2]
OP = torch.ops.moec.route.default


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.slow)])
def test_choices_weights_and_gradients_are_those_of_the_reference(dtype: str) -> None:
    pytest.importorskip("triton")
    _check("cpu", dtype, {"TRITON_INTERPRET": "1"})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_same_on_a_gpu(dtype: str) -> None:
    _check("cuda", dtype, {})


def _check(device: str, dtype: str, extra: dict[str, str]) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | extra
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "tests" / "kernels" / "check_route.py"), device, dtype]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/")
    assert found.stdout.strip() == "checked 16", found.stderr[-3000:]


@pytest.mark.parametrize(
    ("device", "experts", "groups", "said"),
    [
        ("cuda", 896, 1, "triton"),
        ("cuda", 256, 8, "triton"),
        ("cuda", 60, 4, "60 experts in 4 groups, the kernels need powers of two"),
        ("cuda", 5000, 1, "5000 experts, the kernels hold up to 4096 scores of a token"),
        ("cpu", 896, 1, "logits is on cpu, the kernels need a CUDA device"),
    ],
)
def test_a_call_gets_the_kernels_where_they_fit(device: str, experts: int, groups: int, said: str) -> None:
    pytest.importorskip("triton")
    graph = fx.Graph()
    logits = graph.placeholder("logits")
    with torch._subclasses.FakeTensorMode():
        logits.meta["val"] = torch.empty(6, experts, device=device)
    form: Any = (None, 4, "sigmoid", False, True, 1.0, groups, groups, 1e-20)
    call = graph.call_function(OP, (logits, *form))
    graph.output(call)
    (choice,) = lower(graph).values()
    assert said in choice
    if said == "triton":
        assert Workspaces().of(call) == 0


@pytest.mark.parametrize(
    ("device", "bins", "said"),
    [
        ("cuda", 1000, "triton"),
        ("cuda", 9000, "9000 bins, the kernels hold up to 8192 counts in a program"),
        ("cpu", 1000, "logits is on cpu, the kernels need a CUDA device"),
    ],
)
def test_counts_get_the_kernels_where_they_fit(device: str, bins: int, said: str) -> None:
    pytest.importorskip("triton")
    graph = fx.Graph()
    logits, bias = graph.placeholder("logits"), graph.placeholder("bias")
    with torch._subclasses.FakeTensorMode():
        logits.meta["val"] = torch.empty(6, 896, device=device)
        bias.meta["val"] = torch.empty(896, device=device)
    call = graph.call_function(torch.ops.moec.route_histogram.default, (logits, bias, 16, bins))
    graph.output(call)
    (choice,) = lower(graph).values()
    assert said in choice
    if said == "triton":
        assert Workspaces().of(call) == 4 * 6


@pytest.mark.slow
def test_the_counts_compile_for_sm_90_without_spills_and_without_atomics_in_memory(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    for name, kernel in compiled_for_sm_90("compile_route.py", tmp_path).items():
        assert kernel["shared"] <= 227 * 1024, (name, kernel)
        assert kernel["stack"] == kernel["atomics"] == 0, (name, kernel)
