"""When the lowering chooses the expert kernels, what they hold, and that every kernel compiles for Hopper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import moec.codegen.triton  # noqa: F401  registers the kernels
from moec.codegen.triton.experts import TABLE
from moec.compiler.lower import IMPLEMENTATIONS, lower
from moec.compiler.workspace import Workspaces
from tests.kernels.sm_90 import compiled_for_sm_90

_OPS: Any = torch.ops.moec


def _graph(op: Any, device: str, **dtypes: torch.dtype) -> fx.Graph:
    """A call with 6 tokens, 4 experts, 2 choices; bfloat16 where `dtypes` does not say otherwise."""
    shapes = {"x": (12, 8), "weight": (4, 16, 8), "offsets": (4,), "indices": (6, 2), "rows": (12, 8), "order": (12,),
              "weights": (6, 2), "grad_y": (12, 16), "grad_rows": (12, 8)}  # fmt: skip
    kinds = {"offsets": torch.int32, "indices": torch.int64, "order": torch.int64, "weights": torch.float32} | dtypes
    plain = {"experts": 4, "bias": None, "transposed": False, "needed": None}
    graph = fx.Graph()
    arguments = []
    for argument in op._schema.arguments:
        if argument.name in plain:
            arguments.append(plain[argument.name])
            continue
        node = graph.placeholder(argument.name)
        with torch._subclasses.FakeTensorMode():
            kind = kinds.get(argument.name, torch.bfloat16)
            node.meta["val"] = torch.empty(shapes[argument.name], dtype=kind, device=device)
        arguments.append(node)
    graph.output(graph.call_function(op, tuple(arguments)))
    return graph


@pytest.mark.parametrize("op", list(TABLE), ids=str)
def test_a_call_on_a_gpu_gets_the_kernels(op: Any) -> None:
    pytest.importorskip("triton")
    assert lower(_graph(op, "cuda")) == {str(op): "triton"}
    assert [one.name for one in IMPLEMENTATIONS[op]] == ["triton"]
    assert "cuda" in torch.library._maybe_get_opdef(op)._backend_fns  # type: ignore[attr-defined,union-attr]


@pytest.mark.parametrize(
    ("device", "dtypes", "reason"),
    [
        ("cpu", {}, "weight is on cpu, the kernels need a CUDA device"),
        ("cuda", {"x": torch.float64, "weight": torch.float64}, "x float64, weight float64"),
        ("cuda", {"weight": torch.float32}, "x bfloat16, weight float32"),
    ],
)
def test_other_calls_run_the_reference_and_say_why(
    device: str, dtypes: dict[str, torch.dtype], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    (choice,) = lower(_graph(_OPS.grouped_linear.default, device, **dtypes)).values()
    assert choice.startswith("reference")
    assert reason in choice


def test_what_they_hold_is_small() -> None:
    """Beside 131072 rows of 7 kB: the torch path holds the rows' experts, 12 bytes a row."""
    pytest.importorskip("triton")
    for op in TABLE:
        (call,) = _graph(op, "cuda").find_nodes(op="call_function", target=op)
        call.meta["val"] = torch.empty(12, 8, device="meta")
        assert 0 < Workspaces().of(call) <= 24 * 12 + 24 * 5


@pytest.mark.slow
def test_every_kernel_compiles_for_sm_90_without_spills(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    built = compiled_for_sm_90("compile_experts.py", tmp_path)
    assert len(built) == 6
    for name, kernel in built.items():
        # Older assemblers compile products from registers wrongly; and 227 KiB is what a program can have.
        assert min(kernel["wgmma"], kernel["tma"]) > 0, (name, kernel)
        assert kernel["from registers"] == 0, (name, kernel)
        assert kernel["shared"] <= 227 * 1024, (name, kernel)
        assert kernel["stack"] == 0, (name, kernel)


@pytest.mark.slow
def test_kernels_over_rows_compile_for_sm_90_without_spills(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    built = compiled_for_sm_90("compile_expert_rows.py", tmp_path)
    assert len(built) == 8
    for name, kernel in built.items():
        assert kernel["stack"] == kernel["atomics"] == 0, (name, kernel)
