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
    op = torch.ops.moec.kda if len(arguments) == kda_cases.STATELESS else torch.ops.moec.kda_with_state
    graph.output(graph.call_function(op.default, tuple(arguments)))
    return graph


@pytest.mark.parametrize(
    ("op", "settings"),
    [
        ("kda", {"width": 128, "value_width": 64}),
        ("kda", {"width": 256, "value_width": 256, "taps": 8}),
        ("kda_with_state", {"width": 64, "value_width": 256, "state": True}),
    ],
)
def test_a_call_on_a_gpu_gets_the_kernels_and_keeps_its_arguments(
    monkeypatch: pytest.MonkeyPatch, op: str, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(kda, "assembler_refusal", lambda: "")
    graph = _graph("cuda", **settings)
    (before,) = (node for node in graph.nodes if node.op == "call_function")
    arguments = before.args
    assert lower(graph) == {f"moec.{op}.default": "triton"}
    (after,) = (node for node in graph.nodes if node.op == "call_function")
    assert after.target is getattr(torch.ops.moec, f"{op}_triton").default
    assert after.args == arguments


@pytest.mark.parametrize(
    ("device", "settings", "reason"),
    [
        ("cpu", {}, "q is on cpu, the kernels need a CUDA device"),
        ("cuda", {"dtype": torch.float32}, "expected bfloat16"),
        ("cuda", {"width": 48}, "key head dimension 48, expected 16, 32, 64, 128 or 256"),
        ("cuda", {"value_width": 512}, "value head dimension 512"),
        ("cuda", {"taps": 9}, "convolutions of [9] taps, expected one width of at most 8"),
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
    for ours, reference in (
        ("kda_triton", "kda"),
        ("kda_triton_backward", "kda_backward"),
        ("kda_with_state_triton", "kda_with_state"),
        ("kda_with_state_triton_backward", "kda_with_state_backward"),
    ):
        schemas = [str(getattr(torch.ops.moec, name).default._schema).partition("(")[2] for name in (ours, reference)]
        assert schemas[0] == schemas[1]


def test_importing_the_package_loads_no_kernel() -> None:
    code = "import sys, moec.codegen.triton; print([name for name in sys.modules if name.endswith('kda_launch')])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert found.stdout.strip() == "[]", found.stderr


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(128, 128), (256, 256), (256, 128), (128, 256)], ids=str)
def test_every_kernel_compiles_for_sm_90(sizes: tuple[int, int], tmp_path: Path) -> None:
    """In shared memory and registers of an H200: 227 KiB a program; few of a thread's numbers in memory."""
    built = compiled_for_sm_90("compile_kda.py", tmp_path, *sizes)
    assert {name.partition(" ")[0] for name in built} == KERNELS
    for name, kernel in built.items():
        assert kernel["shared"] <= 227 * 1024, (name, kernel)
        assert kernel["stack"] <= 512, (name, kernel)
        assert (kernel["wgmma"] > 0) is any(part in name for part in PRODUCTS), (name, kernel)


PRODUCTS = ("chunk", "scan", "output", "values", "keys")
KERNELS = {
    "kda_prepare", "kda_forward_chunk", "kda_forward_scan", "kda_forward_output", "kda_backward_output",
    "kda_backward_scan", "kda_backward_values", "kda_backward_keys", "kda_backward_rows", "kda_backward_conv",
    "kda_sums",
}  # fmt: skip
