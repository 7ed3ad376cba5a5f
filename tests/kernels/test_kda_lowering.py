"""When the lowering chooses the KDA kernels, and that every kernel compiles for Hopper on any machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from moec.codegen.triton import kda
from moec.compiler.lower import lower
from tests.kernels import kda_cases
from tests.kernels.sm_90 import compiled_for_sm_90

pytest.importorskip("triton")  # without it, that is all the lowering has to say


def _graph(device: str, **settings: Any) -> fx.Graph:
    """A call of moec::kda whose tensors are said to be on `device`."""
    graph = fx.Graph()
    arguments = []
    for place, value in enumerate(kda_cases.inputs(8, **({"dtype": torch.bfloat16} | settings))):
        if isinstance(value, torch.Tensor):
            node = graph.placeholder(f"argument_{place}")
            with torch._subclasses.FakeTensorMode():
                node.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device=device)
            arguments.append(node)
        else:
            arguments.append(value)
    graph.output(graph.call_function(torch.ops.moec.kda.default, tuple(arguments)))
    return graph


def test_a_call_on_a_gpu_gets_the_kernels_and_keeps_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kda, "assembler_refusal", lambda: "")
    graph = _graph("cuda", width=128, value_width=64)
    (before,) = (node for node in graph.nodes if node.op == "call_function")
    arguments = before.args
    assert lower(graph) == {"moec.kda.default": "triton"}
    (after,) = (node for node in graph.nodes if node.op == "call_function")
    assert after.target is torch.ops.moec.kda_triton.default
    assert after.args == arguments


@pytest.mark.parametrize(
    ("device", "settings", "reason"),
    [
        ("cpu", {}, "q is on cpu, the kernels need a CUDA device"),
        ("cuda", {"dtype": torch.float32}, "expected bfloat16"),
        ("cuda", {"width": 48}, "key head dimension 48, expected 16, 32, 64 or 128"),
        ("cuda", {"value_width": 256}, "value head dimension 256"),
    ],
)
def test_other_calls_run_the_reference_and_say_why(device: str, settings: dict[str, Any], reason: str) -> None:
    graph = _graph(device, **settings)
    (choice,) = lower(graph).values()
    assert choice.startswith("reference")
    assert reason in choice
    assert any(node.target is torch.ops.moec.kda.default for node in graph.nodes)


@pytest.mark.parametrize(("version", "fits"), [("12.8", False), ("13.2", False), ("13.3", True), ("14.0", True)])
def test_an_assembler_that_miscompiles_is_refused(monkeypatch: pytest.MonkeyPatch, version: str, fits: bool) -> None:
    triton = pytest.importorskip("triton")
    tool = SimpleNamespace(version=version)
    monkeypatch.setattr(triton, "knobs", SimpleNamespace(nvidia=SimpleNamespace(ptxas=tool)))
    reason = kda.assembler_refusal.__wrapped__()
    assert (reason == "") is fits
    assert fits or f"ptxas {version}" in reason


def test_a_cpu_tensor_is_refused_outside_the_interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter is on")
    with pytest.raises(RuntimeError, match="only Triton's interpreter"):
        torch.ops.moec.kda_triton(*kda_cases.inputs(8))


def test_the_schemas_are_those_of_the_reference() -> None:
    for ours, reference in (("kda_triton", "kda"), ("kda_triton_backward", "kda_backward")):
        schemas = [str(getattr(torch.ops.moec, name).default._schema).partition("(")[2] for name in (ours, reference)]
        assert schemas[0] == schemas[1]


def test_importing_the_package_loads_no_kernel() -> None:
    code = "import sys, moec.codegen.triton; print([name for name in sys.modules if name.endswith('kda_launch')])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert found.stdout.strip() == "[]", found.stderr


@pytest.mark.slow
def test_every_kernel_compiles_for_sm_90(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    built = compiled_for_sm_90("compile_kda.py", tmp_path)
    assert len(built) == 6
    # An H200 gives a program 227 KiB of shared memory.
    assert all(kernel["shared"] < 227 * 1024 and kernel["wgmma"] for kernel in built.values())
