"""When the lowering chooses the loss kernels, what is not asked for, and that every kernel compiles for Hopper."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import moec.codegen.triton  # noqa: F401  registers the kernels
from moec.compiler.lower import IMPLEMENTATIONS, argument_of, lower
from moec.compiler.workspace import Workspaces
from tests.kernels.sm_90 import compiled_for_sm_90

OP = torch.ops.moec.linear_cross_entropy_sum.default
BACKWARD = torch.ops.moec.linear_cross_entropy_sum_backward.default


def _graph(device: str, dtype: torch.dtype, weight_dtype: torch.dtype | None = None, used: int = 5) -> fx.Graph:
    """A call whose tensors are said to be on `device`, and its first `used` results, returned."""
    graph = fx.Graph()

    def tensor(name: str, *shape: int, dtype: torch.dtype) -> fx.Node:
        node = graph.placeholder(name)
        with torch._subclasses.FakeTensorMode():
            node.meta["val"] = torch.empty(shape, dtype=dtype, device=device)
        return node

    hidden = tensor("hidden", 8, 4, dtype=dtype)
    weight = tensor("weight", 6, 4, dtype=weight_dtype or dtype)
    labels = tensor("labels", 8, dtype=torch.int64)
    tokens = tensor("tokens", 8, dtype=torch.float32)
    form = (None, None, None, -100, 1.0, 0.0, 0.0, 8, 6, True, True, dtype)
    call = graph.call_function(OP, (hidden, weight, labels, tokens, *form))
    graph.output(tuple(graph.call_function(operator.getitem, (call, index)) for index in range(used)))
    return graph


def _call(graph: fx.Graph) -> fx.Node:
    (node,) = graph.find_nodes(op="call_function", target=OP)
    return node


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_call_on_a_gpu_gets_the_kernels(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    assert lower(_graph("cuda", dtype)) == {"moec.linear_cross_entropy_sum.default": "triton"}


@pytest.mark.parametrize(
    ("device", "dtype", "weight_dtype", "reason"),
    [
        ("cpu", torch.bfloat16, None, "hidden is on cpu, the kernels need a CUDA device"),
        ("cuda", torch.float64, None, "hidden and weight are float64, expected one of bfloat16, float16, float32"),
        ("cuda", torch.bfloat16, torch.float32, "hidden and weight are bfloat16, float32, expected one of"),
    ],
)
def test_other_calls_run_the_reference_and_say_why(
    device: str, dtype: torch.dtype, weight_dtype: torch.dtype | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    (choice,) = lower(_graph(device, dtype, weight_dtype)).values()
    assert choice.startswith("reference")
    assert reason in choice


@pytest.mark.parametrize(("used", "hidden", "weight"), [(2, False, False), (3, True, False), (4, True, True)])
def test_gradients_that_nothing_uses_are_not_made(used: int, hidden: bool, weight: bool) -> None:
    graph = _graph("cpu", torch.float32, used=used)
    lower(graph)
    assert (argument_of(_call(graph), "hidden_grad"), argument_of(_call(graph), "weight_grad")) == (hidden, weight)


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, 5 * 6 * 2), (torch.float32, 5 * 6 * 4)])
def test_a_chunk_of_logits_is_what_the_kernels_hold(dtype: torch.dtype, expected: int) -> None:
    pytest.importorskip("triton")
    graph = _graph("cuda", dtype)
    call = _call(graph)
    names = [argument.name for argument in OP._schema.arguments]
    call.args = tuple(5 if name == "rows" else value for name, value in zip(names, call.args, strict=True))
    slopes = [torch.empty(n, 4, dtype=torch.float32, device="meta") for n in (8, 6)]
    call.meta["val"] = (torch.empty((), device="meta"), torch.empty(8, device="meta"), *slopes)
    assert Workspaces().of(call) == expected


def test_the_sums_count_where_the_results_are_rounded() -> None:
    pytest.importorskip("triton")
    op = torch.ops.moec.linear_cross_entropy_backward.default
    tensors = {node.name: node for node in _graph("cuda", torch.bfloat16).nodes if node.op == "placeholder"}
    given = {"rows": 3, "columns": 6, "ignore_index": -100, "logit_scale": 1.0, "softcap": 0.0, "label_smoothing": 0.0}
    given |= {name: tensors[name] for name in ("hidden", "weight", "labels")} | dict.fromkeys(("bias", "class_weights"))
    names = [argument.name for argument in op._schema.arguments if argument.name != "needed"]
    call = tensors["hidden"].graph.call_function(op, tuple(given.get(name, tensors["tokens"]) for name in names))
    call.meta["val"] = tuple(torch.empty(n, 4, dtype=torch.bfloat16, device="meta") for n in (8, 6))
    assert Workspaces().of(call) == (8 + 6) * 4 * 4  # the chunk of 3 x 6 is gone, and smaller than the results


def test_a_chunk_on_a_cpu_is_measured_on_the_reference() -> None:
    """In float32, as the reference holds it."""
    found = Workspaces().of(_call(_graph("cpu", torch.bfloat16)))
    assert found >= 8 * 6 * 4


def test_every_op_of_the_loss_has_kernels() -> None:
    names = ("linear_cross_entropy", "linear_cross_entropy_sum", "token_log_probs", "logit_statistics")
    for name in names:
        for op in (getattr(torch.ops.moec, name).default, getattr(torch.ops.moec, f"{name}_backward").default):
            assert [one.name for one in IMPLEMENTATIONS[op]] == ["triton"]
            assert torch._C._dispatch_has_kernel_for_dispatch_key(op._schema.name, "CUDA") or _runs_on_cuda(op)


def _runs_on_cuda(op: Any) -> bool:
    """Custom ops keep their kernels by device in a table of their own."""
    return "cuda" in torch.library._maybe_get_opdef(op)._backend_fns  # type: ignore[attr-defined,union-attr]


@pytest.mark.slow
def test_every_kernel_compiles_for_sm_90_without_spills(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    built = compiled_for_sm_90("compile_loss.py", tmp_path)
    assert len(built) == 7
    # Two programs of 512 threads fit an SM with 64 registers a thread; 16 bytes of stack are no spill of a loop.
    assert all(kernel["stack"] <= 16 and kernel["wide loads"] for kernel in built.values()), built
    assert built["loss_both plain"]["registers"] <= 64
