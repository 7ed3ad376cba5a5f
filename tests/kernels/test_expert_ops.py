"""The ops of fused experts: what the kernels give, and when the lowering chooses them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from moec.codegen.triton import expert_ops
from moec.compiler.lower import lower
from moec.compiler.workspace import Workspaces
from tests.kernels.check_expert_ops import FORMS, Run, by_reference, compare, layer

pytest.importorskip("triton")  # without it, that is all the lowering has to say

ROOT = Path(__file__).parents[2]
OPS = torch.ops.moec
SWIGLU, THREE = "gate, up: silu(gate) * up", "a, b, c: a * b + c"
N, K, E, D, I = 16, 2, 4, 32, 24  # noqa: E741


def test_in_the_interpreter() -> None:
    # Triton reads TRITON_INTERPRET once, when a kernel is defined; other tests need kernels that compile.
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "tests" / "kernels" / "check_expert_ops.py")]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", timeout=280)
    assert found.stdout.strip() == "checked 5", found.stderr[-3000:]


def graph(device: str, activation: str = SWIGLU, dtype: torch.dtype = torch.bfloat16) -> fx.Graph:
    """One layer, forward and backward, whose tensors are said to be on `device`."""
    made = fx.Graph()

    def value(*shape: int, of: torch.dtype = dtype) -> fx.Node:
        node = made.placeholder(f"value_{len(made.nodes)}")
        with torch._subclasses.FakeTensorMode():
            node.meta["val"] = torch.empty(shape, dtype=of, device=device)
        return node

    parts, rows = activation.partition(":")[0].count(",") + 1, N * K
    order, position = (value(rows, of=torch.int64) for _ in range(2))
    offsets, weights = value(E, of=torch.int32), value(N, K, of=torch.float32)
    x, pre, act, grad_y, grad_pre = (
        value(*s) for s in ((N, D), (rows, parts * I), (rows, I), (N, D), (rows, parts * I))
    )
    first, second = value(E, parts * I, D), value(E, D, I)
    places, layout = (offsets, order, position), (activation, False, False)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (OPS.expert_slots.default, (value(N, K, of=torch.int64), E)),
        (OPS.expert_up.default, (x, first, *places, None, None, None, activation, K, False, False)),
        (OPS.expert_down.default, (None, act, second, *places, None, weights, *layout)),
        (OPS.expert_down_backward.default, (grad_y, pre, second, *places, None, weights, *layout)),
        (OPS.expert_up_backward.default, (grad_pre, x, first, *places, None, None, K, False)),
    ]
    for target, arguments in calls:
        node = made.call_function(target, arguments)
        with torch._subclasses.FakeTensorMode():
            node.meta["val"] = torch.empty(0, device=device)
    made.output(tuple(made.find_nodes(op="call_function", target=target)[0] for target, _ in calls))
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_calls_on_a_gpu_get_the_kernels(dtype: torch.dtype) -> None:
    assert lower(graph("cuda", dtype=dtype)) == dict.fromkeys(map(str, expert_ops.TABLE), "triton")


@pytest.mark.parametrize(
    ("device", "dtype", "activation", "reason", "refused"),
    [
        ("cpu", torch.bfloat16, SWIGLU, "on a CUDA device|need a CUDA device", 5),
        ("cuda", torch.float64, SWIGLU, "another than bfloat16, float16, float32", 4),
        ("cuda", torch.bfloat16, THREE, "the activation has 3 parts, the kernels know up to 2", 3),
    ],
)
def test_other_calls_run_the_reference(
    device: str, dtype: torch.dtype, activation: str, reason: str, refused: int
) -> None:
    chosen = lower(graph(device, activation, dtype))
    texts = [text for text in chosen.values() if text.startswith("reference")]
    assert len(texts) == refused
    assert all(any(part in text for part in reason.split("|")) for text in texts), texts


def test_rows_that_live_only_inside_are_counted() -> None:
    found = {str(node.target): Workspaces().of(node) for node in graph("cuda").nodes if node.op == "call_function"}
    rows, gradient = 2 * N * K * D, 2 * N * K * (D + I)
    assert found["moec.expert_up.default"] == found["moec.expert_up_backward.default"] == rows
    assert found["moec.expert_down.default"] == rows
    assert found["moec.expert_down_backward.default"] == gradient
    assert found["moec.expert_slots.default"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernels_on_a_gpu(dtype: torch.dtype) -> None:
    bound = 2e-2 if dtype == torch.bfloat16 else 2e-6
    for name, form in FORMS.items():
        for ordered in (True, False) if not form[-1] else (True,):
            found, wanted = (layer(rounded(run, dtype), form, ordered) for run in (on("cuda"), by_reference))
            assert compare(found, wanted) <= bound, (name, ordered)


def rounded(run: Run, dtype: torch.dtype) -> Run:
    """The same from operands of a dtype."""

    def of(value: Tensor) -> Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    return lambda op, *arguments: run(op, *tree_map_only(Tensor, of, arguments))


def on(device: str) -> Run:
    """The ops themselves, on a device; results come back."""

    def run(op: Any, *arguments: Any) -> Any:
        return tree_map_only(Tensor, Tensor.cpu, op(*tree_map_only(Tensor, lambda v: v.to(device), arguments)))

    return run
