"""The expert kernels and their ops on a GPU, beside PyTorch in the same dtype, both against float64."""

from __future__ import annotations

import pytest
import torch

from moec.codegen.triton import experts
from moec.compiler.dialect.registry import BODIES
from tests.kernels.expert_cases import LARGE, operands

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _poisoned() -> None:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", LARGE)
def test_errors_stay_near_those_of_pytorch(name: str, dtype: torch.dtype) -> None:
    from tests.kernels.check_experts import LAUNCH, errors

    for what, (ours, plain) in errors(LARGE[name], dtype, LAUNCH, "cuda").items():
        assert ours <= 1.5 * plain + 1e-6, (what, ours, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_same_bits_again_and_wherever_the_experts_are(dtype: torch.dtype) -> None:
    from tests.kernels.check_experts import LAUNCH, placed_elsewhere

    placed_elsewhere(dtype, LAUNCH, "cuda")


@pytest.mark.parametrize("op", list(experts.TABLE), ids=str)
@pytest.mark.parametrize("name", ["plain", "interleaved, transposed, biased, clamped", "more experts than rows"])
def test_ops_run_the_kernels_and_agree_with_their_references(op: torch._ops.OpOverload, name: str) -> None:
    arguments = operator_arguments(op, name, torch.bfloat16)
    assert not experts.reason(op, *arguments)
    for found, truth in zip(_several(op(*arguments)), _several(BODIES[op](*_doubled(arguments))), strict=True):
        assert found.shape == truth.shape
        assert float((found.double() - truth.double()).norm()) <= 5e-3 * float(truth.double().norm())


def test_a_captured_graph_follows_other_routings() -> None:
    from moec.codegen.triton import expert_launch as kernels

    case = LARGE["plain"]
    given = operands(case, torch.bfloat16, "cuda")

    def run() -> torch.Tensor:
        _, position, offsets = kernels.slots(given.indices, case.experts)
        rows = kernels.spread(given.x, position, case.choices)
        return kernels.combine(
            kernels.linear(rows, given.up, offsets, transposed=False), position, given.weights, case.choices
        )

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    for shift in range(3):
        given.indices.copy_((given.indices + shift) % case.experts)
        graph.replay()
        assert torch.equal(result, run())


def operator_arguments(op: torch._ops.OpOverload, name: str, dtype: torch.dtype) -> list[object]:
    """What an op is called with, by the names of its arguments."""
    case = LARGE[name]
    given = operands(case, dtype, "cuda")
    rows, order, offsets = BODIES[torch.ops.moec.permute.default](given.x, given.indices, case.experts)
    width = given.up.shape[2 if case.transposed else 1]
    values = {
        "indices": given.indices, "experts": case.experts, "order": order, "offsets": offsets, "rows": rows,
        "grad_rows": torch.randn_like(rows), "weights": given.weights, "weight": given.up, "bias": given.up_bias,
        "transposed": case.transposed, "needed": None,
        "x": given.x if op is torch.ops.moec.permute.default else rows,
        "grad_y": given.grad if "unpermute" in str(op) else torch.randn(rows.shape[0], width, dtype=dtype).cuda(),
    }  # fmt: skip
    return [values[argument.name] for argument in op._schema.arguments]


def _doubled(values: list[object]) -> list[object]:
    return [v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in values]


def _several(values: object) -> tuple[torch.Tensor, ...]:
    return values if isinstance(values, tuple) else (values,)  # type: ignore[return-value]
